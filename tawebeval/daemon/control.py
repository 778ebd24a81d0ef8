"""What the operator orders a daemon that runs, over a UNIX socket of its own: to reload.

A signal cannot be answered, so who has sent SIGHUP knows neither when it was heeded nor whether
the files were good. Here a line is an order: `reload`, and behind it `NAME=DIGEST` for each file of
which systemd hands over a copy, as it is now. The answer is lines for people, and then the outcome:
`done`, after what is to be known of it, or `refused`, after each thing that was wrong. Without that
the daemon has ended before it came to it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IListeningPort
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.protocols.basic import LineOnlyReceiver

from tawebeval.errors import ConfigurationError
from tawebeval.reloadable import ReloadResult

_SOCKET = "control"
_RELOAD = "reload"
_DONE, _REFUSED = b"done", b"refused"

Reload = Callable[[Mapping[str, str]], ReloadResult]
"""Reloads, but not by copies of which the originals now have other digests than they; by names."""

log = Logger()


class Orders(LineOnlyReceiver):
    """Takes one order on a connection."""

    delimiter = b"\n"
    MAX_LENGTH = 4096  # bytes; whoever sends more is cut off

    def __init__(self, reload: Reload) -> None:
        self._reload = reload

    def lineReceived(self, line: bytes) -> None:
        """Do what is ordered, and answer."""
        order, *originals = line.decode(errors="replace").split(" ")
        if order == _RELOAD:
            pairs = (original.partition("=") for original in originals)
            outcome = self._reload({name: digest for name, _, digest in pairs})
        else:
            outcome = ReloadResult(("there is no such order",))
        for said in outcome.problems or outcome.notes:
            self.sendLine(said.replace("\n", " ").encode())
        self.sendLine(_REFUSED if outcome.problems else _DONE)
        assert self.transport is not None, "it has sent something"
        self.transport.loseConnection()


@attrs.define(eq=False, slots=False)
class OrdersFactory(Factory):
    """Makes `Orders`."""

    noisy = False  # what it does is logged where it is done
    reload: Reload

    def buildProtocol(self, _: object) -> Orders:
        """Return what takes the orders of one connection."""
        return Orders(self.reload)


def find_socket(environment: Mapping[str, str]) -> Path | None:
    """Return where the socket is, in the first of the runtime directories that systemd has made."""
    folder = environment.get("RUNTIME_DIRECTORY", "").split(":")[0]
    return Path(folder, _SOCKET) if folder else None


class ControlSocket(Service):
    """Takes orders at `path`, of this user and of root alone; elsewhere there is still SIGHUP."""

    name = "orders"

    def __init__(self, path: Path, reload: Reload, reactor: Any) -> None:
        self._path = os.fspath(path)
        self._factory = OrdersFactory(reload)
        self._reactor = reactor
        self._port: IListeningPort | None = None

    def startService(self) -> None:
        """Listen; a place that is somebody else's is logged."""
        super().startService()
        try:
            # With a lock, by which a socket is known that a killed daemon has left.
            self._port = self._reactor.listenUNIX(
                self._path, self._factory, mode=0o600, wantPID=True
            )
        except (CannotListenError, OSError) as error:
            log.warn(
                "no orders are taken at {path}, so reload by SIGHUP: {error}",
                path=self._path,
                error=error,
            )

    def stopService(self) -> Deferred[None] | None:
        """Listen no more."""
        super().stopService()
        port, self._port = self._port, None
        return port.stopListening() if port else None


def order_reload(
    path: Path, patience: float, originals: Mapping[str, str] | None = None
) -> ReloadResult:
    """Have the daemon at `path` reload; return what has come of it, once it is done. Blocks.

    `originals` are digests of the files of which systemd hands over copies, by their names there.
    Raises ConfigurationError where there is no daemon, or none that answers within `patience`
    seconds.
    """
    answer = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(patience)
        try:
            connection.connect(os.fspath(path))
            pairs = (originals or {}).items()
            order = " ".join([_RELOAD, *(f"{name}={digest}" for name, digest in pairs)])
            connection.sendall(f"{order}\n".encode())
            while chunk := connection.recv(4096):
                answer += chunk
        except TimeoutError:
            raise ConfigurationError(
                f"{path}: the daemon has not answered within {patience:g} seconds"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"{path}: no daemon is there: {error.strerror}") from None
    *lines, outcome = answer.splitlines() or [b""]
    said = tuple(line.decode(errors="replace") for line in lines)
    if outcome == _DONE:
        return ReloadResult(notes=said)
    if outcome != _REFUSED:
        raise ConfigurationError(f"{path}: the daemon has ended before it answered")
    return ReloadResult(problems=said)
