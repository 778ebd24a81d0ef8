"""`daemon.control_socket`: a request is answered with its result, over a real UNIX socket."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from click.testing import CliRunner, Result
from twisted.internet import reactor
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.testing import StringTransport
from twisted.internet.threads import deferToThread
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase, TestCase

from tawebeval.cli import main as command
from tawebeval.daemon.control_socket import (
    ControlFactory,
    ControlSocket,
    find_control_socket,
    request_reload,
)
from tawebeval.errors import ConfigurationError
from tawebeval.reloadable import ReloadResult
from tests.cases.patience import PATIENCE


class ControlProtocolTests(SynchronousTestCase):
    """The daemon's side, byte by byte."""

    def answer(
        self, request: bytes, *problems: str, notes: tuple[str, ...] = ()
    ) -> tuple[bytes, int]:
        """Return the answer to what is sent, and how often something was reloaded."""
        reloads: list[None] = []

        def reload() -> ReloadResult:
            reloads.append(None)
            return ReloadResult(problems, notes)

        transport = StringTransport()
        protocol = ControlFactory(reload).buildProtocol(None)
        protocol.makeConnection(transport)
        for byte in request:
            protocol.dataReceived(bytes([byte]))
        self.assertTrue(transport.disconnecting)
        return transport.value(), len(reloads)

    def test_answer_has_a_line_for_each_error_or_note_and_the_outcome(self) -> None:
        notes = ("listen: has changed", "a\nb")
        for problems, said, answer in (
            ((), (), b"done\n"),
            (("a: no\nsuch file", "b: empty"), (), b"a: no such file\nb: empty\nrefused\n"),
            ((), notes, b"listen: has changed\na b\ndone\n"),
            (("a: b",), notes, b"a: b\nrefused\n"),
        ):
            self.assertEqual(self.answer(b"reload\n", *problems, notes=said), (answer, 1))

    def test_other_requests_are_refused_without_effect(self) -> None:
        self.assertEqual(
            self.answer(b"stop\n"), (b"unknown request 'stop'; allowed: reload\nrefused\n", 0)
        )
        self.assertEqual(self.answer(b"\n"), (b"unknown request ''; allowed: reload\nrefused\n", 0))
        self.assertEqual(self.answer(b"x" * 5000), (b"", 0))

    def test_socket_is_in_the_first_runtime_directory(self) -> None:
        self.assertIsNone(find_control_socket({}))
        self.assertIsNone(find_control_socket({"RUNTIME_DIRECTORY": ""}))
        found = find_control_socket({"RUNTIME_DIRECTORY": "/run/a:/run/b"})
        self.assertEqual(found, Path("/run/a/control"))


class SocketTestCase(TestCase):
    """A short folder, as the paths of sockets have to be."""

    timeout = 60

    def setUp(self) -> None:
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        self.path = Path(folder, "control")


class ReloadTests(SocketTestCase):
    """The operator's side: the service, and a program that sends requests to it."""

    def listen(self, *problems: str, notes: tuple[str, ...] = ()) -> ControlSocket:
        """Listen for requests; each gets this result."""
        control_socket = ControlSocket(self.path, lambda: ReloadResult(problems, notes), reactor)
        control_socket.startService()
        self.addCleanup(lambda: control_socket.running and control_socket.stopService())
        return control_socket

    def run_reload(self) -> Deferred[Result]:
        """Run the command."""
        return deferToThread(CliRunner().invoke, command, ["reload", "--socket", str(self.path)])

    async def check(self, status: int, said: str) -> None:
        """Hold how the command ends."""
        ended = await self.run_reload()
        self.assertEqual((ended.exit_code, ended.output), (status, said))

    async def test_command_prints_errors_or_notes_and_fails_for_errors_only(self) -> None:
        note = "listen: changed; takes effect after a restart"
        errors = ("tokens: line 2", "password: is empty")
        for problems, notes, status, said in (
            ((), (), 0, ""),
            (errors, (), 1, "tawebeval: tokens: line 2\ntawebeval: password: is empty\n"),
            ((), (note,), 0, f"tawebeval: {note}\n"),
        ):
            service = self.listen(*problems, notes=notes)
            await self.check(status, said)
            await maybeDeferred(service.stopService)

    async def test_log_has_the_outcome_and_no_line_of_the_factory(self) -> None:
        with capturedLogs() as logged:
            self.listen()
        said = [str(formatEvent(event)) for event in logged]
        self.assertFalse([line for line in said if line.startswith("Starting factory")], said)

    async def test_missing_daemon_is_reported(self) -> None:
        await self.check(
            3,
            f"tawebeval: cannot connect to the daemon at {self.path}: No such file or directory; is"
            " it running? Without systemd, send it SIGHUP\n",
        )

    async def test_daemon_goes_on_without_a_control_socket(self) -> None:
        self.path = self.path / "missing" / "control"
        with capturedLogs() as logged:
            self.listen()
        (event,) = (event for event in logged if event["log_level"] is LogLevel.warn)
        said = str(formatEvent(event))
        self.assertTrue(said.startswith(f"`tawebeval reload` does not work, as {self.path} cannot"))

    async def test_stop_closes_and_removes_the_socket(self) -> None:
        await maybeDeferred(self.listen().stopService)
        self.assertEqual(os.listdir(self.path.parent), [])

    async def test_only_the_user_can_connect_and_a_stale_socket_is_replaced(self) -> None:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(os.fspath(self.path))
        os.symlink("2147483647", f"{self.path}.lock")  # the number of a process that has gone
        self.listen()
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)
        await self.check(0, "")


class LostTests(SocketTestCase):
    """A daemon that does not come to answer."""

    def complaint(self, daemon: Callable[[socket.socket], object], patience: float) -> str:
        """Return what is said of a daemon that does this with a connection."""
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(os.fspath(self.path))
            listening.listen()

            def serve() -> None:
                with listening.accept()[0] as connection:
                    daemon(connection)

            serving = Thread(target=serve)
            serving.start()
            error = self.assertRaises(ConfigurationError, request_reload, self.path, patience)
            serving.join()
        return str(error)

    def test_connection_that_ends_within_the_answer_is_an_error(self) -> None:
        for said in (b"", b"tokens: li", b"tokens: line 2\n", b"done\ndo"):

            def end(connection: socket.socket, said: bytes = said) -> None:
                connection.recv(100)
                connection.sendall(said)

            self.assertIn("the daemon ended before it answered", self.complaint(end, PATIENCE))
            self.path.unlink()

    def test_daemon_that_hangs_is_not_waited_for_endlessly(self) -> None:
        said = self.complaint(lambda connection: connection.recv(100) and connection.recv(1), 0.05)
        self.assertIn("did not answer within 0.05 seconds", said)
