"""Readers of the soak: slow ones, such that come back, and such that do not.

Each reads one evaluation, in a thread of its own, and keeps a digest of what it was sent.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from enum import Enum
from hashlib import sha256
from http.client import HTTPConnection
from typing import Any

import attrs
import orjson

from benchmarks.client import Client, get
from benchmarks.programs.numbered import blocks

_PIECE = 64 * 1024  # bytes that are read of a stream at once
_GO = 0.06  # the chance to go away after a piece or page, for those who do
_PAUSE = 0.2  # seconds at most after a piece, for those who are slow; of pages four times that
_TIMEOUT = 60.0


class Manner(Enum):
    """What a reader does beside reading."""

    SLOW = "slow"
    RESUMING = "gone and back again and again"
    VANISHING = "gone and never back"


class WrongStreamError(Exception):
    """A reader was not sent what was printed, or was refused."""


@attrs.define
class Reader:
    """Reads the evaluation `identifier`, which prints the lines of `name`, `size` bytes.

    `deadline` is when it gives up (time.monotonic). `breaks` counts the connections that it
    has broken off, and `received` the bytes of text that it was sent.
    """

    port: int
    identifier: str
    name: str
    size: int
    manner: Manner
    pages: bool
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
        for _ in self._pages() if self.pages else self._lines():
            if time.monotonic() > self.deadline:
                raise WrongStreamError(f"{self.name}: not at its end in time")
            if self.manner is Manner.VANISHING and self.received >= enough:
                break
            if self.manner is Manner.SLOW:
                time.sleep(self._chance.random() * _PAUSE * (4 if self.pages else 1))
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

    def _lines(self) -> Iterator[None]:
        """Read JSON Lines to their end, and ask after it."""
        while not (yield from self._stream()):
            pass
        with Client(self.port) as client:
            assert client.page(self.identifier, "end")["end"] is None

    def _stream(self) -> Generator[None, None, bool]:
        """Read one stream; return whether that was the end."""
        with closing(HTTPConnection("127.0.0.1", self.port, _TIMEOUT)) as connection:
            connection.connect()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _PIECE)
            path = f"/evaluation/{self.identifier}/events?skip={self._events}"
            connection.request("GET", path, headers={"Accept": "application/jsonl"})
            response = connection.getresponse()
            if response.status != 200:
                said = response.read(500).decode()
                raise WrongStreamError(f"{self.name}, after {self.received} bytes: {said}")
            rest = b""
            while some := response.read1(_PIECE):
                *lines, rest = (rest + some).split(b"\n")
                self._take([orjson.loads(line) for line in lines])
                yield
                if self._goes():
                    return False
        return True
