"""Lists of evaluations of the other daemons that share this daemon's address.

The operator has chosen the URLs, but a daemon may be away, hang, or answer with anything: an answer
has `PEER_TIMEOUT` seconds, and `MAX_LIST_ENTRY_BYTES` for each evaluation that it may have. A
request carries the caller's own credentials, and `SINGLE_DAEMON_LIST_HEADER`: its receiver asks
nobody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlencode

import attrs
from treq.client import HTTPClient
from treq.content import collect
from twisted.internet.defer import CancelledError, Deferred, FirstError, gatherResults
from twisted.internet.defer import TimeoutError as TookTooLong
from twisted.logger import Logger
from twisted.web.client import BrowserLikePolicyForHTTPS
from twisted.web.http import BAD_REQUEST, FORBIDDEN, OK, UNAUTHORIZED
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent

from tawebeval import __version__
from tawebeval.core.evaluations import (
    DaemonListPage,
    make_invalid_cursor_error,
    parse_list_page,
)
from tawebeval.core.hosts import HostPolicy, IPAddress, ServerAddress, parse_server_address
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import InvalidCursor, ServerBusy, TawebevalError
from tawebeval.pinned_agent import (
    CachedPolicyForHTTPS,
    PinnedAgent,
    ResponseSizeLimit,
    convert_request_failures,
)
from tawebeval.resolver import CheckedResolver, Resolver

SINGLE_DAEMON_LIST_HEADER = "Tawebeval-Own-List"
"""Header of a request for the list of one daemon alone; its value is the most entries."""

PEER_TIMEOUT = 2.0
"""Seconds in which a daemon has to answer."""

MAX_CONCURRENT_FAN_OUTS = 16
"""Lists over all daemons at once; further ones are refused."""

MAX_FAN_OUTS_PER_CALLER = 4
"""Those of one caller with a token."""

MAX_LIST_ENTRY_BYTES = 48 * 1024
"""Bytes of one evaluation in a list, at most: 20 KiB of results, and labels with their escapes."""

_NO_CALLER = (UNAUTHORIZED, FORBIDDEN)  # though this daemon has accepted the token
_HEAD_BYTES = 16 * 1024
_EVERY_NETWORK = ("0.0.0.0/0", "::/0")  # the operator has chosen the hosts

log = Logger()


@attrs.frozen
class PeerListRequest:
    """A request of a caller for parts of lists; `limit` is the most entries of each.

    `caller` is the caller's name, ANONYMOUS_CALLER without tokens. `authorization` are the
    caller's headers of this name.
    """

    caller: str
    authorization: Sequence[bytes]
    filter_parameters: Mapping[str, str]
    limit: int


@attrs.define(eq=False)
class PeerEvaluationLists:
    """The lists of other daemons.

    `agent` returns an agent for a server at its addresses, whose answers are limited.
    """

    _clock: Any
    _resolver: CheckedResolver
    _agent: Callable[[ServerAddress, Sequence[IPAddress], ResponseSizeLimit], IAgent]
    _running: Counter[str] = attrs.field(factory=Counter, init=False)  # lists by caller
    _away: set[str] = attrs.field(factory=set, init=False)  # URLs of which the log has the reason

    async def fetch_list_pages(
        self, urls: Mapping[str, str], cursors: Mapping[str, str | None], request: PeerListRequest
    ) -> dict[str, DaemonListPage]:
        """Return the next parts of the lists of these daemons, without those that are away.

        `urls` are the base URLs by name, `cursors` the cursors. Raises: ServerBusy; InvalidCursor,
        if a daemon refuses its cursor.
        """
        caller = request.caller
        has_share = caller == ANONYMOUS_CALLER or self._running[caller] < MAX_FAN_OUTS_PER_CALLER
        if not has_share or self._running.total() >= MAX_CONCURRENT_FAN_OUTS:
            raise ServerBusy("too many lists over all daemons at once; try again in a moment", 1)
        attempts = [
            Deferred.fromCoroutine(self._fetch(name, url, cursors[name], request))
            for name, url in urls.items()
        ]
        self._running[caller] += 1
        try:
            # It is cancelled when the client has left.
            found = await gatherResults(attempts, consumeErrors=True)
        except FirstError as error:
            error.subFailure.raiseException()
        finally:
            for attempt in attempts:
                attempt.cancel()  # the others, if a daemon has refused its cursor
            self._running -= Counter([caller])  # forgets a caller without lists
        return {name: one for name, one in zip(urls, found, strict=True) if one is not None}

    async def _fetch(
        self, name: str, url: str, cursor: str | None, request: PeerListRequest
    ) -> DaemonListPage | None:
        """Return a part; None if the daemon is away. Raises: InvalidCursor."""
        limit = ResponseSizeLimit(_HEAD_BYTES + request.limit * MAX_LIST_ENTRY_BYTES)
        attempt = Deferred.fromCoroutine(self._request(url, cursor, request, limit))
        try:
            status, body = await attempt.addTimeout(PEER_TIMEOUT, self._clock)
            if status == BAD_REQUEST and cursor:
                raise make_invalid_cursor_error(cursor)
            if status != OK:
                hint = "; are its callers.tokens the same?" if status in _NO_CALLER else ""
                raise ValueError(f"status {status}{hint}")
            part = parse_list_page(body, name)
        except (CancelledError, InvalidCursor):
            raise
        except Exception as error:  # noqa: BLE001  (the list goes on without this daemon)
            self._log_fault(name, url, error)
            return None
        finally:
            limit.abort_connection()
        self._away.discard(url)
        return part

    async def _request(
        self, url: str, cursor: str | None, request: PeerListRequest, limit: ResponseSizeLimit
    ) -> tuple[int, bytes]:
        """Return status and body of a daemon's answer."""
        target = parse_server_address(url)
        assert target is not None, "the configuration accepts URLs only"
        addresses = await self._resolver.find_addresses(target, PEER_TIMEOUT)
        query = {**request.filter_parameters, **({"after": cursor} if cursor else {})}
        headers = Headers(
            {
                b"Authorization": list(request.authorization),
                b"User-Agent": [f"tawebeval/{__version__}".encode()],
                SINGLE_DAEMON_LIST_HEADER.encode(): [str(request.limit).encode()],
            }
        )
        body = bytearray()
        with convert_request_failures(target.host):
            response = await HTTPClient(self._agent(target, addresses, limit)).get(
                f"{url}/evaluations?{urlencode(query)}",
                headers=headers,
                allow_redirects=False,  # the caller's token is for nobody else
                unbuffered=True,
                reactor=self._clock,
            )
            await collect(response, body.extend)
        return response.code, bytes(body)

    def _log_fault(self, name: str, url: str, error: Exception) -> None:
        """Log why a daemon is away, once until it answers again."""
        if url in self._away:
            return
        self._away.add(url)
        reason = str(error)
        if isinstance(error, TookTooLong):
            reason = f"no answer within {PEER_TIMEOUT:g} seconds"
        elif not isinstance(error, (TawebevalError, ValueError)):
            log.failure("defect: the list of the daemon {name} cannot be read", name=name)
        log.warn(
            "the daemon {name} at {url} (service.peers) is left out of lists: {reason}",
            name=name,
            url=url,
            reason=reason,
        )


def make_peer_evaluation_lists(resolver: Resolver, reactor: Any) -> PeerEvaluationLists:
    """Return the lists of other daemons; `resolver` looks their hosts up."""
    policy = HostPolicy(allowed_private_networks=_EVERY_NETWORK, settings_section="service.peers")
    tls_policy = CachedPolicyForHTTPS(BrowserLikePolicyForHTTPS())
    return PeerEvaluationLists(
        reactor,
        CheckedResolver(policy, resolver, reactor),
        partial(PinnedAgent, reactor, tls_policy, PEER_TIMEOUT),
    )
