"""The files of forms on their way to the disk: gathered in memory, written by threads.

A form that is small is written by one call, when it is complete. Of a large one a call writes what
has come, while what follows is gathered; when that is as much again its connection is not read
until the call has returned. So a slow disk slows those who send, and nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import attrs
from twisted.logger import Logger

from tawebeval.core.budget import Spool
from tawebeval.deferreds import Condition, WorkerThreads, in_background
from tawebeval.linux.filetree import add_path

BATCH = 512 * 1024
"""Bytes of a form that are gathered before a thread writes them, unless the form ends before."""

_PER_FILE = 1024  # bytes of memory that a file takes here besides its content

log = Logger()


class UploadSource(Protocol):
    """The request that a form comes from."""

    def pause_body(self) -> None:
        """Read no more of the body."""

    def resume_body(self) -> None:
        """Read on; what is not paused stays so."""

    def refuse(self, error: Exception) -> None:
        """Answer that nothing comes of it: an OSError says why."""


@attrs.define
class _Piece:
    """A part of a file, which `begins` it or continues it."""

    path: Path
    begins: bool
    content: bytearray = attrs.field(factory=bytearray)


@attrs.define(eq=False)
class UploadWriter:
    """Writes the files of one form below `directory`, which is made with the first of them.

    `used` tells whether there may be anything on the disk. `spool.in_memory` counts what is
    gathered and what a thread is writing.
    """

    directory: Path
    _source: UploadSource
    _spool: Spool
    _threads: WorkerThreads
    used: bool = False
    _gathered: list[_Piece] = attrs.field(factory=list)
    _size: int = 0  # bytes that what is gathered takes in memory
    _file: Path = Path()  # the one that is arriving
    _complete: bool = False
    _writing: bool = False
    _error: Exception | None = None
    _rest: Condition[None] = attrs.field(factory=Condition)
    _then: Callable[[], object] | None = None

    def begin(self, path: Path) -> None:
        """Begin a file, at a path relative to the directory."""
        self._file = path
        self._gather(_Piece(path, begins=True), _PER_FILE)

    def add(self, content: bytes | bytearray) -> None:
        """Add to the file that was begun last."""
        if not self._gathered:
            self._gather(_Piece(self._file, begins=False), _PER_FILE)
        self._gathered[-1].content += content
        self._count(len(content))
        if self._writing:
            if self._due:
                self._source.pause_body()
        else:
            self._write_what_is_due()

    def _gather(self, piece: _Piece, size: int) -> None:
        self._gathered.append(piece)
        self._count(size)

    def _count(self, size: int) -> None:
        self._size += size
        self._spool.in_memory += size

    async def finish(self) -> None:
        """Return when all is on the disk. Raises OSError; may be cancelled."""
        self._complete = True
        if not self._writing:
            self._write_what_is_due()
        while self._writing:
            await self._rest.wait()
        if self._error is not None:
            raise self._error

    def abandon(self, then: Callable[[], object]) -> None:
        """Write nothing more; call `then` when no thread writes any more."""
        self._forget_gathered()
        if self._writing:
            self._then = then
        else:
            then()

    def _forget_gathered(self) -> list[_Piece]:
        gathered, self._gathered = self._gathered, []
        self._count(-self._size)
        return gathered

    @property
    def _due(self) -> bool:
        """Whether what is gathered is to be written, as soon as nothing else of it is."""
        if self._error is not None or not self._gathered:
            return False
        return self._complete or self._size >= BATCH or self._spool.is_crowded

    def _write_what_is_due(self) -> None:
        if self._due:
            self._writing = self.used = True
            in_background(self._write(), log, "an upload cannot be ended")

    async def _write(self) -> None:
        try:
            while self._due:
                size = self._size
                pieces = self._forget_gathered()
                self._spool.in_memory += size
                try:
                    await self._threads.run(_write, self.directory, pieces)
                finally:
                    self._spool.in_memory -= size
                self._source.resume_body()
        except Exception as error:  # noqa: BLE001  (who sends the form is told of any end)
            self._error = error
        self._writing = False
        self._rest.notify(None)
        if self._then is not None:
            self._then()
        elif self._error is not None and not self._complete:
            self._source.refuse(self._error)


def _write(directory: Path, pieces: list[_Piece]) -> None:
    """Write pieces of files, in their order. Blocks. Raises OSError."""
    # What is around it is not made here: it is for nobody else to look into.
    directory.mkdir(mode=0o755, exist_ok=True)
    for piece in pieces:
        path = directory / piece.path
        if piece.begins:
            path.parent.mkdir(mode=0o755, parents=True)
        # Without a buffer: what the disk has not taken must not be tried again when it is closed.
        with add_path(path), open(path, "xb" if piece.begins else "ab", buffering=0) as file:
            rest = memoryview(piece.content)
            while rest:
                rest = rest[file.write(rest) :]
