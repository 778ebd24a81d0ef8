"""From a URL to the one address that git may connect to: looked up once, checked, kept to."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from os.path import abspath, realpath
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as TookTooLong
from twisted.internet.interfaces import (
    IAddress,
    IHostnameResolver,
    IHostResolution,
    IResolutionReceiver,
)
from twisted.logger import Logger
from zope.interface import implementer

from tawebeval.credentials import Credential, Login
from tawebeval.errors import EvaluationError
from tawebeval.hosts import Address, HostPolicy, Route, Target, path_of, route, target_of

_LOOKUP = 30.0  # seconds: more than a resolver with its repetitions takes

# Through these a process could be asked for what it has open.
KERNEL = tuple(map(Path, ("/proc", "/sys", "/dev")))

log = Logger()


@implementer(IResolutionReceiver)
class _Addresses:
    """Gathers a host's addresses."""

    def __init__(self) -> None:
        self.complete: Deferred[list[Address]] = Deferred()
        self._found: list[Address] = []

    def resolutionBegan(self, resolutionInProgress: IHostResolution) -> None:
        """Do nothing: a look-up that is not waited for any more ends by itself."""

    def addressResolved(self, address: IAddress) -> None:
        if isinstance(address, IPv4Address | IPv6Address):
            self._found.append(ip_address(address.host))

    def resolutionComplete(self) -> None:
        if not self.complete.called:
            self.complete.callback(self._found)


@attrs.frozen
class Remotes:
    """Holds URLs against the operator's rules; `resolver` looks names up without blocking.

    `own` are directories of the daemon, absolute and without symbolic links.
    """

    _policy: HostPolicy
    _resolver: IHostnameResolver
    _clock: Any
    _own: Sequence[Path] = ()

    def check(self, url: str) -> None:
        """Check what the URL itself tells. Raises EvaluationError."""
        self._target(url)

    async def route(
        self, url: str, credential: Credential | None = None
    ) -> tuple[Route, Login | None]:
        """Return how git is to reach the repository, and what it says there when it is asked.

        Raises EvaluationError.
        """
        target = self._target(url)
        if target is None:
            path = path_of(url)
            # As git looks for it, which takes `x.git` for `x`, too.
            return Route(url, source=path, readable=(path, f"{path}.git")), None
        addresses = [target.address] if target.address else await self._look_up(target)
        try:
            address = self._policy.choose(target, addresses)
        except EvaluationError:
            log.info("{host} was refused: {addresses}", host=target.host, addresses=addresses)
            raise
        if credential is None:
            return route(url, target, address), None
        login = credential.login(target, address)
        found = route(url, target, address, credential.ssh_options)
        return attrs.evolve(found, readable=credential.files), login

    def check_source(self, path: str) -> None:
        """Look whether a repository of this machine is one to serve. Blocks.

        Raises EvaluationError for the daemon's own directories, and for what has them in it.
        """
        names = (path, f"{path}.git")
        places = [Path(find(name)) for name in names for find in (abspath, realpath)]
        for own in (*self._own, *KERNEL):
            if any(one.is_relative_to(own) or own.is_relative_to(one) for one in places):
                raise EvaluationError(
                    "repository", f"{path} is no place from which repositories are fetched"
                )

    def _target(self, url: str) -> Target | None:
        try:
            target = target_of(url)
        except ValueError as error:
            raise EvaluationError("repository", f"the repository's URL {error}") from None
        if target is not None:
            self._policy.check(target)
        return target

    async def _look_up(self, target: Target) -> list[Address]:
        receiver = _Addresses()
        self._resolver.resolveHostName(receiver, target.host, target.port)
        try:
            return await receiver.complete.addTimeout(_LOOKUP, self._clock)
        except TookTooLong:
            raise EvaluationError(
                "repository",
                f"the host {target.host} could not be looked up within {_LOOKUP:g} seconds",
            ) from None
