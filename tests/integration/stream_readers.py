"""Many readers of streams in one process: `python -m tests.integration.stream_readers PORT...`.

Each line of stdin, an identifier and a number, begins so many readers of the events of this
evaluation, which ask the ports in turn. Each resumes its stream after a cut. When all have the
end, a line of stdout tells in JSON what they read: the identifier, the different texts, and how
often the streams were cut. Whatever else a server sends ends the process.

Thousands of readers take little processor time, for HTTP is only looked at as far as need be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Sequence

from benchmarks.streams import ServerSent

_LATER = (408, 502, 503, 504)  # 408: this process was slow
_FIRST_PAUSE = 0.25  # seconds before the next attempt; it doubles after an attempt in vain
_LONGEST_PAUSE = 4.0
_PIECE = 64 * 1024  # bytes


class StreamReader:
    """Reader of one stream."""

    def __init__(self, port: int, identifier: str) -> None:
        self._port = port
        self._path = f"/evaluation/{identifier}/events"
        self._events: list[bytes] = []
        self._is_whole = False
        self.streams = 0

    @property
    def text(self) -> str:
        return "".join(json.loads(event)["payload"] for event in self._events)

    async def read(self) -> None:
        """Read to the end, over as many connections as it takes."""
        pause = _FIRST_PAUSE
        while True:
            before = len(self._events)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._read_stream()
            if self._is_whole:
                return
            pause = _FIRST_PAUSE if len(self._events) > before else min(2 * pause, _LONGEST_PAUSE)
            await asyncio.sleep(pause * random.uniform(0.5, 1))

    async def _read_stream(self) -> None:
        """Read one stream from where the last one was cut. Raises OSError, IncompleteReadError."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            way = ServerSent()
            writer.write(way.request(self._path, len(self._events)))
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head[9:12])
            if status in _LATER:
                return
            assert status in (200, 204), head
            self._is_whole = status == 204
            self.streams += status == 200
            while not self._is_whole and (some := await reader.read(_PIECE)):
                self._events += way.feed(some)
                self._is_whole = way.ended
        finally:
            writer.close()


async def read_all(identifier: str, readers: int, ports: Sequence[int]) -> None:
    """Read the events of an evaluation by so many readers; print what they read."""
    streams = [StreamReader(ports[n % len(ports)], identifier) for n in range(readers)]
    await asyncio.gather(*(stream.read() for stream in streams))
    texts = sorted({stream.text for stream in streams})
    cuts = sum(max(stream.streams - 1, 0) for stream in streams)
    print(json.dumps([identifier, texts, cuts]), flush=True)


async def serve(ports: Sequence[int]) -> None:
    """Do what the lines of stdin say, to its end."""
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    async with asyncio.TaskGroup() as group:
        while line := await stdin.readline():
            identifier, readers = line.decode().split()
            group.create_task(read_all(identifier, int(readers), ports))


if __name__ == "__main__":
    asyncio.run(serve([int(each) for each in sys.argv[1:]]))
