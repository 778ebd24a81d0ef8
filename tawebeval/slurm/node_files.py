"""Files that evaluators name, read by the node, for nodes without a shared directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from secrets import token_hex

import attrs
from twisted.internet.defer import Deferred

from tawebeval.errors import format_size
from tawebeval.sandbox.workspace import FileRefused
from tawebeval.slurm.frames import TOKEN_BYTES, FrameKind, encode_read


@attrs.define(eq=False)
class NodeFiles:
    """The files of one evaluator, of at most `limit` bytes each: one is read at a time.

    `send` sends a line to the node, and tells whether it could. What a node answers to an earlier
    daemon has another token, and is left out.
    """

    _limit: int
    _send: Callable[[bytes], bool]
    _token: bytes = b""
    _path: str = ""
    _content: bytearray = attrs.field(factory=bytearray)
    _answered: Deferred[bytes] | None = None

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file. Raises: FileRefused."""
        self._token, self._path = token_hex(TOKEN_BYTES // 2).encode(), path
        self._content.clear()
        answered = self._answered = Deferred()
        if not self._send(encode_read(self._token, path)):
            self.lose_node()
        return await answered

    def on_frame(self, kind: FrameKind, content: bytes) -> None:
        """Take a frame of a file. Raises: ValueError."""
        token, content = content[:TOKEN_BYTES], content[TOKEN_BYTES:]
        if self._answered is None or token != self._token:
            return
        if kind is FrameKind.FILE:
            self._content += content[: self._limit + 1 - len(self._content)]
            return
        refusal = json.loads(content)
        if refusal is None and len(self._content) > self._limit:
            refusal = f"{self._path!r} is over {format_size(self._limit)} (limits.file)"
        self._answer(refusal)

    def lose_node(self) -> None:
        """Refuse the file that is being read: no answer comes any more."""
        self._answer(f"{self._path!r} cannot be read: the node is gone")

    def _answer(self, refusal: str | None) -> None:
        answered, self._answered = self._answered, None
        content = bytes(self._content)
        self._content.clear()
        if answered is None:
            return
        if refusal is None:
            answered.callback(content)
        else:
            answered.errback(FileRefused(refusal))
