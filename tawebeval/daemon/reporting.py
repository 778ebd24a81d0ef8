"""The daemon's state, told to systemd while it lives: ready, at work, stopping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twisted.application.service import Service
from twisted.internet.task import LoopingCall

from tawebeval.config import Configuration
from tawebeval.daemon.systemd import Supervisor

_PERIOD = 1.0  # seconds, at most, between two reports
_MARGIN = 11.0  # seconds, beside those that are configured, in which a stop has ended


def longest_stop(configuration: Configuration) -> float:
    """Return how many seconds it may take to stop in order."""
    seconds = configuration.service.drain + configuration.evaluations.grace + _MARGIN
    if configuration.callbacks.enabled:
        seconds += configuration.callbacks.timeout
    return seconds


class Reporting(Service):
    """Has to be started last: that it is means that all else has started.

    `count()` returns how many evaluations run and how many wait, `obstacles()` why no more would
    be taken, and `stop_within()` how many seconds a stop may take. It is the reactor that makes
    the reports, so where that hangs there are none, and systemd starts the daemon anew.
    """

    name = "reporting"

    def __init__(
        self,
        supervisor: Supervisor,
        count: Callable[[], tuple[int, int]],
        obstacles: Callable[[], Sequence[str]],
        stop_within: Callable[[], float],
        reactor: Any,
    ) -> None:
        self._supervisor = supervisor
        self._count = count
        self._obstacles = obstacles
        self._stop_within = stop_within
        self._reactor = reactor
        self._stopping = False
        self._told = ""
        self._reports = LoopingCall(self._report)
        self._reports.clock = reactor

    def startService(self) -> None:
        """Tell that all is ready, as soon as the reactor runs, and from then on how it goes."""
        super().startService()
        if self._supervisor.address is None:
            return
        self._reactor.callWhenRunning(self._begin)
        # The stop of a service comes too late: by then all evaluations have ended.
        self._reactor.addSystemEventTrigger("before", "shutdown", self._announce_the_stop)

    def stopService(self) -> None:
        """Tell nothing more."""
        super().stopService()
        if self._reports.running:
            self._reports.stop()

    def _begin(self) -> None:
        self._supervisor.ready()
        self._reports.start(min(_PERIOD, (self._supervisor.watchdog or _PERIOD) / 2))

    def _announce_the_stop(self) -> None:
        self._stopping = True
        self._supervisor.stopping(self._stop_within())
        self._report()

    def _report(self) -> None:
        """Show that the reactor turns, and tell what has changed."""
        running, queued = self._count()
        status = f"{running} running, {queued} queued"
        if self._stopping:
            status = f"stopping: {status}"
        elif obstacles := self._obstacles():
            status += f"; not ready: {'; '.join(obstacles)}"
        notices = ["WATCHDOG=1"] if self._supervisor.watchdog else []
        if status != self._told:
            notices.append(f"STATUS={status}")
            self._told = status
        if notices:
            self._supervisor.tell(*notices)
