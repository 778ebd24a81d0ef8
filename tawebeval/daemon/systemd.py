"""Notification of systemd by sd_notify(3): readiness, watchdog, status, stop.

No library is used: the protocol is stable and short, and the libraries need a compiler or hide
their errors.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from twisted.application.service import Service
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from tawebeval.config import Configuration
from tawebeval.evaluations.run import KILL_GRACE
from tawebeval.slurm.node_process import MAX_KILL_SECONDS

_REPORT_PERIOD = 1.0  # seconds between two reports at most
_STOP_MARGIN = 11.0  # seconds of a stop in addition to the configured ones

log = Logger()


@attrs.frozen
class SystemdNotifier:
    """Sender of datagrams to the socket at `socket_address`; None without systemd.

    `watchdog_seconds` is the number of seconds without `WATCHDOG=1` after which systemd ends the
    daemon, None without a watchdog. A datagram that cannot be sent is logged.
    """

    socket_address: str | None = None
    watchdog_seconds: float | None = None

    def send_notices(self, *notices: str) -> None:
        """Send assignments such as `READY=1` in one datagram, without blocking."""
        if self.socket_address is None:
            return
        name = self.socket_address
        if name.startswith("@"):  # an abstract socket, unix(7)
            name = "\0" + name[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
                datagrams.setblocking(False)
                datagrams.sendto("\n".join(notices).encode(), name)
        except OSError as error:
            log.warn(
                "cannot notify systemd of {notices}: {error}",
                notices=", ".join(notices),
                error=error,
            )

    def notify_ready(self) -> None:
        """Report that the start, or a reload, has ended."""
        self.send_notices("READY=1")

    def notify_reloading(self) -> None:
        """Report that a reload begins; `notify_ready` has to follow."""
        # systemd tells several reloads apart by this time.
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.send_notices("RELOADING=1", f"MONOTONIC_USEC={now}")

    def notify_stopping(self, seconds: float) -> None:
        """Report that the daemon stops within `seconds`, which overrides TimeoutStopSec=."""
        self.send_notices("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")


def find_notifier(environment: Mapping[str, str]) -> SystemdNotifier:
    """Return the notifier for the variables that systemd has set in the environment."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return SystemdNotifier()
    period = environment.get("WATCHDOG_USEC", "")
    whose = environment.get("WATCHDOG_PID", str(os.getpid()))
    watched = period.isascii() and period.isdigit() and int(period) and whose == str(os.getpid())
    return SystemdNotifier(address, int(period) / 1e6 if watched else None)


def compute_stop_timeout(configuration: Configuration) -> float:
    """Return the maximum duration of an orderly stop, in seconds."""
    seconds = configuration.service.drain + KILL_GRACE + _STOP_MARGIN
    if configuration.runner.kind == "slurm":
        seconds += MAX_KILL_SECONDS
    return seconds


class Watchdog(Service):
    """Reports to systemd: readiness, then watchdog and status once a second. To be started last.

    `count_evaluations` returns the numbers of running and of queued evaluations,
    `find_unreadiness_reasons` the reasons why no more would be accepted, `get_stop_timeout` the
    seconds that a stop may take. The reactor makes the reports: if it hangs, they stop and systemd
    restarts the daemon.
    """

    name = "watchdog"

    def __init__(
        self,
        notifier: SystemdNotifier,
        count_evaluations: Callable[[], tuple[int, int]],
        find_unreadiness_reasons: Callable[[], Sequence[str]],
        get_stop_timeout: Callable[[], float],
        reactor: Any,
    ) -> None:
        self._notifier = notifier
        self._count_evaluations = count_evaluations
        self._find_obstacles = find_unreadiness_reasons
        self._get_stop_timeout = get_stop_timeout
        self._reactor = reactor
        self._is_stopping = False
        self._status = ""
        self._reports = LoopingCall(self._report)
        self._reports.clock = reactor

    def startService(self) -> None:
        """Report readiness as soon as the reactor runs, and the status from then on."""
        super().startService()
        if self._notifier.socket_address is None:
            return
        self._reactor.callWhenRunning(self._on_running)
        # `stopService` would be too late: by then all evaluations have ended.
        self._reactor.addSystemEventTrigger("before", "shutdown", self._on_shutdown)

    def stopService(self) -> None:
        """Stop the reports."""
        super().stopService()
        if self._reports.running:
            self._reports.stop()

    def _on_running(self) -> None:
        self._notifier.notify_ready()
        self._reports.start(
            min(_REPORT_PERIOD, (self._notifier.watchdog_seconds or _REPORT_PERIOD) / 2)
        )

    def _on_shutdown(self) -> None:
        self._is_stopping = True
        self._notifier.notify_stopping(self._get_stop_timeout())
        self._report()

    def _report(self) -> None:
        """Report that the reactor runs, and the status if it has changed."""
        running, queued = self._count_evaluations()
        status = f"{running} running, {queued} queued"
        if self._is_stopping:
            status = f"stopping: {status}"
        elif obstacles := self._find_obstacles():
            status += f"; not ready: {'; '.join(obstacles)}"
        notices = ["WATCHDOG=1"] if self._notifier.watchdog_seconds else []
        if status != self._status:
            notices.append(f"STATUS={status}")
            self._status = status
        if notices:
            self._notifier.send_notices(*notices)
