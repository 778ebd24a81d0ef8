"""A fallback from epoll(7) to poll(2) for the reactor, when epoll may watch no more descriptors.

The kernel limits the epoll watches of each user (`fs.epoll.max_user_watches`). Evaluators run as
the daemon's user, so one of them can take all watches. poll(2) has no such limit. Without the
fallback a connection would be accepted and never read, and no evaluator could be started.
"""

from __future__ import annotations

import errno
import select
from collections.abc import Sequence
from typing import Any

from twisted.logger import Logger

from tawebeval.daemon.logging import RateLimitedLog

log = Logger()


class FallbackPoller:
    """Poller by epoll, and by poll for the descriptors that epoll refuses with ENOSPC.

    It has the methods of select.epoll that Twisted's EPollReactor calls.
    """

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._poll = select.poll()
        self._poll.register(epoll.fileno(), select.POLLIN)
        self._polled: set[int] = set()
        self._warn = RateLimitedLog(
            log.warn,
            "epoll: the user's limit of watched descriptors is reached, so evaluators that need"
            " epoll fail; raise fs.epoll.max_user_watches by sysctl, as `tawebeval doctor` says",
        )

    def register(self, descriptor: int, events: int) -> None:
        """Watch a descriptor for `events`. Raises: OSError, except for the user's limit."""
        try:
            self._epoll.register(descriptor, events)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._poll.register(descriptor, events)
            self._polled.add(descriptor)
            self._warn()

    def modify(self, descriptor: int, events: int) -> None:
        """Change the events of a descriptor."""
        if descriptor in self._polled:
            self._poll.modify(descriptor, events)
        else:
            self._epoll.modify(descriptor, events)

    def unregister(self, descriptor: int) -> None:
        """Stop watching a descriptor."""
        if descriptor in self._polled:
            self._polled.remove(descriptor)
            self._poll.unregister(descriptor)
        else:
            self._epoll.unregister(descriptor)

    def poll(self, timeout: float, maxevents: int) -> Sequence[tuple[int, int]]:
        """Return the ready descriptors with their events, at most `maxevents` from epoll.

        Blocks for up to `timeout` seconds, without a limit if `timeout` is negative.
        """
        if not self._polled:
            return self._epoll.poll(timeout, maxevents)
        found: list[tuple[int, int]] = []
        for descriptor, events in self._poll.poll(timeout * 1000):
            if descriptor == self._epoll.fileno():
                found += self._epoll.poll(0, maxevents)
            else:
                found.append((descriptor, events))
        return found


def add_poll_fallback(reactor: Any) -> None:
    """Replace the poller of an epoll reactor by a `FallbackPoller`; leave other reactors alone."""
    poller = getattr(reactor, "_poller", None)
    if isinstance(poller, select.epoll):
        reactor._poller = FallbackPoller(poller)
