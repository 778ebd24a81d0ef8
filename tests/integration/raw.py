"""Requests byte by byte, for what no client library would send."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from select import select

import attrs

from tests.cases.patience import PATIENCE

BOUNDARY = "----a-boundary"


@attrs.frozen
class RawAnswer:
    """An answer as it came; header names are in lower case."""

    code: int
    headers: dict[str, str]
    body: bytes

    def problem(self, code: int) -> dict[str, object]:
        """Return the problem document that the answer must be, with the status `code`."""
        assert self.code == code, f"{self.code}, not {code}: {self.body!r}"
        assert self.headers["content-type"] == "application/problem+json", self.headers
        assert self.headers["access-control-allow-origin"] == "*"
        document: dict[str, object] = json.loads(self.body)
        assert document["status"] == code
        assert document["message"] == document["detail"]
        assert document["message"]
        assert b"Traceback" not in self.body
        return document


class Connection:
    """A connection to the daemon, on which everything has a deadline."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.settimeout(PATIENCE)
        self._socket.connect(("127.0.0.1", port))
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send_until_answered(self, data: bytes) -> None:
        """Send as much of it as is taken before something comes back."""
        rest = memoryview(data)
        while rest:
            readable, writable, _ = select([self._socket], [self._socket], [], PATIENCE)
            if readable or not writable:
                return
            rest = rest[self._socket.send(rest[: 64 * 1024]) :]

    def ask(self, data: bytes) -> RawAnswer:
        self.send(data)
        return self.answer()

    def answer(self) -> RawAnswer:
        _, code, _ = self._file.readline().split(b" ", 2)
        headers = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        length = headers.get("content-length")
        body = self._file.read(None if length is None else int(length))
        return RawAnswer(int(code), headers, body)

    def read_until(self, word: bytes) -> None:
        while word not in (line := self._file.readline()):
            assert line, f"{word!r} has not come"


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    """Return one part of a form."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"'
    if filename is not None:
        head += f'; filename="{filename}"'
    return head.encode() + b"\r\n\r\n" + content + b"\r\n"


def body_of(parts: Iterable[bytes]) -> bytes:
    """Return a form's body."""
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def head_of(length: int | None, *headers: str, target: str = "/evaluate") -> bytes:
    """Return the head of a request that brings a form."""
    lines = [
        f"POST {target} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}",
        *((f"Content-Length: {length}",) if length is not None else ()),
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode()
