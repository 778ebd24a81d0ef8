"""What holds of HTTP/2 before any proxy, where one connection has many streams."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from twisted.internet.defer import Deferred

from tests.integration.client import failure, text
from tests.integration.curl import CurlFailed, Http2Client
from tests.integration.harness import until
from tests.integration.proxy_case import ENDLESS, LONG_LINE, PER_CLIENT, WAITING, answered
from tests.integration.raw import BOUNDARY, body_of, part
from tests.integration.uploads import MIB

FORM = f"multipart/form-data; boundary={BOUNDARY}"


class Http2Tests:
    """HTTP/2 as curl speaks it; for a `ProxyTestCase` with `FollowingTests` and `SurfaceTests`."""

    async def test_many_streams(self: Any) -> None:
        """As many requests as a client may have go over one connection; each is one of his."""
        identifier = await self.begin_by(self.http2, WAITING)
        path = f"/evaluation/{identifier}/events"
        options = ("--parallel", "--header", "Accept: application/jsonl")
        reading = Deferred.fromCoroutine(
            self.http2.together(self.folder, path, PER_CLIENT, *options)
        )
        files = [self.folder / f"answer-{number + 1}" for number in range(PER_CLIENT)]
        await until(
            lambda: all(file.exists() and b'"one"' in file.read_bytes() for file in files),
            "each stream has begun",
        )
        answer = await self.http2.get("/health")
        self.assertIn("too many requests of this client", answer.problem(503)["detail"])
        self.assertEqual(answer.header("Retry-After"), "5")
        url, certificate = self.proxy.tls_url, self.proxy.certificate
        async with Http2Client(url, certificate, source="127.0.0.2") as another:
            self.assertEqual((await another.get("/health")).code, 200)
        await self.client.cancel(identifier)
        answers, connections = await reading
        self.assertEqual((len(answers), connections), (PER_CLIENT, 1))
        for answer in answers:
            self.assertEqual(answer.code, 200)
            failure(map(json.loads, answer.body.splitlines()), "cancelled")

    async def test_refused_early(self: Any) -> None:
        """Who is refused while he sends reads why, and his connection serves the next request."""
        source = part("submission[a]", b"x" * 300_000, "a")
        for kind, body, path, code in (
            (FORM, body_of([part("submission[Not]", b"x"), source]), "/evaluate", 400),
            ("text/plain", source, "/evaluate", 415),
            (FORM, body_of([source]), "/nowhere", 413),
        ):
            sent = self.folder / "sent"
            sent.write_bytes(body)
            options = ("--header", f"Content-Type: {kind}", "--data-binary", f"@{sent}")
            answers, connections = await self.http2.together(self.folder, path, 2, *options)
            self.assertEqual((len(answers), connections), (2, 1))
            for answer in answers:
                answer.problem(code)

    async def test_unannounced(self: Any) -> None:
        """A form whose length nobody knows reaches the daemon while it is sent, and whole."""
        content = bytes(range(256)) * (4 * MIB // 256)
        body = self.describing(content)
        answer: list[bytes] = []
        options = ("--request", "POST", "--upload-file", "-")
        curl = self.http2.begin(answer.append, "/evaluate", *options, Content_Type=FORM)
        half = len(body) // 2
        curl.write(body[:half])
        await until(lambda: self.arrived() > half - MIB, "half of it is there")
        curl.write(body[half:])
        curl.finish()
        (transfer,) = await curl.done
        self.assertEqual((transfer.code, transfer.version), (200, "2"))
        await self.check_described(self.http2, b"".join(answer), content)

    async def test_gone_with_streams(self: Any) -> None:
        """The daemon learns that a connection has gone with all its streams."""
        identifier = await self.begin_by(self.http2, WAITING)
        pieces: list[bytes] = []
        path = f"/evaluation/{identifier}/events?n=[1-3]"
        options = ("--parallel", "--header", "Accept: application/jsonl")
        curl = self.http2.begin(pieces.append, path, *options)
        await until(lambda: b"".join(pieces).count(b'"one"') == 3, "each has it")
        self.assertEqual(answered(self.daemon, identifier), [])
        await curl.kill()
        await until(lambda: len(answered(self.daemon, identifier)) == 3, "all streams end")

    async def test_stopped_reader(self: Any) -> None:
        """Of what a reader does not take any more nothing is lost when its line breaks.

        It has taken little before: for a quick one the kernel makes more room than the daemon
        keeps behind it.
        """
        identifier, gate = await self.begin_and_hold(f"echo; {ENDLESS}")
        path = f"/evaluation/{identifier}/events"
        pieces: list[bytes] = []
        curl = self.http2.begin(pieces.append, path, Accept="application/jsonl")
        await until(lambda: pieces, "it begins")
        os.kill(curl.pid, signal.SIGSTOP)
        gate.write_text("go\n")
        await self.printed_much(identifier)
        await curl.kill()
        first = b"".join(pieces).splitlines(keepends=True)
        if not first[-1].endswith(b"\n"):
            del first[-1]
        rest: list[bytes] = []
        again = self.http2.begin(
            rest.append, f"{path}?after={len(first)}", Accept="application/jsonl"
        )
        await until(lambda: rest, "it goes on")
        await self.http2.cancel(identifier)
        (transfer,) = await again.done
        self.assertEqual(transfer.code, 200, rest)
        events = [json.loads(line) for line in [*first, *b"".join(rest).splitlines()]]
        failure(events, "cancelled")
        ready, *lines, _ = text(events).split("\n")  # the end may have come within a line
        expected = [LONG_LINE.format(number) for number in range(len(lines))]
        self.assertTrue((ready, lines) == ("ready", expected), "not what was printed")


class Http2RefusalTests:
    """Heads that a proxy itself refuses over HTTP/2; for a `ProxyTestCase`."""

    async def test_long_head_of_http2(self: Any) -> None:
        """Too large a head gets no answer; the next connection is served."""
        for path, headers in ((f"/{'x' * 40_000}", {}), ("/health", {"X-Long": "x" * 40_000})):
            asking = Deferred.fromCoroutine(self.http2.get(path, headers=headers))
            await self.assertFailure(asking, CurlFailed)
        self.assertEqual((await self.http2.get("/health")).code, 200)
