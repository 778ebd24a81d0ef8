"""Interfaces by which connections and requests know their site and the API."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from twisted.internet.interfaces import IReactorTime
from twisted.web.iweb import IRequest

from tawebeval.web.server.base_path import BasePath
from tawebeval.web.server.limits import AddressResolver, ConnectionLimits, OpenConnections

GONE = 499
"""In place of a status, as nginx has it: the client went away before it was answered."""


class Form(Protocol):
    """The body of a request, parsed while it arrives. Methods raise RequestErrors."""

    def feed(self, chunk: bytes) -> None:
        """Parse a part of the body."""

    def abandon(self, discard: Callable[[Path, int], object]) -> None:
        """Store nothing more; then call `discard` with the directory and the bytes received."""


class Application(Protocol):
    """The API. What it refuses it refuses by RequestErrors."""

    @property
    def origins(self) -> Collection[str]:
        """The origins whose pages may read responses; `*` for any."""

    def admit(self, request: IRequest) -> str:
        """Count a request, and return the name of its caller."""

    def receive_form(self, request: IRequest, length: int | None) -> Form | None:
        """Return the receiver of the body, of `length` bytes if known; None if none is expected."""

    def check_open(self) -> None:
        """Raise Stopping if the daemon takes no more forms."""

    def discard(self, directory: Path, size: int) -> None:
        """Remove what an abandoned form of `size` bytes has stored."""

    def answered(self, request: IRequest, status: int, seconds: float) -> None:
        """Count and log a request that took so long; `status` may be GONE."""

    def refused(self, status: int, address: str) -> None:
        """Count and log what a client sent in place of a request."""


class FastPath(Protocol):
    """Responses to plain requests on one connection, without request objects."""

    def take(self, data: bytes) -> bool:
        """Answer what was received, if it is one plain request; else return False."""


class Host(Protocol):
    """The site of a connection."""

    application: Application
    clients: AddressResolver
    clock: IReactorTime
    connections: ConnectionLimits
    mount: BasePath
    presence: OpenConnections
