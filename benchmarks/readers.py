"""Readers of the soak: slow ones, such that come back, and such that do not.

Each reads one evaluation, in a thread of its own, and keeps a digest of what it was sent.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from enum import Enum
from hashlib import sha256
from typing import Any

import attrs
import orjson

from benchmarks.client import Client, get
from benchmarks.programs.numbered import blocks
from benchmarks.streams import Lines, Messages, ServerSent, Way, pieces

_PIECE = 64 * 1024  # bytes that are read of a stream at once
_GO = 0.06  # the chance to go away after a piece or page, for those who do
_PAUSE = 0.2  # seconds at most after a piece, for those who are slow; of pages four times that
_TIMEOUT = 60.0


class Manner(Enum):
    """What a reader does beside reading."""

    SLOW = "slow"
    RESUMING = "gone and back again and again"
    VANISHING = "gone and never back"


WAYS: dict[str, type[Way] | None] = {
    "pages": None,
    "JSON Lines": Lines,
    "server-sent events": ServerSent,
    "WebSocket": Messages,
}
"""How a reader reads; pages are no stream."""


class WrongStreamError(Exception):
    """A reader was not sent what was printed, or was refused."""


@attrs.define
class Reader:
    """Reads the evaluation `identifier`, which prints the lines of `name`, `size` bytes.

    `way` is one of `WAYS`.
    `deadline` is when it gives up (time.monotonic). `breaks` counts the connections that it
    has broken off, and `received` the bytes of text that it was sent.
    """

    port: int
    identifier: str
    name: str
    size: int
    manner: Manner
    way: str
    deadline: float
    received: int = 0
    breaks: int = 0
    _events: int = 0
    _digest: Any = attrs.field(factory=sha256)
    _chance: random.Random = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._chance = random.Random(self.name)

    def read(self) -> None:
        """Read as far as it wants to, and compare. Raises WrongStreamError, OSError."""
        enough = self.size
        if self.manner is Manner.VANISHING:
            enough = self._chance.randrange(self.size // 3)
        way = WAYS[self.way]
        for _ in self._pages() if way is None else self._streams(way):
            if time.monotonic() > self.deadline:
                raise WrongStreamError(f"{self.name}: not at its end in time")
            if self.manner is Manner.VANISHING and self.received >= enough:
                break
            if self.manner is Manner.SLOW:
                time.sleep(self._chance.random() * _PAUSE * (1 if way else 4))
        if self.manner is not Manner.VANISHING and self.received != self.size:
            raise WrongStreamError(f"{self.name}: {self.received} bytes instead of {self.size}")
        if self._digest.digest() != self._printed():
            raise WrongStreamError(f"{self.name}: not what was printed")

    def _printed(self) -> bytes:
        """Return the digest of as much of what is printed as was received."""
        digest, missing = sha256(), self.received
        for block in blocks(self.name, self.size):
            digest.update(block[:missing])
            missing -= min(missing, len(block))
        return digest.digest()

    def _take(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] != "text":
                raise WrongStreamError(f"{self.name}: {json.dumps(event)[:300]}")
        text = "".join(event["payload"] for event in events).encode()
        self._digest.update(text)
        self.received += len(text)
        self._events += len(events)

    def _goes(self) -> bool:
        """Tell whether it breaks its connection off here."""
        goes = self.manner is Manner.RESUMING and self._chance.random() < _GO
        self.breaks += goes
        return goes

    def _pages(self) -> Iterator[None]:
        """Read pages to the very end."""
        after: str | None = None
        client = Client(self.port)
        try:
            while True:
                if self._goes():
                    client.close()
                    self._ask_and_leave(after)
                    client = Client(self.port)
                page = client.page(self.identifier, after)
                self._take(page["data"])
                after = page["end"]
                if after is None:
                    return
                yield
        finally:
            client.close()

    def _ask_and_leave(self, after: str | None) -> None:
        """Ask for the next page, and go away in the middle of the answer or before it."""
        path = f"/evaluation/{self.identifier}/events?wait=30&after={after or ''}"
        with socket.create_connection(("127.0.0.1", self.port), _TIMEOUT) as connection:
            connection.sendall(get(path))
            if self._chance.random() < 0.5:
                connection.recv(self._chance.randrange(1, _PIECE))

    def _streams(self, way: type[Way]) -> Iterator[None]:
        """Read one stream after another to their end, and ask after it."""
        path = f"/evaluation/{self.identifier}/events"
        over = False
        while not over:
            with closing(pieces(self.port, way(), path, self._events)) as stream:
                for events in stream:
                    self._take([orjson.loads(event) for event in events])
                    yield
                    if self._goes():
                        break
                else:
                    over = True
        with Client(self.port) as client:
            assert client.page(self.identifier, "end")["end"] is None
