"""The reactor's waiting for descriptors, also where epoll(7) may watch no more of them.

The kernel bounds what epoll watches for each user (`fs.epoll.max_user_watches`), and evaluators are
the daemon's user: one of them can take all watches. From then on the reactor waits for further
descriptors by poll(2), which has no such bound. Without that a connection is accepted and never
read, and no evaluator can be started.
"""

from __future__ import annotations

import errno
import select
from collections.abc import Sequence
from typing import Any

from twisted.logger import Logger

from tawebeval.daemon.logging import RateLimitedLog

log = Logger()


class Poller:
    """Watches descriptors by epoll, and by poll those that epoll refuses with ENOSPC.

    It has the methods of select.epoll that Twisted's EPollReactor calls.
    """

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._poll = select.poll()
        self._poll.register(epoll.fileno(), select.POLLIN)
        self._beyond: set[int] = set()
        self._warn = RateLimitedLog(
            log.warn,
            "epoll: this user may watch no more descriptors (fs.epoll.max_user_watches); the"
            " daemon goes on by poll, evaluators that need epoll fail; raise it by sysctl, as"
            " tawebeval doctor says",
        )

    def register(self, descriptor: int, events: int) -> None:
        """Watch a descriptor. Raises: OSError, for any other reason than the user's limit."""
        try:
            self._epoll.register(descriptor, events)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._poll.register(descriptor, events)
            self._beyond.add(descriptor)
            self._warn()

    def modify(self, descriptor: int, events: int) -> None:
        """Watch for other events."""
        if descriptor in self._beyond:
            self._poll.modify(descriptor, events)
        else:
            self._epoll.modify(descriptor, events)

    def unregister(self, descriptor: int) -> None:
        """Watch a descriptor no more."""
        if descriptor in self._beyond:
            self._beyond.remove(descriptor)
            self._poll.unregister(descriptor)
        else:
            self._epoll.unregister(descriptor)

    def poll(self, timeout: float, most: int) -> Sequence[tuple[int, int]]:
        """Return the descriptors that are ready, and for what; at most `most` that epoll watches.

        Blocks for up to `timeout` seconds, or for ever where that is negative.
        """
        if not self._beyond:
            return self._epoll.poll(timeout, most)
        found: list[tuple[int, int]] = []
        for descriptor, events in self._poll.poll(timeout * 1000):
            if descriptor == self._epoll.fileno():
                found += self._epoll.poll(0, most)
            else:
                found.append((descriptor, events))
        return found


def wait_beyond_epoll(reactor: Any) -> None:
    """Have a reactor that waits by epoll go on by poll where epoll may watch no more."""
    poller = getattr(reactor, "_poller", None)
    if isinstance(poller, select.epoll):
        reactor._poller = Poller(poller)
