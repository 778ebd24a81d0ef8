"""`daemon.systemd`: what systemd is sent, and when, over the life of the daemon."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from twisted.internet.testing import MemoryReactorClock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import (
    Configuration,
    RunnerSettings,
    ServiceSettings,
)
from tawebeval.daemon.systemd import SystemdNotifier, Watchdog, compute_stop_timeout, find_notifier
from tests.fakes.world import FakeNotifier


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


class NotifierTests(SynchronousTestCase):
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
        notifier = SystemdNotifier(self.path)
        notifier.send_notices("A=1", "B=tüchtig")
        notifier.notify_ready()
        self.assertEqual(notices.take(), ["A=1\nB=tüchtig", "READY=1"])

    def test_abstract(self) -> None:
        """An address may be a name that is in no directory."""
        notices = self.notices(f"@tawebeval-test-{os.getpid()}")
        SystemdNotifier(notices.address).notify_ready()
        self.assertEqual(notices.take(), ["READY=1"])

    def test_reloading(self) -> None:
        """A reload has its time, by the clock by which systemd looks for it."""
        notices = self.notices(self.path)
        before = time.clock_gettime(time.CLOCK_MONOTONIC)
        SystemdNotifier(self.path).notify_reloading()
        after = time.clock_gettime(time.CLOCK_MONOTONIC)
        (told,) = notices.take()
        first, _, moment = told.partition("\nMONOTONIC_USEC=")
        self.assertEqual(first, "RELOADING=1")
        self.assertTrue(before - 1e-5 <= int(moment) / 1e6 <= after, (before, moment, after))

    def test_stopping(self) -> None:
        """The time that a stop takes is told in microseconds."""
        notices = self.notices(self.path)
        SystemdNotifier(self.path).notify_stopping(12.5)
        self.assertEqual(notices.take(), ["STOPPING=1\nEXTEND_TIMEOUT_USEC=12500000"])

    def test_nobody(self) -> None:
        """Without systemd nothing is told, and nothing is wrong."""
        with capturedLogs() as logged:
            SystemdNotifier().notify_ready()
        self.assertEqual(list(logged), [])

    def test_gone(self) -> None:
        """One that does not listen is logged, with what it was not told."""
        with capturedLogs() as logged:
            SystemdNotifier(self.path).send_notices("READY=1", "STATUS={well}")
        (event,) = logged
        said = formatEvent(event)
        self.assertTrue(said.startswith("cannot notify systemd of READY=1, STATUS={well}: "), said)

    def test_full(self) -> None:
        """Nobody waits for one that takes nothing: the reactor has other things to do."""
        self.notices(self.path)
        most = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
        with capturedLogs() as logged:
            for _ in range(most + 2):
                SystemdNotifier(self.path).notify_ready()
        self.assertIn("cannot notify systemd of READY=1", formatEvent(logged[-1]))


class EnvironmentTests(SynchronousTestCase):
    """What systemd puts into the environment."""

    def find(self, **environment: str) -> SystemdNotifier:
        """Return what is made of an environment."""
        return find_notifier(environment)

    def test_none(self) -> None:
        """Without a socket there is nobody, also where it is of a kind that is not spoken here."""
        self.assertEqual(self.find(), SystemdNotifier())
        self.assertEqual(self.find(NOTIFY_SOCKET=""), SystemdNotifier())
        self.assertEqual(
            self.find(NOTIFY_SOCKET="vsock:2:1234", WATCHDOG_USEC="1"), SystemdNotifier()
        )

    def test_address(self) -> None:
        """A path or an abstract name."""
        for address in ("/run/systemd/notify", "@notify"):
            self.assertEqual(self.find(NOTIFY_SOCKET=address), SystemdNotifier(address))

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
            self.assertEqual(found.watchdog_seconds, seconds, environment)


class WatchdogTests(SynchronousTestCase):
    """The service, on a reactor in memory."""

    def setUp(self) -> None:
        self.reactor: Any = MemoryReactorClock()
        self.counts = (0, 0)
        self.obstacles: list[str] = []
        self.longest = 20.0

    def start(self, **changes: Any) -> list[str]:
        """Start the service; return what it tells, to be emptied by the test."""
        notifier = FakeNotifier(**{"socket_address": "/notify", "watchdog_seconds": 30, **changes})
        self.service = Watchdog(
            notifier,
            lambda: self.counts,
            lambda: self.obstacles,
            lambda: self.longest,
            self.reactor,
        )
        self.service.startService()
        return notifier.sent

    def run_reactor(self) -> None:
        """Let the reactor begin to turn."""
        for call, args, kwargs in self.reactor.whenRunningHooks:
            call(*args, **kwargs)

    def take(self, told: list[str]) -> list[str]:
        """Return what was told since the last time."""
        taken = told.copy()
        told.clear()
        return taken

    def test_ready(self) -> None:
        """Ready is what serves: nothing is told before the reactor runs."""
        told = self.start()
        self.assertEqual(told, [])
        self.run_reactor()
        self.assertEqual(told, ["READY=1", "WATCHDOG=1 STATUS=0 running, 0 queued"])

    def test_life(self) -> None:
        """Each second there is a sign of life, and what has changed beside it."""
        told = self.start()
        self.run_reactor()
        self.take(told)
        self.reactor.advance(1)
        self.assertEqual(self.take(told), ["WATCHDOG=1"])
        self.counts = (2, 5)
        self.reactor.pump([1, 1])
        self.assertEqual(self.take(told), ["WATCHDOG=1 STATUS=2 running, 5 queued", "WATCHDOG=1"])

    def test_not_ready(self) -> None:
        """Why no work would be taken is told with the rest, until it is over."""
        told = self.start(watchdog_seconds=None)
        self.run_reactor()
        self.take(told)
        self.obstacles = ["the disk is full", "the queue is full"]
        self.reactor.pump([1, 1])
        not_ready = "STATUS=0 running, 0 queued; not ready: the disk is full; the queue is full"
        self.assertEqual(self.take(told), [not_ready])
        self.obstacles = []
        self.reactor.advance(1)
        self.assertEqual(self.take(told), ["STATUS=0 running, 0 queued"])

    def test_impatient(self) -> None:
        """A watchdog that waits for less than two seconds is told in half of its time."""
        told = self.start(watchdog_seconds=0.4)
        self.run_reactor()
        self.take(told)
        self.reactor.pump([0.2, 0.2])
        self.assertEqual(self.take(told), ["WATCHDOG=1"] * 2)

    def test_no_watchdog(self) -> None:
        """Where nobody watches only changes are told."""
        told = self.start(watchdog_seconds=None)
        self.run_reactor()
        self.assertEqual(self.take(told), ["READY=1", "STATUS=0 running, 0 queued"])
        self.reactor.pump([1, 1])
        self.assertEqual(told, [])

    def test_stop(self) -> None:
        """The stop is told before anything is stopped, with its time, and life goes on until."""
        told = self.start()
        self.run_reactor()
        self.longest = 44.0
        self.counts = (3, 0)
        self.obstacles = ["the daemon is stopping"]
        self.take(told)
        for call, args, kwargs in self.reactor.triggers["before"]["shutdown"]:
            call(*args, **kwargs)
        self.assertEqual(
            self.take(told),
            [
                "STOPPING=1 EXTEND_TIMEOUT_USEC=44000000",
                "WATCHDOG=1 STATUS=stopping: 3 running, 0 queued",
            ],
        )
        self.reactor.advance(1)
        self.assertEqual(self.take(told), ["WATCHDOG=1"])
        self.service.stopService()
        self.reactor.advance(5)
        self.assertEqual(told, [])
        self.assertFalse(self.service.running)

    def test_stopped_early(self) -> None:
        """It can be stopped before the reactor has run."""
        self.start()
        self.service.stopService()
        self.assertFalse(self.service.running)

    def test_nobody(self) -> None:
        """Without systemd nothing is done at all."""
        told = self.start(socket_address=None)
        self.run_reactor()
        self.reactor.advance(5)
        self.assertEqual((told, self.reactor.triggers), ([], {}))
        self.service.stopService()


class LongestStopTests(SynchronousTestCase):
    """How long a stop may take."""

    def test_settings(self) -> None:
        """All that is waited for by configuration, and some seconds for readers."""
        settings = Configuration(
            service=ServiceSettings(drain=100),
        )
        self.assertEqual(compute_stop_timeout(settings), 128)

    def test_cluster(self) -> None:
        """Nodes that do not answer are waited for."""
        without = compute_stop_timeout(Configuration())
        settings = RunnerSettings(kind="slurm", shared="/shared")
        self.assertEqual(compute_stop_timeout(Configuration(runner=settings)), without + 20)
