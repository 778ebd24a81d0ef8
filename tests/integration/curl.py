"""A client that speaks HTTP/2 over TLS, as browsers do: curl."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import attrs
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from twisted.web.http_headers import Headers

from tests.cases.patience import PATIENCE
from tests.integration.client import Answer, Client
from tests.integration.raw import BOUNDARY, body_of, part

CURL = shutil.which("curl")

_TOLD = '%{stderr}{"facts": %{json}, "headers": %{header_json}}'


class CurlFailed(Exception):
    """curl has ended before it had its answers; the words are its own."""


@attrs.frozen
class Transfer:
    """What curl says of an answer, which is in `file` if it was told to write one.

    `version` is that of HTTP, and `connections` how many were opened for it.
    """

    code: int
    version: str
    connections: int
    headers: Headers
    file: Path


class Curl(ProcessProtocol):
    """One curl, of which `received` gets what it reads, as that comes.

    `done` fires at its end with its transfers, or fails with `CurlFailed`.
    """

    def __init__(self, received: Callable[[bytes], object]) -> None:
        self._ended: Deferred[str] = Deferred()
        self.done: Deferred[list[Transfer]] = self._ended.addCallback(_transfers)
        self._received = received
        self._told = bytearray()

    @classmethod
    def begin(cls, received: Callable[[bytes], object], *arguments: str) -> Curl:
        """Start it; what it is to send can be written then."""
        assert CURL is not None, "these tests need curl: it is not installed"
        curl = cls(received)
        usual = (
            *("-qN", "--no-progress-meter", "--noproxy", "*"),
            *("--http2", "--max-time", f"{PATIENCE:g}", "--write-out", _TOLD),
        )
        process: Any = reactor
        process.spawnProcess(curl, CURL, ["curl", *usual, *arguments], env=os.environ)
        return curl

    @property
    def pid(self) -> int:
        pid: int = self.transport.pid  # type: ignore[union-attr]
        return pid

    def write(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[union-attr]

    def finish(self) -> None:
        self.transport.closeStdin()  # type: ignore[union-attr]

    async def kill(self) -> None:
        """End it as those end who go away without a word."""
        self.transport.signalProcess("KILL")  # type: ignore[union-attr]
        self.done.addErrback(lambda failure: failure.trap(CurlFailed))
        await self.done

    def outReceived(self, data: bytes) -> None:
        self._received(data)

    def errReceived(self, data: bytes) -> None:
        self._told += data

    def processEnded(self, reason: Failure) -> None:
        told = self._told.decode()
        status = reason.value.exitCode  # type: ignore[union-attr]
        if status == 0:
            self._ended.callback(told)
        else:
            self._ended.errback(CurlFailed(f"status {status}: {told}"))


def _transfers(told: str) -> list[Transfer]:
    """Return what stands in the output that was asked for."""
    found: list[Transfer] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(told):
        document, at = decoder.raw_decode(told, at)
        facts = document["facts"]
        transfer = Transfer(
            facts["http_code"],
            facts["http_version"],
            facts["num_connects"],
            Headers(document["headers"]),
            Path(facts["filename_effective"] or ""),
        )
        found.append(transfer)
    return found


class Http2Client(Client):
    """Talks HTTP/2 to what is at `url`, whose `certificate` it trusts; else as any `Client`.

    Each request has a connection of its own, save those of `together`.
    """

    def __init__(self, url: str, certificate: Path, *, source: str | None = None) -> None:
        super().__init__(url)
        self._options = ("--cacert", str(certificate), "--path-as-is")
        if source is not None:
            self._options += ("--interface", source)

    def begin(
        self, received: Callable[[bytes], object], path: str, *options: str, **headers: str
    ) -> Curl:
        lines = (f"{name.replace('_', '-')}: {value}" for name, value in headers.items())
        given = (word for line in lines for word in ("--header", line))
        return Curl.begin(received, *self._options, *options, *given, self.url + path)

    async def request(self, method: str, path: str, **arguments: Any) -> Answer:
        """Return the answer to a request, whatever its status."""
        options = ["--request", method]
        headers = {**(arguments.get("headers") or {})}
        query = urlencode(arguments.get("params") or {})
        body = b""
        if "files" in arguments:
            body = _form(arguments["data"], arguments["files"])
            options += ["--data-binary", "@-"]
            headers["Content-Type"] = f"multipart/form-data; boundary={BOUNDARY}"
        pieces: list[bytes] = []
        target = f"{path}?{query}" if query else path
        curl = self.begin(pieces.append, target, "--globoff", *options, **headers)
        curl.write(body)
        curl.finish()
        (transfer,) = await curl.done
        assert transfer.version == "2", transfer
        return Answer(transfer.code, transfer.headers, b"".join(pieces))

    async def together(
        self, folder: Path, path: str, count: int, *options: str
    ) -> tuple[list[Answer], int]:
        """Ask the same so often by one curl; return the answers, and how many connections it took.

        One after the other, or at once if an option says so. The folder is for the answers.
        """
        query = "&" if "?" in path else "?"
        many = (*options, "--parallel-max", str(count), "--output", f"{folder}/answer-#1")
        curl = self.begin(_nothing, f"{path}{query}n=[1-{count}]", *many)
        transfers = await curl.done
        assert {transfer.version for transfer in transfers} == {"2"}, transfers
        answers = [Answer(one.code, one.headers, one.file.read_bytes()) for one in transfers]
        return answers, sum(transfer.connections for transfer in transfers)

    async def stream(
        self, path: str, received: Callable[[bytes], object], headers: dict[str, str]
    ) -> None:
        """Read a stream to its end; `received` gets it piece by piece."""
        (transfer,) = await self.begin(received, path, **headers).done
        assert (transfer.code, transfer.version) == (200, "2"), transfer


def _nothing(data: bytes) -> None:
    raise AssertionError(f"this belongs into a file: {data!r}")


def _form(fields: Any, files: Any) -> bytes:
    """Return the body of a form that is given as treq would have it."""
    return body_of(
        [
            *(part(name, value.encode()) for name, value in fields),
            *(part(field, content.read(), name) for field, (name, _, content) in files),
        ]
    )
