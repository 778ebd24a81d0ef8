"""Notification of systemd by sd_notify(3): readiness, watchdog, status, stop.

The protocol is a stable one and no more than this, so there is no library for it: one would bring
headers and a compiler, or be as short and keep its errors to itself.
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

_PERIOD = 1.0  # seconds, at most, between two reports
_MARGIN = 11.0  # seconds, beside those that are configured, in which a stop has ended

log = Logger()


@attrs.frozen
class Notifier:
    """Sender of datagrams to the socket at `address`, None if systemd has not started the daemon.

    `watchdog` is the number of seconds without `WATCHDOG=1` after which systemd ends the daemon,
    None without a watchdog. A datagram that cannot be sent is logged.
    """

    address: str | None = None
    watchdog: float | None = None

    def send(self, *notices: str) -> None:
        """Send assignments such as `READY=1`, in one datagram. Never waits."""
        if self.address is None:
            return
        name = self.address
        if name.startswith("@"):  # a name that is in no directory
            name = "\0" + name[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
                datagrams.setblocking(False)
                datagrams.sendto("\n".join(notices).encode(), name)
        except OSError as error:
            log.warn(
                "systemd was not told {notices}: {error}", notices=", ".join(notices), error=error
            )

    def ready(self) -> None:
        """Report that the start, or a reload, has ended."""
        self.send("READY=1")

    def reloading(self) -> None:
        """Report that a reload begins; `ready` has to follow."""
        # By this time systemd knows which of several reloads it was.
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.send("RELOADING=1", f"MONOTONIC_USEC={now}")

    def stopping(self, seconds: float) -> None:
        """Report that the daemon stops, for at most `seconds`, whatever TimeoutStopSec= says."""
        self.send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")


def find_notifier(environment: Mapping[str, str]) -> Notifier:
    """Return the notifier for the variables that systemd has set in the environment."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return Notifier()
    period = environment.get("WATCHDOG_USEC", "")
    whose = environment.get("WATCHDOG_PID", str(os.getpid()))
    watched = period.isascii() and period.isdigit() and int(period) and whose == str(os.getpid())
    return Notifier(address, int(period) / 1e6 if watched else None)


def longest_stop(configuration: Configuration) -> float:
    """Return the seconds that an orderly stop may take."""
    seconds = configuration.service.drain + configuration.evaluations.grace + _MARGIN
    if configuration.callbacks.enabled:
        seconds += configuration.callbacks.timeout
    return seconds


class Watchdog(Service):
    """Reports to systemd: ready, alive and at work once a second, stopping. To be started last.

    `count()` returns how many evaluations run and how many wait, `obstacles()` why no more would
    be taken, and `stop_within()` how many seconds a stop may take. The reactor makes the reports:
    if it hangs they cease, and systemd restarts the daemon.
    """

    name = "watchdog"

    def __init__(
        self,
        notifier: Notifier,
        count: Callable[[], tuple[int, int]],
        obstacles: Callable[[], Sequence[str]],
        stop_within: Callable[[], float],
        reactor: Any,
    ) -> None:
        self._notifier = notifier
        self._count = count
        self._obstacles = obstacles
        self._stop_within = stop_within
        self._reactor = reactor
        self._stopping = False
        self._status = ""
        self._reports = LoopingCall(self._report)
        self._reports.clock = reactor

    def startService(self) -> None:
        """Report readiness as soon as the reactor runs, and the status from then on."""
        super().startService()
        if self._notifier.address is None:
            return
        self._reactor.callWhenRunning(self._begin)
        # The stop of a service comes too late: by then all evaluations have ended.
        self._reactor.addSystemEventTrigger("before", "shutdown", self._on_shutdown)

    def stopService(self) -> None:
        """End the reports."""
        super().stopService()
        if self._reports.running:
            self._reports.stop()

    def _begin(self) -> None:
        self._notifier.ready()
        self._reports.start(min(_PERIOD, (self._notifier.watchdog or _PERIOD) / 2))

    def _on_shutdown(self) -> None:
        self._stopping = True
        self._notifier.stopping(self._stop_within())
        self._report()

    def _report(self) -> None:
        """Report that the reactor runs, and the status if it has changed."""
        running, queued = self._count()
        status = f"{running} running, {queued} queued"
        if self._stopping:
            status = f"stopping: {status}"
        elif obstacles := self._obstacles():
            status += f"; not ready: {'; '.join(obstacles)}"
        notices = ["WATCHDOG=1"] if self._notifier.watchdog else []
        if status != self._status:
            notices.append(f"STATUS={status}")
            self._status = status
        if notices:
            self._notifier.send(*notices)
