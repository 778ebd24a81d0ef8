"""A proxy that cuts each connection: in or after a response.

It knows nothing of HTTP. What a client sends counts as a request, what comes back as its
response, until the client sends again.
"""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto
from itertools import cycle
from select import select
from threading import Thread

_BUFFER = 32 * 1024  # bytes: what a cut loses here should be little beside what a server keeps


class Place(Enum):
    """Where a connection is cut."""

    WITHIN_RESPONSES = auto()
    """When the client has so many bytes of responses."""
    AFTER_RESPONSE = auto()
    """When the client sends the next request, or the server has closed the connection."""


class CuttingProxy:
    """Listens on 127.0.0.1 for `port` there, and lets no connection through to its end.

    The first, second, … connection is cut at the next of `places`, over and over, as if everything
    had been said. Within responses a cut comes after `shortest` to `longest` bytes, which `seed`
    draws; small numbers are as likely as large ones. `cuts` counts them. Without `places` nothing
    is cut before `stop`.
    """

    def __init__(
        self,
        port: int,
        seed: int = 0,
        places: Sequence[Place] = (),
        longest: int = 2**17,
        shortest: int = 1,
    ) -> None:
        self.cuts: Counter[Place] = Counter()
        self._port = port
        self._chance = random.Random(seed)
        self._places = cycle(places)
        self._longest = longest
        self._shortest = shortest
        self._open: set[socket.socket] = set()

    def listen(self, port: int = 0) -> int:
        listening = socket.create_server(("127.0.0.1", port))
        self._open.add(listening)
        Thread(target=self._accept, args=[listening], daemon=True).start()
        return int(listening.getsockname()[1])

    def stop(self) -> None:
        for each in list(self._open):
            with suppress(OSError):  # closed meanwhile
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self, listening: socket.socket) -> None:
        with listening, suppress(OSError):
            while True:
                near, _ = listening.accept()
                span = self._longest / self._shortest
                left = int(self._shortest * span ** self._chance.random())
                arguments = near, next(self._places, None), left
                Thread(target=self._carry, args=arguments, daemon=True).start()

    def _carry(self, near: socket.socket, place: Place | None, left: int) -> None:
        """Carry bytes until the cut; `left` still pass, where that is within responses."""
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", self._port)) as far:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            self._open |= {near, far}
            if self._is_cut(near, far, place, left):
                assert place is not None
                self.cuts[place] += 1
            self._open -= {near, far}

    def _is_cut(
        self, near: socket.socket, far: socket.socket, place: Place | None, left: int
    ) -> bool:
        """Carry bytes; return whether that has ended at `place`, not by the client."""
        has_response = False
        while True:
            ready = select([near, far], [], [])[0]
            if near in ready:
                data = near.recv(_BUFFER)
                if not data or (place is Place.AFTER_RESPONSE and has_response):
                    return bool(data)
                far.sendall(data)
            if far in ready:
                data = far.recv(_BUFFER)
                if not data:
                    return place is Place.AFTER_RESPONSE
                has_response = True
                if place is Place.WITHIN_RESPONSES:
                    near.sendall(data[:left])
                    left -= len(data)
                    if left <= 0:
                        return True
                else:
                    near.sendall(data)
