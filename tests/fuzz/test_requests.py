"""The stack of HTTP: bytes that no client would send."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tests.cases.polls import CONFIGURATIONS, TOKEN, TOKENS, requests
from tests.cases.strategies import mutated
from tests.fakes.clients import BOUNDARY, MULTIPART, Connection, Service, form, head, parts
from tests.fakes.streams import UPGRADE

FORM = form(parts())
POST = {"Content-Type": MULTIPART, "Content-Length": str(len(FORM))}
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(FORM), FORM)
WHOLE = (
    head("POST /evaluate", POST) + FORM,
    head("POST /evaluate", {**POST, "Idempotency-Key": "k", "Expect": "100-continue"}) + FORM,
    head("POST /evaluate", {"Content-Type": MULTIPART, "Transfer-Encoding": "chunked"}) + CHUNKED,
    head("POST /evaluate", {"Authorization": f"Bearer {TOKEN}", **POST}) + FORM,
    head("GET /evaluation/ID/events", UPGRADE) + b"\x81\x80abcd\x88\x80abcd",
    head("GET /evaluation/ID/events", {"Accept": "text/event-stream", "Last-Event-ID": "1"}),
    head("GET /evaluation/ID/events?skip=1", {"Accept": "application/jsonl"}),
    head("GET /evaluation_events?evaluation=ID&after=1", {}),
    head("GET /evaluation/ID", {}),
    head("HEAD /evaluation/ID/events", {}),
    head("DELETE /evaluation/ID", {}),
    head("OPTIONS /evaluate", {"Origin": "https://a", "Access-Control-Request-Method": "POST"}),
    head("GET /evaluations?after=x", {}),
    *(head(f"GET {path}", {}) for path in ("/", "/health", "/health/ready", "/metrics")),
    head("GET /openapi.json", {"If-None-Match": '"x"', "Accept-Encoding": "gzip"}),
    head("GET /static/page.js", {"Range": "bytes=0-1"}),
)
PIECES = (
    *(b"\r\n", b"\n", b"\r", b"\r\n\r\n", b":", b" ", b"\t", b"\0", b"\xff", b"%", b"%00", b"%ff"),
    *(b"/", b"//", b"..", b"?", b"&", b"=", b"#", b"*", b";", b",", b'"', b"[", b"\xc3\xbc", b"+"),
    *(b"GET ", b"POST", b"HEAD", b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0", b"PRI * HTTP/2.0\r\n\r\n"),
    *(b"Host: x\r\n", b"Connection: close\r\n", b"Content-Length: 3\r\n"),
    b"Content-Length: -1\r\n",
    *(b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Expect: 100-continue\r\n", b"Content-Encoding: gzip\r\n", b"Accept: */*;q=x\r\n"),
    *(b"Accept: text/event-stream\r\n", b"Accept: application/jsonl;q=2\r\n"),
    b"Prefer: wait=1\r\n",
    *(b"Upgrade: websocket\r\n", b"Sec-WebSocket-Version: 8\r\n", b"Sec-WebSocket-Key: \xff\r\n"),
    *(b"Origin: \xff\r\n", b"Authorization: Bearer \xff\r\n", b"Idempotency-Key: \xc3\r\n"),
    *(b'Forwarded: for="[::1\r\n', b"X-Forwarded-For: ,\r\n", b"Last-Event-ID: \xff\r\n"),
    *(b"Content-Type: multipart/form-data\r\n", b"Content-Type: \xff; boundary=\xff\r\n"),
    *(b"ffffffffffffffff\r\n", b"-1\r\n", b"0\r\n\r\n", b"3;x\r\n", b"1" * 20 + b"\r\n"),
    *(b"after=", b"wait=", b"skip=", b"limit=", b"evaluation=", b"ID", b"NONE", b"/events"),
    *(b"X: " + b"y" * 9000, f"--{BOUNDARY}--\r\n".encode(), b"x" * 300, b"\r\n x\r\n"),
)
RAW = mutated(st.sampled_from(WHOLE) | requests(), PIECES)
STEPS = st.lists(
    st.one_of(
        *[st.tuples(RAW, st.integers(0, 1), st.none() | st.integers(1, 600))] * 4,
        st.sampled_from(["print", "end", "second", "leave", "stop"]),
    ),
    min_size=1,
    max_size=24,
)
_HEAD = re.compile(rb"HTTP/1\.[01] ([0-9]{3}) [^\r\n]*\r\n(.*?)\r\n\r\n", re.DOTALL)


@attrs.define
class World:
    """A service with one evaluation and two clients."""

    service: Service
    identifier: str
    clients: list[Connection]
    ended: bool = False

    @classmethod
    def begin(cls, root: Path, kind: str) -> World:
        root.mkdir()
        tokens = root / "tokens"
        tokens.write_text(TOKENS)
        service = Service(root, CONFIGURATIONS[kind], tokens=tokens if kind == "tokens" else None)
        client = service.connect()
        headers = {"Content_Type": MULTIPART, "Authorization": f"Bearer {TOKEN}"}
        client.request("POST /evaluate", FORM, **headers)
        identifier = client.answer().json()["evaluation_id"]
        client.lose()
        return cls(service, identifier, [service.connect(), service.connect()])

    def take(self, step: Any) -> None:
        if step == "print" and not self.ended:
            self.service.world.child.print(b"a\nb\n")
        elif step == "end" and not self.ended:
            self.ended = True
            self.service.world.child.end()
            self.service.world.turn()
        elif step == "second":
            self.service.reactor.advance(1)
        elif step == "leave":
            self.clients[0].lose()
            self.clients[0] = self.service.connect()
        elif step == "stop":
            self.service.site.is_draining = True
        elif isinstance(step, tuple):
            self.ask(*step)

    def ask(self, request: bytes, number: int, cut: int | None) -> None:
        """Send a request; with a cut a part of it, then the rest, and the same once more."""
        request = request.replace(b"ID", self.identifier.encode())
        request = request.replace(b"NONE", b"a" * len(self.identifier))
        for piece in (request,) if cut is None else (request[:cut], request[cut:] + request):
            client = self.clients[number]
            if piece and not client.closed:
                client.send(piece)

    def close(self) -> None:
        for client in self.clients:
            client.lose()
        self.service.close()
        left = [call.getTime() for call in self.service.reactor.getDelayedCalls()]
        assert not left, left


class RequestTests(SynchronousTestCase):
    @settings(max_examples=settings().max_examples // 4)  # each takes long
    @given(st.sampled_from(sorted(CONFIGURATIONS)), STEPS)
    def test_any_sequence_of_requests_gets_valid_responses_and_logs_no_error(
        self, kind: str, steps: Sequence[Any]
    ) -> None:
        world = World.begin(Path(self.mktemp()).resolve(), kind)
        for step in steps:
            world.take(step)
            for client in world.clients:
                self.check_received(client.received)
        world.close()
        shutil.rmtree(world.service.root)
        logged = self.flushLoggedErrors()
        assert not logged, logged

    def check_received(self, received: bytes) -> None:
        assert not received or received.startswith((b"HTTP/1.0 ", b"HTTP/1.1 ")), received
        assert b"Traceback" not in received
        for status, headers in _HEAD.findall(received):
            assert status != b"500", received
            assert b"/html" not in headers or status == b"200", received
            if status >= b"400":
                assert b"Content-Type: application/problem+json" in headers, received
            if int(status) >= 200:
                assert b"\r\nServer: tawebeval/" in b"\r\n" + headers, received
