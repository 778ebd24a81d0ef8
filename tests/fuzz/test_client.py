"""`client`: against servers that answer with any bytes, and break off anywhere."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import attrs
import httpcore
from hypothesis import example, given
from hypothesis import strategies as st
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.trial.unittest import SynchronousTestCase

from tawebeval_client import Client, ClientError, Event, Page, sync_client
from tawebeval_client.events import split_cursor
from tests.cases.client import REQUEST
from tests.cases.strategies import Chunk, chunks_of, long_chunkings, mutated

AFTER = "asked for as after"  # which the server replaces
CURSORS = st.none() | st.sampled_from([AFTER, AFTER, AFTER, "0", "2", "end", "", "+", "1+1", "é"])
EVENTS = st.sampled_from(
    [
        {"type": "text", "payload": "a"},
        {"type": "text", "payload": "\n"},
        {"type": "data", "payload": 1.5},
        {"type": "data", "payload": {"type": "evaluation_error", "reason": "x", "message": "y"}},
        {
            "type": "data",
            "payload": {
                "type": "file",
                "filename": "../a",
                "content_type": "",
                "content_base64": "AA==",
            },
        },
        {"type": "else", "payload": None},
    ]
)
EVALUATIONS = st.sampled_from([{"evaluation_id": "a", "state": "running", "created": "x"}, {}])
PAGES = st.fixed_dictionaries(
    {
        "begin": st.one_of(*[st.just(AFTER)] * 8, CURSORS),
        "end": CURSORS,
        "data": st.one_of(*[st.lists(EVENTS, max_size=3)] * 3, st.lists(EVALUATIONS, max_size=2)),
    }
)
PROBLEM = {"title": "x", "status": 410, "detail": "d", "message": "m", "oldest": "1", "field": "f"}
DOCUMENTS = st.one_of(*[PAGES] * 8, EVALUATIONS, EVALUATIONS, st.just(PROBLEM))
PIECES = (
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"0", b"-1", b"1e999", b"9" * 5000, b"\\"),
    *(b"\\ud800", b"\\u0000", b"\xff", b"\xed\xa0\x80", b"\0", b"\r\n", b"\n", b" "),
    b"\xef\xbb\xbf",
    *(b'"end":"1+1"', b'"end":""', b'"+"', b'"+x"', b"+"),
    *(b"[" * 3000, b'{"a":' * 3000, b'"end":null', b'"begin":null', b'"data":[]', b"true", b'""'),
    *(b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 204 x\r\n\r\n"),
    *(b"HTTP/1.1 999999999999 x\r\n", b"HTTP/1.1 -1 x\r\n", b"HTTP/1.1 503\r\n", b"HTTP/9.9 200 x"),
    *(b"Content-Length: 5\r\n", b"Content-Length: 9999999999999999999999\r\n"),
    b"Content-Length: -1\r\n",
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"ffffffff\r\n"),
    b"-1\r\n",
    *(b"Content-Encoding: gzip\r\n", b"Content-Encoding: x, gzip\r\n", b"Location: //x\r\n"),
    b": \r\n",
    *(b"Retry-After: 1\r\n", b"Retry-After: -1\r\n", b"Retry-After: 9999999999\r\n", b" x\r\n"),
    *(b"Retry-After: Fri, 31 Dec 9999 23:59:59 GMT\r\n", b"Retry-After: \xb2\r\n", b"X" * 20000),
    *(b"Retry-After: Mon, 99 Zzz 99999999999 99:99:99 +9999999999\r\n", b"\r\n\r\n"),
    b"\x1f\x8b\x08",
    *(b"Set-Cookie: a=b; expires=\xff; domain=.x; max-age=z\r\n", b"Set-Cookie: =;;\r\n"),
    *(b"Preference-Applied: wait=25\r\n", b"Connection: close\r\n", b"Upgrade: h2c\r\n"),
    b"x" * 300,
)
STATUSES = st.sampled_from(
    [200] * 40 + [100, 101, 201, 204, 206, 301, 304, 400, 401, 404, 410, 413, 416, 429, 500, 503]
)


BODIES = DOCUMENTS.map(lambda document: json.dumps(document).encode())


@st.composite
def answers(draw: st.DrawFn, bodies: st.SearchStrategy[bytes]) -> bytes:
    """Draw an answer with a body, framed in any way that HTTP has."""
    body = draw(bodies)
    head = f"HTTP/1.1 {draw(STATUSES)} x\r\nContent-Type: application/json\r\n".encode()
    if draw(st.integers(0, 4)) == 4:
        head, body = head + b"Content-Encoding: gzip\r\n", gzip.compress(body, mtime=0)
    framing = draw(st.sampled_from([*["length"] * 6, "chunked", "chunked", "none"]))
    if framing == "length":
        return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    if framing == "chunked":
        chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked
    return head + b"\r\n" + body


@attrs.frozen
class Lie:
    """What the server answers to one request, in pieces, and what becomes of the connection."""

    answer: bytes
    chunking: Sequence[Chunk]
    end: type[Exception] | None

    def tell(self, request: bytes) -> bytes:
        """Return the answer to a request, whose cursor it may have."""
        asked = _AFTER.search(request)
        after = json.dumps(unquote(asked[1].decode())) if asked else "null"
        told = json.dumps(AFTER).encode()
        return self.answer.replace(told, after.encode().ljust(len(told)))


LIES = st.builds(
    Lie,
    st.one_of(
        *[answers(BODIES)] * 5, answers(mutated(BODIES, PIECES)), mutated(answers(BODIES), PIECES)
    ),
    long_chunkings,
    st.sampled_from([*[None] * 6, ConnectionDone, ConnectionLost]),
)

ASKING: dict[str, Callable[[Any], Any]] = {
    "evaluate": lambda client: client.evaluate({"source": b"x", "b": "y"}, **REQUEST),
    "events": lambda client: client.events("a"),
    "pages": lambda client: client.pages("a", "2", limit=9),
    "status": lambda client: client.status("a"),
    "cancel": lambda client: client.cancel("a"),
    "evaluations": lambda client: client.evaluations(),
}


class HastyClient(Client):
    """A client without pauses."""

    async def pause(self, seconds: float) -> None:
        """Return at once."""


class LyingNetwork(httpcore.NetworkBackend):
    """Connections in memory for `Client`: each request gets the next lie."""

    def __init__(self, lies: Sequence[Lie]) -> None:
        self.lies = list(lies)

    def connect_tcp(self, *_: Any, **__: Any) -> httpcore.NetworkStream:
        if not self.lies:
            raise httpcore.ConnectError
        return LyingStream(self)


class LyingStream(httpcore.NetworkStream):
    """A connection, which is silent after a lie that leaves it open."""

    def __init__(self, network: LyingNetwork) -> None:
        self.network = network
        self.written = b""
        self.pieces: list[bytes] = []
        self.end: type[Exception] | None = None

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.written += buffer

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self.written and not self.pieces:
            lies = self.network.lies
            lie = lies.pop(0) if lies else Lie(b"", (), ConnectionLost)
            answer = lie.tell(self.written)
            self.pieces = [piece for piece, _ in chunks_of(answer, lie.chunking) if piece]
            self.written, self.end = b"", lie.end
        if self.pieces:
            piece = self.pieces.pop(0)
            self.pieces[:0] = [piece[max_bytes:]] if len(piece) > max_bytes else []
            return piece[:max_bytes]
        if self.end is ConnectionDone:
            return b""
        raise httpcore.ReadError if self.end else httpcore.ReadTimeout

    def close(self) -> None:
        """Leave."""

    def get_extra_info(self, info: str) -> Any:
        """Tell that an idle connection has nothing to be read."""
        return None


_AFTER = re.compile(rb"[?&]after=([^& ]*)")


class ClientTests(SynchronousTestCase):
    @given(
        st.sampled_from(["events", "events", "pages", *ASKING]),
        st.lists(LIES, min_size=1, max_size=6),
    )
    @example("events", [Lie(b"HTTP/1.1 200 x\r\nSet-Cookie: \xff\r\n\r\n{}", [], None)])
    def test_client_returns_a_result_or_a_client_error_for_any_bytes_of_a_server(
        self, asking: str, lies: Sequence[Lie]
    ) -> None:
        client = HastyClient("http://127.0.0.1:1/", draw_random=random.Random(1).random)
        pool: Any = client._get_pool()._transport
        pool._pool._network_backend = sync_client._DeadlineNetwork(
            LyingNetwork(lies), lambda: client._thread.deadline
        )
        try:
            asked = ASKING[asking](client)
            if isinstance(asked, Iterator):
                for item in asked:
                    self.check(item)
        except ClientError as error:
            self.assertTrue(str(error).isprintable())
            str(error).encode()

    def check(self, item: dict[str, Any] | Event | Page) -> None:
        """Hold that an item can be shown, and that events can be read on after it."""
        repr(item).encode()
        if isinstance(item, Page):
            assert split_cursor(item.end) == (item.end, 0)
            for event in item.events:
                self.check(event)
        elif isinstance(item, Event):
            split_cursor(item.cursor)
