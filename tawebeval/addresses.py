"""From a URL's host to the one address to connect to: looked up once, checked."""

from __future__ import annotations

from ipaddress import ip_address
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

from tawebeval.errors import ForbiddenHost, TawebevalError
from tawebeval.hosts import Address, HostPolicy, Target

_LOOKUP = 30.0  # seconds: more than a resolver with its repetitions takes

log = Logger()


class UnknownHost(TawebevalError):
    """A host's name was looked up in vain, or for too long."""


@implementer(IResolutionReceiver)
class _Found:
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
class Addresses:
    """Holds hosts against the operator's rules; `resolver` looks names up without blocking."""

    _policy: HostPolicy
    _resolver: IHostnameResolver
    _clock: Any

    def check(self, target: Target) -> None:
        """Check what a URL itself tells. Raises ForbiddenHost."""
        self._policy.check(target)

    async def find(self, target: Target) -> Address:
        """Return the address to connect to. Raises ForbiddenHost, UnknownHost."""
        self.check(target)
        addresses = [target.address] if target.address else await self._look_up(target)
        try:
            return self._policy.choose(target, addresses)
        except ForbiddenHost:
            log.info("{host} was refused: {addresses}", host=target.host, addresses=addresses)
            raise

    async def _look_up(self, target: Target) -> list[Address]:
        receiver = _Found()
        self._resolver.resolveHostName(receiver, target.host, target.port)
        try:
            addresses = await receiver.complete.addTimeout(_LOOKUP, self._clock)
        except TookTooLong:
            raise UnknownHost(
                f"the host {target.host} could not be looked up within {_LOOKUP:g} seconds"
            ) from None
        if not addresses:
            raise UnknownHost(f"the host {target.host} has no address")
        return addresses
