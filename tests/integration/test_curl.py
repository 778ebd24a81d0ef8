"""Forms as curl sends them: the client that everybody has."""

from __future__ import annotations

import json
import os
import shutil

from twisted.internet import reactor
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.utils import getProcessOutputAndValue

from tests.cases.patience import PATIENCE
from tests.integration.harness import DaemonTestCase
from tests.integration.raw import Connection
from tests.integration.uploads import DESCRIBE, MIB, UploadTestCase, described

CURL = shutil.which("curl")


class Cutter(Protocol):
    """Answers a request for `/N` with the first N bytes of `answer`, and hangs up."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def dataReceived(self, data: bytes) -> None:
        length = int(data.partition(b" ")[2].partition(b" ")[0][1:])
        self.transport.write(self._answer[:length])
        self.transport.loseConnection()


class CurlTests(UploadTestCase):
    async def curl(self, *arguments: str) -> tuple[int, int, bytes]:
        """Return the status of the answer, how many bytes were sent for it, and its body."""
        self.assertIsNotNone(CURL, "these tests need curl: it is not installed")
        answer = self.folder / "answer"
        out, err, status = await getProcessOutputAndValue(
            CURL,
            [
                *("--silent", "--show-error", "--max-time", str(PATIENCE), "--noproxy", "*"),
                *("--output", str(answer), "--write-out", "%{http_code} %{size_upload}"),
                *arguments,
                f"{self.daemon.url}/evaluate",
            ],
        )
        self.assertEqual((status, err), (0, b""), "curl could not read the answer")
        code, sent = map(int, out.split())
        body = answer.read_bytes()
        if code == 200:
            self.client.evaluations.append(json.loads(body)["evaluation_id"])
        return code, sent, body

    def form(self, *files: tuple[str, str]) -> list[str]:
        """Return curl's arguments for a form with these files, by field and path."""
        return [
            *("--form-string", f"repository[url]={self.repository.url}"),
            *("--form-string", f"commit_oid={self.commit}"),
            *("--form-string", f"evaluator_cmd={DESCRIBE}"),
            *(item for field, path in files for item in ("--form", f"submission[{field}]=@{path}")),
        ]

    def write(self, name: str, content: bytes) -> str:
        path = self.folder / name
        path.write_bytes(content)
        return str(path)

    async def test_files_arrive_exactly(self) -> None:
        files = (
            ("source", "solución ñ.cpp", b"int main() {}\r\n"),
            ("input", "a b.bin", bytes(range(256)) * 100),
            ("empty", "nothing", b""),
            ("ends", "ends.txt", b"\r\n\n\r\r\n--\r\n"),
            ("text_2", "text.py", b"--boundary\r\n\r\n--boundary--\r\n"),
        )
        form = self.form(*((field, self.write(name, content)) for field, name, content in files))
        code, _, body = await self.curl(*form)
        self.assertEqual(code, 200)
        identifier = json.loads(body)["evaluation_id"]
        self.assertEqual(await self.describe(identifier), described(*files))

    async def test_a_chunked_form_arrives_exactly(self) -> None:
        content = os.urandom(3 * MIB)
        form = self.form(("s", self.write("some", content)))
        _, _, body = await self.curl("--header", "Transfer-Encoding: chunked", *form)
        found = await self.describe(json.loads(body)["evaluation_id"])
        self.assertEqual(found, described(("s", "some", content)))

    async def test_over_the_limit_is_read_by_curl_before_it_has_sent_all(self) -> None:
        form = self.form(("s", self.write("large", b"x" * 60 * MIB)))
        for headers in ((), ("--header", "Expect:")):
            code, sent, body = await self.curl(*headers, *form)
            self.assertEqual(code, 413)
            self.assertIn("limit", json.loads(body)["message"])
            self.assertLess(sent, 40 * MIB)

    async def test_a_broken_field_is_read_by_curl(self) -> None:
        large = self.write("large", b"x" * 30 * MIB)
        code, _, body = await self.curl(
            "--form-string", "submission[Not]=x", *self.form(("s", large))
        )
        self.assertEqual(code, 400)
        self.assertEqual(json.loads(body)["field"], "submission[Not]")


class CutHeadTests(DaemonTestCase):
    async def test_curl_reports_a_head_that_is_cut_off(self) -> None:
        # Before the first header curl takes the status line for a whole answer, whatever is sent;
        # curl 8.14 takes any part of the head of a stream for one.
        self.assertIsNotNone(CURL, "these tests need curl: it is not installed")
        identifier = await self.begin("echo hello")
        await self.client.follow(identifier)
        for accept, header in (
            ("application/json", b"Content-Length"),
            ("application/jsonl", b"Transfer-Encoding"),
        ):
            with Connection(self.daemon.port) as connection:
                connection.send(
                    f"GET /evaluation/{identifier}/events?after=end HTTP/1.1\r\n"
                    f"Host: localhost\r\nAccept: {accept}\r\nConnection: close\r\n\r\n".encode()
                )
                answer = connection.rest()
            _, first, *_ = answer.split(b"\r\n", 2)
            self.assertTrue(first.startswith(header), answer)
            if header == b"Content-Length":
                begin, end = answer.index(first) + len(first) + 2, answer.index(b"\r\n\r\n") + 4
                self.assertGreater(end, begin + 100)
                self.assertEqual(await self.read_cut(answer, range(begin, end + 1)), set())

    async def read_cut(self, answer: bytes, lengths: range) -> set[int]:
        """Return after how many bytes of an answer curl takes the cut for its end."""
        factory = Factory()
        factory.protocol = lambda: Cutter(answer)
        port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(factory)
        self.addCleanup(port.stopListening)
        base = f"http://127.0.0.1:{port.getHost().port}"
        usual = ("--silent", "--noproxy", "*", "--write-out", "%{exitcode} ", "--max-time")
        out, err, _ = await getProcessOutputAndValue(
            CURL, [*usual, str(PATIENCE), *(f"{base}/{length}" for length in lengths)], os.environ
        )
        statuses = out.split()
        self.assertEqual((len(statuses), err), (len(lengths), b""))
        return {length for length, status in zip(lengths, statuses, strict=True) if status == b"0"}
