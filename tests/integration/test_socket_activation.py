"""The daemon takes over a socket that systemd has opened, as in `systemd/tawebeval.service`."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from tawebeval import __version__
from tests.cases.patience import PATIENCE
from tests.cases.units import read_unit
from tests.integration.harness import TWISTD, environment
from tests.integration.unprivileged import SERVICE, temporary_folder

# What systemd does: the sockets are the file descriptors from 3 on, and belong to this process.
ACTIVATE = """\
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "tawebeval.socket"}
os.environ["LISTEN_PID"] = os.environ.get("PRETENDED_PID", str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""


class SocketActivationTests(SynchronousTestCase):
    """A daemon below something that behaves like systemd."""

    def setUp(self) -> None:
        self.folder = temporary_folder("tawebeval-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.log = self.folder / "log"
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(self.socket.close)

    def start(self, **more: str) -> subprocess.Popen[bytes]:
        """Start the service's command with the socket; it need not listen yet."""
        command = read_unit("tawebeval.service")["Service"]["ExecStart"].split()
        (self.folder / "tawebeval.toml").write_text(SERVICE)
        command[command.index("--config") + 1] = str(self.folder / "tawebeval.toml")
        activate = [sys.executable, "-c", ACTIVATE, str(self.socket.fileno()), str(TWISTD)]
        variables = environment(
            STATE_DIRECTORY=str(self.folder / "state"),
            CACHE_DIRECTORY=str(self.folder / "cache"),
            **more,
        )
        with self.log.open("ab") as log:
            daemon = subprocess.Popen(
                [*activate, *command[1:]],
                cwd=self.folder,
                env=variables,
                pass_fds=[self.socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.addCleanup(daemon.wait)
        self.addCleanup(daemon.kill)
        return daemon

    def ask(self) -> tuple[int, object]:
        """Return the status and the body of `GET /health`."""
        connection = http.client.HTTPConnection(*self.socket.getsockname(), timeout=PATIENCE)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            return response.status, json.load(response)
        except OSError as error:
            raise AssertionError(f"{error}; the log:\n{self.log.read_text()}") from None
        finally:
            connection.close()

    def test_answers(self) -> None:
        """Who connects before the daemon runs is answered as soon as it does, and after."""
        daemon = self.start()
        healthy = (200, {"status": "ok", "version": __version__})
        self.assertEqual(self.ask(), healthy)
        self.assertEqual(self.ask(), healthy)
        daemon.send_signal(signal.SIGTERM)
        self.assertEqual(daemon.wait(PATIENCE), -signal.SIGTERM)
        self.assertNotIn("Traceback", self.log.read_text())

    def test_restart(self) -> None:
        """The socket outlives the daemon: while there is none, nobody is refused."""
        for _ in range(2):
            daemon = self.start()
            self.assertEqual(self.ask()[0], 200)
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(PATIENCE)

    def test_without_a_socket(self) -> None:
        """A daemon that was given no socket says so, and does not start."""
        daemon = self.start(PRETENDED_PID="1")
        self.assertEqual(daemon.wait(PATIENCE), 1)
        log = self.log.read_text()
        self.assertIn("listen: systemd passes no socket for 'systemd:domain=INET:index=0'", log)
        self.assertNotIn("Traceback", log)
