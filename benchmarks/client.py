"""A small HTTP client: one keep-alive connection, blocking, with as little cost as can be."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

_TIMEOUT = 60.0
_BOUNDARY = "benchmark-boundary-5f1d"


class HTTPError(Exception):
    """An answer other than 2xx."""


class Client:
    """Speaks to one server on the loopback interface; a context manager."""

    received = 0
    """When the last bytes of the last answer were read (time.monotonic_ns)."""
    length = 0
    """The bytes of the last answer, head and body."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _TIMEOUT)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, whatever is under way on it."""
        self._socket.close()

    def exchange(self, request: bytes) -> bytes:
        """Send a request and return the body of its answer."""
        self._socket.sendall(request)
        answer = b""
        while True:
            answer += self._read()
            head, separator, body = answer.partition(b"\r\n\r\n")
            if separator:
                break
        chunks = [body]
        missing = content_length(head) - len(body)
        self.length = len(answer) + missing
        while missing > 0:
            chunks.append(self._read())
            missing -= len(chunks[-1])
        if not head.startswith(b"HTTP/1.1 2"):
            raise HTTPError(answer.decode("utf-8", "replace"))
        return b"".join(chunks)

    def get(self, path: str) -> bytes:
        """Return the body that GET brings."""
        return self.exchange(get(path))

    def page(self, identifier: str, after: str | None = None, wait: int = 30) -> dict[str, Any]:
        """Return a page of events, waiting for one that is not empty."""
        page: dict[str, Any] = json.loads(self.exchange(events(identifier, after, wait)))
        return page

    def evaluate(self, url: str, commit: str, command: str, environment: str = "default") -> str:
        """Begin an evaluation and return its identifier."""
        answer = json.loads(self.exchange(evaluate(url, commit, command, environment)))
        identifier: str = answer["evaluation_id"]
        return identifier

    def _read(self) -> bytes:
        chunk = self._socket.recv(256 * 1024)
        self.received = time.monotonic_ns()
        if not chunk:
            raise HTTPError("the server closed the connection")
        return chunk


def content_length(head: bytes) -> int:
    """Return the bytes of the body to which this head belongs. Raises HTTPError."""
    if b" 204 " in head.partition(b"\r\n")[0]:
        return 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    raise HTTPError(head.decode("utf-8", "replace"))


def get(path: str) -> bytes:
    """Return the request that asks for `path`."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def events(identifier: str, after: str | None = None, wait: int = 30) -> bytes:
    """Return the request that asks for a page, and waits so many seconds for one."""
    query = f"?after={after}&wait={wait}" if after else f"?wait={wait}"
    return get(f"/evaluation/{identifier}/events{query}")


def fields(url: str, commit: str, command: str) -> dict[str, str]:
    """Return the fields of a form by which an evaluation is begun, but for the submission."""
    return {"repository[url]": url, "commit_oid": commit, "evaluator_cmd": command}


def evaluate(url: str, commit: str, command: str, environment: str = "default") -> bytes:
    """Return the request that begins an evaluation of one small file."""
    all_fields = {"submission[source]": "print(42)\n", **fields(url, commit, command)}
    if environment != "default":
        all_fields["environment"] = environment
    body = "".join(
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in all_fields.items()
    )
    body += f"--{_BOUNDARY}--\r\n"
    return (
        "POST /evaluate HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: multipart/form-data; boundary={_BOUNDARY}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()
