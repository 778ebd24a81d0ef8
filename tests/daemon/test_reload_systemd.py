"""`daemon.reload`: what systemd is sent, and when, over the life of the daemon."""

from __future__ import annotations

import contextlib
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

from tawebeval.config import Configuration, RunnerSettings, ServiceSettings
from tawebeval.daemon.reload import SystemdNotifier, Watchdog, compute_stop_timeout, find_notifier
from tests.fakes.world import FakeNotifier


class NotifierTests(SynchronousTestCase):
    def setUp(self) -> None:
        folder = tempfile.mkdtemp()  # short, as the paths of sockets have to be
        self.addCleanup(shutil.rmtree, folder)
        self.path = str(Path(folder, "notify"))
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(self.socket.close)
        self.socket.setblocking(False)

    def take(self) -> list[str]:
        """Return what was sent."""
        taken = []
        with contextlib.suppress(BlockingIOError):
            while True:
                taken.append(self.socket.recv(4096).decode())
        return taken

    def test_notices_sent_together_are_lines_of_one_datagram(self) -> None:
        self.socket.bind(self.path)
        notifier = SystemdNotifier(self.path)
        notifier.send_notices("A=1", "B=tüchtig")
        notifier.notify_ready()
        self.assertEqual(self.take(), ["A=1\nB=tüchtig", "READY=1"])

    def test_notify_socket_may_be_abstract(self) -> None:
        name = f"tawebeval-test-{os.getpid()}"
        self.socket.bind(f"\0{name}")
        SystemdNotifier(f"@{name}").notify_ready()
        self.assertEqual(self.take(), ["READY=1"])

    def test_reloading_message_has_the_monotonic_time(self) -> None:
        self.socket.bind(self.path)
        before = time.clock_gettime(time.CLOCK_MONOTONIC)
        SystemdNotifier(self.path).notify_reloading()
        after = time.clock_gettime(time.CLOCK_MONOTONIC)
        (told,) = self.take()
        first, _, moment = told.partition("\nMONOTONIC_USEC=")
        self.assertEqual(first, "RELOADING=1")
        self.assertTrue(before - 1e-5 <= int(moment) / 1e6 <= after, (before, moment, after))

    def test_missing_listener_is_logged_with_the_message(self) -> None:
        with capturedLogs() as logged:
            SystemdNotifier(self.path).send_notices("READY=1", "STATUS={well}")
        (event,) = logged
        said = formatEvent(event)
        self.assertTrue(said.startswith("cannot notify systemd of READY=1, STATUS={well}: "), said)

    def test_full_socket_does_not_block(self) -> None:
        self.socket.bind(self.path)
        most = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
        with capturedLogs() as logged:
            for _ in range(most + 2):
                SystemdNotifier(self.path).notify_ready()
        self.assertIn("cannot notify systemd of READY=1", formatEvent(logged[-1]))


class EnvironmentTests(SynchronousTestCase):
    def test_notifier_needs_a_socket_of_a_known_kind(self) -> None:
        for environment in (
            {},
            {"NOTIFY_SOCKET": ""},
            {"NOTIFY_SOCKET": "vsock:2:1234", "WATCHDOG_USEC": "1"},
        ):
            self.assertEqual(find_notifier(environment), SystemdNotifier())

    def test_watchdog_timeout_is_read_if_it_is_for_this_process(self) -> None:
        own = str(os.getpid())
        for environment, seconds in (
            ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": own}, 30.0),
            ({"WATCHDOG_USEC": "1500000"}, 1.5),
            ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, None),
            ({"WATCHDOG_PID": own}, None),
            ({"WATCHDOG_USEC": "0", "WATCHDOG_PID": own}, None),
            ({"WATCHDOG_USEC": "soon", "WATCHDOG_PID": own}, None),
        ):
            for address in ("/x", "@x"):
                found = find_notifier({"NOTIFY_SOCKET": address, **environment})
                self.assertEqual(found, SystemdNotifier(address, seconds))


class WatchdogTests(SynchronousTestCase):
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
        for call, args, kwargs in self.reactor.whenRunningHooks:
            call(*args, **kwargs)

    def start_and_run(self, **changes: Any) -> list[str]:
        """Do that, and let the reactor begin; what it tells first is taken."""
        told = self.start(**changes)
        self.run_reactor()
        told.clear()
        return told

    def take(self, told: list[str]) -> list[str]:
        taken = told.copy()
        told.clear()
        return taken

    def test_ready_is_sent_after_the_reactor_runs(self) -> None:
        told = self.start()
        self.assertEqual(told, [])
        self.run_reactor()
        self.assertEqual(told, ["READY=1", "WATCHDOG=1 STATUS=0 running, 0 queued"])

    def test_watchdog_message_is_sent_each_second_with_a_changed_status(self) -> None:
        told = self.start_and_run()
        self.reactor.advance(1)
        self.assertEqual(self.take(told), ["WATCHDOG=1"])
        self.counts = (2, 5)
        self.reactor.pump([1, 1])
        self.assertEqual(self.take(told), ["WATCHDOG=1 STATUS=2 running, 5 queued", "WATCHDOG=1"])

    def test_status_has_the_reasons_while_the_daemon_is_not_ready(self) -> None:
        told = self.start_and_run(watchdog_seconds=None)
        self.obstacles = ["the disk is full", "the queue is full"]
        self.reactor.pump([1, 1])
        not_ready = "STATUS=0 running, 0 queued; not ready: the disk is full; the queue is full"
        self.assertEqual(self.take(told), [not_ready])
        self.obstacles = []
        self.reactor.advance(1)
        self.assertEqual(self.take(told), ["STATUS=0 running, 0 queued"])

    def test_short_watchdog_gets_a_message_each_half_of_its_timeout(self) -> None:
        told = self.start_and_run(watchdog_seconds=0.4)
        self.reactor.pump([0.2, 0.2])
        self.assertEqual(self.take(told), ["WATCHDOG=1"] * 2)

    def test_watchdog_messages_continue_after_the_stopping_message(self) -> None:
        told = self.start_and_run()
        self.longest = 44.5
        self.counts = (3, 0)
        self.obstacles = ["the daemon is stopping"]
        for call, args, kwargs in self.reactor.triggers["before"]["shutdown"]:
            call(*args, **kwargs)
        self.assertEqual(
            self.take(told),
            [
                "STOPPING=1 EXTEND_TIMEOUT_USEC=44500000",
                "WATCHDOG=1 STATUS=stopping: 3 running, 0 queued",
            ],
        )
        self.reactor.advance(1)
        self.assertEqual(self.take(told), ["WATCHDOG=1"])
        self.service.stopService()
        self.reactor.advance(5)
        self.assertEqual(told, [])
        self.assertFalse(self.service.running)

    def test_watchdog_does_nothing_without_systemd(self) -> None:
        told = self.start(socket_address=None)
        self.run_reactor()
        self.reactor.advance(5)
        self.assertEqual((told, self.reactor.triggers), ([], {}))
        self.service.stopService()


class LongestStopTests(SynchronousTestCase):
    def test_longest_stop_adds_up_the_settings(self) -> None:
        service = ServiceSettings(drain=100)
        runner = RunnerSettings(kind="slurm", shared="/shared")  # whose nodes may be silent
        self.assertEqual(compute_stop_timeout(Configuration(service=service)), 113)
        settings = Configuration(service=service, runner=runner)
        self.assertEqual(compute_stop_timeout(settings), 133)
