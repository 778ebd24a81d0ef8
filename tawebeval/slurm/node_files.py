"""Files that evaluators name, read by the node, for nodes without a shared directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from secrets import token_hex
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall

from tawebeval.errors import format_size
from tawebeval.sandbox.workspace import FileRefused
from tawebeval.slurm.frames import TOKEN_BYTES, FrameKind, encode_file_request

ANSWER_TIMEOUT = 120.0
"""Seconds without a part of a file after which a node is given up."""


@attrs.define(eq=False)
class NodeFileReader:
    """Reader of the files of one evaluator, of at most `limit` bytes each, one at a time.

    `send` sends a line to the node, and tells whether it could. What a node answers to an earlier
    request has another token, and is left out. `on_silence` is called after `ANSWER_TIMEOUT`.
    """

    _clock: Any
    _limit: int
    _send: Callable[[bytes], bool]
    _on_silence: Callable[[], object]
    _token: bytes = b""
    _path: str = ""
    _content: BytesIO = attrs.field(factory=BytesIO)  # bytearray would be copied in the end
    _answered: Deferred[bytes] | None = None
    _timeout: IDelayedCall | None = None

    async def fetch_file(self, path: str) -> bytes:
        """Return the content of a file. Raises: FileRefused."""
        self._token, self._path = token_hex(TOKEN_BYTES // 2).encode(), path
        answered = self._answered = Deferred()
        self._timeout = self._clock.callLater(ANSWER_TIMEOUT, self._on_silence)
        if not self._send(encode_file_request(self._token, path)):
            self.fail_pending_fetch()
        return await answered

    def on_frame(self, kind: FrameKind, content: bytes) -> None:
        """Take a frame of a file. Raises: ValueError."""
        token, content = content[:TOKEN_BYTES], content[TOKEN_BYTES:]
        if self._answered is None or token != self._token:
            return
        if kind is FrameKind.FILE:
            if self._timeout is not None and self._timeout.active():
                self._timeout.reset(ANSWER_TIMEOUT)
            self._content.write(content[: self._limit + 1 - self._content.tell()])
            return
        refusal = json.loads(content)
        if refusal is None and self._content.tell() > self._limit:
            refusal = f"{self._path!r} is over {format_size(self._limit)} (limits.file)"
        self._answer(refusal)

    def fail_pending_fetch(self) -> None:
        """Refuse the file that is being read: no answer comes any more."""
        self._answer(f"{self._path!r} cannot be read: the node is gone")

    def _answer(self, refusal: str | None) -> None:
        if self._timeout is not None and self._timeout.active():
            self._timeout.cancel()
        answered, self._answered = self._answered, None
        content, self._content = self._content, BytesIO()
        if answered is None:
            return
        if refusal is None:
            answered.callback(content.getvalue())
        else:
            answered.errback(FileRefused(refusal))
