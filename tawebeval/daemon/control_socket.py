"""Control socket: `tawebeval reload` asks a running daemon to reload, and waits for the result.

SIGHUP has no answer: its sender learns neither when the reload ended nor whether it succeeded. On
this UNIX socket a request is the line `reload`. The response is lines for people, then the result:
`done` after the notes, or `refused` after the problems. A response without a result means that the
daemon has ended.
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

log = Logger()


class ControlProtocol(LineOnlyReceiver):
    """Server side of the control socket: one request for each connection."""

    delimiter = b"\n"
    MAX_LENGTH = 4096  # bytes of a line; a longer one closes the connection

    def __init__(self, on_reload: Callable[[], ReloadResult]) -> None:
        self._on_reload = on_reload

    def lineReceived(self, line: bytes) -> None:
        """Handle a request and respond."""
        command = line.decode(errors="replace")
        if command == _RELOAD:
            outcome = self._on_reload()
        else:
            outcome = ReloadResult((f"unknown request {command[:80]!r}; allowed: {_RELOAD}",))
        for message in outcome.error_messages or outcome.operator_notes:
            self.sendLine(message.replace("\n", " ").encode())
        self.sendLine(_REFUSED if outcome.error_messages else _DONE)
        assert self.transport is not None, "lines arrive only while connected"
        self.transport.loseConnection()


@attrs.define(eq=False, slots=False)
class ControlFactory(Factory):
    """Factory of `ControlProtocol`."""

    noisy = False  # `ReloadService` logs each reload
    on_reload: Callable[[], ReloadResult]

    def buildProtocol(self, _: object) -> ControlProtocol:
        """Return the protocol of a connection."""
        return ControlProtocol(self.on_reload)


def find_control_socket(environment: Mapping[str, str]) -> Path | None:
    """Return the socket's path in the first RUNTIME_DIRECTORY; None without systemd."""
    folder = environment.get("RUNTIME_DIRECTORY", "").split(":")[0]
    return Path(folder, _SOCKET) if folder else None


class ControlSocket(Service):
    """Listener at `path` (mode 0600). If it cannot listen, SIGHUP still reloads."""

    name = "control"

    def __init__(self, path: Path, on_reload: Callable[[], ReloadResult], reactor: Any) -> None:
        self._path = os.fspath(path)
        self._factory = ControlFactory(on_reload)
        self._reactor = reactor
        self._port: IListeningPort | None = None

    def startService(self) -> None:
        """Listen. A failure is logged."""
        super().startService()
        try:
            # The lock (wantPID) tells the stale socket of a killed daemon from one in use.
            self._port = self._reactor.listenUNIX(
                self._path, self._factory, mode=0o600, wantPID=True
            )
        except (CannotListenError, OSError) as error:
            log.warn(
                "`tawebeval reload` does not work, as {path} cannot be opened: {error}; use SIGHUP",
                path=self._path,
                error=error,
            )

    def stopService(self) -> Deferred[None] | None:
        """Stop listening."""
        super().stopService()
        port, self._port = self._port, None
        return port.stopListening() if port else None


def request_reload(path: Path, timeout: float) -> ReloadResult:
    """Ask the daemon at the socket `path` to reload; return the result. Blocks.

    `timeout` is in seconds. Raises: ConfigurationError, if no daemon answers.
    """
    response = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(os.fspath(path))
            connection.sendall(f"{_RELOAD}\n".encode())
            while chunk := connection.recv(4096):
                response += chunk
        except TimeoutError:
            raise ConfigurationError(
                f"{path}: the daemon did not answer within {timeout:g} seconds; see its log"
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"cannot connect to the daemon at {path}: {error.strerror or error}; is it running?"
                " Without systemd, send it SIGHUP"
            ) from None
    *lines, outcome = response.splitlines() or [b""]
    messages = tuple(line.decode(errors="replace") for line in lines)
    if outcome == _DONE:
        return ReloadResult(operator_notes=messages)
    if outcome != _REFUSED:
        raise ConfigurationError(f"{path}: the daemon ended before it answered; see its log")
    return ReloadResult(error_messages=messages)
