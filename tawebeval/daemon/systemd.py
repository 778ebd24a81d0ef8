"""What the daemon tells systemd of itself: sd_notify(3), a datagram of lines.

The protocol is a stable one and no more than this, so there is no library for it: one would bring
headers and a compiler, or be as short and keep its errors to itself.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

import attrs
from twisted.logger import Logger

log = Logger()


@attrs.frozen
class Supervisor:
    """Takes notices at `address`; without one there is no supervisor, and nothing is told.

    `watchdog` is after how many seconds without a sign of life it ends the daemon; None if it
    does not watch. What cannot be told is logged, and raises nothing.
    """

    address: str | None = None
    watchdog: float | None = None

    def tell(self, *notices: str) -> None:
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
        """Tell that the daemon serves: after its start, or as it is configured now."""
        self.tell("READY=1")

    def reloading(self) -> None:
        """Tell that it reads its files again; `ready` has to follow."""
        # By this time systemd knows which of several reloads it was.
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.tell("RELOADING=1", f"MONOTONIC_USEC={now}")

    def stopping(self, seconds: float) -> None:
        """Tell that it stops, and may take so long, whatever the unit says of a time to stop."""
        self.tell("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")


def find_supervisor(environment: Mapping[str, str]) -> Supervisor:
    """Return who has started this process, by what systemd puts into the environment."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return Supervisor()
    period = environment.get("WATCHDOG_USEC", "")
    whose = environment.get("WATCHDOG_PID", str(os.getpid()))
    watched = period.isascii() and period.isdigit() and int(period) and whose == str(os.getpid())
    return Supervisor(address, int(period) / 1e6 if watched else None)
