"""bwrap(1) itself: what every sandbox of it has in common, whoever is in it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from tawebeval.linux.child import ChildProcess
from tawebeval.linux.reaper import descendants, send


def unprivileged(hostname: str) -> Sequence[str]:
    """Return the arguments for all namespaces, no rights, and no way to get any."""
    return (
        *("--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent"),
        *("--new-session", "--uid", "1000", "--gid", "1000", "--hostname", hostname),
        *("--cap-drop", "ALL"),
    )


def reopened(filter_: int) -> int:
    """Return a descriptor of the filter for one bwrap, which reads it from where it stands."""
    return os.open(f"/proc/self/fd/{filter_}", os.O_RDONLY | os.O_CLOEXEC)


def signal_inside(child: ChildProcess, number: int) -> None:
    """Send a signal to those in a sandbox.

    bwrap itself is left to see them end: when that is over nobody is there any more. But where
    nobody is inside, or only the first process, which ignores what it may, the program has not
    begun, or is over. Then there is nobody to be asked, and all of it is killed.
    """
    inside = descendants(child.pid)
    for pid in inside:
        send(pid, number if len(inside) > 1 else signal.SIGKILL)
    if not inside:
        child.signal_group(signal.SIGKILL)
