"""Host name resolution: from the host of a URL to addresses that the operator's rules allow."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Any, Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as TookTooLong
from twisted.logger import Logger

from tawebeval.core.hosts import HostPolicy, IPAddress, ServerAddress
from tawebeval.deferreds import OneShotEvent, WorkerThreads, make_one_shot_event
from tawebeval.errors import ForbiddenHost, TawebevalError

LOOKUP_TIMEOUT = 30.0
"""Maximum duration of a look-up, in seconds: longer than a resolver with its retries takes."""

# Errors of getaddrinfo(3) for a name that does not exist, or has no address.
_UNKNOWN = (socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY)

log = Logger()


class UnknownHost(TawebevalError):
    """A host that does not exist or has no address."""


class LookupUnanswered(TawebevalError):
    """A look-up that name servers or this machine failed to complete in time."""


class Resolver(Protocol):
    """Source of addresses."""

    async def look_up_host(self, host: str) -> Sequence[IPAddress]:
        """Return the addresses of a host. Raises: OSError, as getaddrinfo(3) does."""


@attrs.define(eq=False)
class _Lookup:
    """A look-up that runs, or waits for a thread. `waiters` counts the coroutines that await it."""

    _host: str
    waiters: int = 0
    is_started: bool = False
    is_abandoned: bool = False
    outcome: OneShotEvent[Callable[[], Sequence[IPAddress]]] = attrs.field(init=False)

    def resolve(self) -> Sequence[IPAddress]:
        """Look the host up, unless the look-up is abandoned. Blocks. Raises: OSError."""
        if self.is_abandoned:
            return ()
        self.is_started = True
        found = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        return [ip_address(address[0]) for *_, address in found]


class SystemResolver:
    """Resolver by getaddrinfo(3) in threads of its own; one look-up for each host at a time.

    A running look-up cannot be stopped: without waiters it keeps its thread until the system gives
    up. So a host whose name server does not answer takes one thread, however often it is asked for.
    A look-up without waiters that has no thread yet never starts.
    """

    def __init__(self, threads: WorkerThreads) -> None:
        self._threads = threads
        self._lookups: dict[str, _Lookup] = {}

    def start(self) -> None:
        """Start the threads. Raises: OSError."""
        self._threads.start()

    def stop(self) -> None:
        """Abandon look-ups; their threads end with the process."""

    async def look_up_host(self, host: str) -> Sequence[IPAddress]:
        """Return the addresses of a host. Raises: OSError."""
        lookup = self._lookups.get(host)
        if lookup is None:
            lookup = self._lookups[host] = _Lookup(host)
            lookup.outcome = make_one_shot_event(
                Deferred.fromCoroutine(self._threads.run_in_thread(lookup.resolve))
            )
            lookup.outcome.add_callback(lambda _: self._remove(host, lookup))
        lookup.waiters += 1
        try:
            return (await lookup.outcome.wait())()
        finally:
            lookup.waiters -= 1
            if not lookup.waiters and not lookup.is_started:
                lookup.is_abandoned = True
                self._remove(host, lookup)

    def _remove(self, host: str, lookup: _Lookup) -> None:
        if self._lookups.get(host) is lookup:
            del self._lookups[host]


@attrs.frozen
class CheckedResolver:
    """Resolver that checks hosts and addresses against the operator's rules."""

    _policy: HostPolicy
    _resolver: Resolver
    _clock: Any

    def check_host(self, server: ServerAddress) -> None:
        """Check the host of a URL before the look-up. Raises: ForbiddenHost."""
        self._policy.check_host(server)

    async def find_addresses(
        self, server: ServerAddress, timeout: float = LOOKUP_TIMEOUT
    ) -> Sequence[IPAddress]:
        """Return the addresses to try in turn, within `timeout` seconds.

        Raises: ForbiddenHost, UnknownHost, LookupUnanswered.
        """
        self.check_host(server)
        addresses = (
            [server.ip_address] if server.ip_address else await self._look_up(server.host, timeout)
        )
        try:
            return self._policy.choose_addresses(server, addresses)
        except ForbiddenHost:
            log.info(
                "the host {host} is refused for its addresses: {addresses}",
                host=server.host,
                addresses=addresses,
            )
            raise

    async def _look_up(self, host: str, timeout: float) -> Sequence[IPAddress]:
        looked_up = Deferred.fromCoroutine(self._resolver.look_up_host(host))
        try:
            addresses = await looked_up.addTimeout(timeout, self._clock)
        except TookTooLong:
            raise LookupUnanswered(
                f"the DNS look-up of the host {host} took over {timeout:g} seconds"
            ) from None
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise LookupUnanswered(
                    f"the DNS look-up of the host {host} failed: {error.strerror}"
                ) from None
            addresses = ()
        except UnicodeError:  # IDNA (RFC 5891)
            addresses = ()
        if not addresses:
            raise UnknownHost(
                f"the host {host} does not exist or has no address; check its spelling"
            )
        return addresses
