"""`daemon.systemd`: systemd is told what the protocol says, and a silent one harms nobody."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon.systemd import Supervisor, find_supervisor


class Notices:
    """A socket such as systemd has, and what was sent to it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._socket.setblocking(False)

    def close(self) -> None:
        """Have nobody there any more."""
        self._socket.close()

    def take(self) -> list[str]:
        """Return the datagrams that have arrived since the last time."""
        taken = []
        while True:
            try:
                taken.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return taken


class SupervisorTests(SynchronousTestCase):
    """The protocol of sd_notify(3)."""

    def setUp(self) -> None:
        folder = tempfile.mkdtemp()  # short, as the paths of sockets have to be
        self.addCleanup(shutil.rmtree, folder)
        self.path = str(Path(folder, "notify"))

    def notices(self, address: str) -> Notices:
        """Return a socket that is closed after the test."""
        notices = Notices(address)
        self.addCleanup(notices.close)
        return notices

    def test_datagram(self) -> None:
        """All that is told at once is one datagram with a line for each."""
        notices = self.notices(self.path)
        supervisor = Supervisor(self.path)
        supervisor.tell("A=1", "B=tüchtig")
        supervisor.ready()
        self.assertEqual(notices.take(), ["A=1\nB=tüchtig", "READY=1"])

    def test_abstract(self) -> None:
        """An address may be a name that is in no directory."""
        notices = self.notices(f"@tawebeval-test-{os.getpid()}")
        Supervisor(notices.address).ready()
        self.assertEqual(notices.take(), ["READY=1"])

    def test_reloading(self) -> None:
        """A reload has its time, by the clock by which systemd looks for it."""
        notices = self.notices(self.path)
        before = time.clock_gettime(time.CLOCK_MONOTONIC)
        Supervisor(self.path).reloading()
        after = time.clock_gettime(time.CLOCK_MONOTONIC)
        (told,) = notices.take()
        first, _, moment = told.partition("\nMONOTONIC_USEC=")
        self.assertEqual(first, "RELOADING=1")
        self.assertTrue(before - 1e-5 <= int(moment) / 1e6 <= after, (before, moment, after))

    def test_stopping(self) -> None:
        """The time that a stop takes is told in microseconds."""
        notices = self.notices(self.path)
        Supervisor(self.path).stopping(12.5)
        self.assertEqual(notices.take(), ["STOPPING=1\nEXTEND_TIMEOUT_USEC=12500000"])

    def test_nobody(self) -> None:
        """Without systemd nothing is told, and nothing is wrong."""
        with capturedLogs() as logged:
            Supervisor().ready()
        self.assertEqual(list(logged), [])

    def test_gone(self) -> None:
        """One that does not listen is logged, with what it was not told."""
        with capturedLogs() as logged:
            Supervisor(self.path).tell("READY=1", "STATUS={well}")
        (event,) = logged
        said = formatEvent(event)
        self.assertTrue(said.startswith("systemd was not told READY=1, STATUS={well}: "), said)

    def test_full(self) -> None:
        """Nobody waits for one that takes nothing: the reactor has other things to do."""
        self.notices(self.path)
        most = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
        with capturedLogs() as logged:
            for _ in range(most + 2):
                Supervisor(self.path).ready()
        self.assertIn("systemd was not told READY=1", formatEvent(logged[-1]))


class EnvironmentTests(SynchronousTestCase):
    """What systemd puts into the environment."""

    def find(self, **environment: str) -> Supervisor:
        """Return what is made of an environment."""
        return find_supervisor(environment)

    def test_none(self) -> None:
        """Without a socket there is nobody, also where it is of a kind that is not spoken here."""
        self.assertEqual(self.find(), Supervisor())
        self.assertEqual(self.find(NOTIFY_SOCKET=""), Supervisor())
        self.assertEqual(self.find(NOTIFY_SOCKET="vsock:2:1234", WATCHDOG_USEC="1"), Supervisor())

    def test_address(self) -> None:
        """A path or an abstract name."""
        for address in ("/run/systemd/notify", "@notify"):
            self.assertEqual(self.find(NOTIFY_SOCKET=address), Supervisor(address))

    def test_watchdog(self) -> None:
        """It is told in microseconds, and is this process's or nobody's."""
        own = str(os.getpid())
        for environment, seconds in (
            ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": own}, 30.0),
            ({"WATCHDOG_USEC": "1500000"}, 1.5),
            ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, None),
            ({"WATCHDOG_PID": own}, None),
            ({"WATCHDOG_USEC": "0", "WATCHDOG_PID": own}, None),
            ({"WATCHDOG_USEC": "soon", "WATCHDOG_PID": own}, None),
        ):
            found = self.find(NOTIFY_SOCKET="/x", **environment)
            self.assertEqual(found.watchdog, seconds, environment)
