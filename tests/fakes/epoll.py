"""An epoll that may watch few descriptors, as where a user has taken all watches."""

from __future__ import annotations

import errno
import os
import select


class LimitedEpoll:
    """Watches no more than `most` descriptors at once; all else is the kernel's."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._epoll = select.epoll()
        self._watched: set[int] = set()
        self.fileno = self._epoll.fileno
        self.modify = self._epoll.modify
        self.poll = self._epoll.poll
        self.close = self._epoll.close

    def register(self, descriptor: int, events: int) -> None:
        if len(self._watched) >= self.most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._epoll.register(descriptor, events)
        self._watched.add(descriptor)

    def unregister(self, descriptor: int) -> None:
        self._epoll.unregister(descriptor)
        self._watched.remove(descriptor)
