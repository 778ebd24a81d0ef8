"""Stdout and stderr as they may be: full, closed, or read by nobody any more."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO

import attrs


class OutputLost(Exception):
    """Stdout cannot be written to; `str()` says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"stdout: {error.strerror or error}")
        self.unread = isinstance(error, BrokenPipeError)
        """Whether it is a pipe that is closed at its other end, as by `head`."""


@attrs.define
class Output:
    """Stdout. What is written after it was lost goes nowhere."""

    _stream: TextIO
    _lost: bool = False

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        return self._stream.isatty()

    def write(self, text: str) -> None:
        """Write. Raises OutputLost, once."""
        if not self._lost:
            try:
                self._stream.write(text)
            except OSError as error:
                raise self._give_up(error) from None

    def flush(self) -> None:
        """Let it be seen. Raises OutputLost, once."""
        if not self._lost:
            try:
                self._stream.flush()
            except OSError as error:
                raise self._give_up(error) from None

    def _give_up(self, error: OSError) -> OutputLost:
        self._lost = True
        _forsake(self._stream)
        return OutputLost(error)


@attrs.define
class Notes:
    """Stderr. Where it cannot be written to there is nobody to be told so."""

    _stream: TextIO

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        return self._stream.isatty()

    def write(self, text: str) -> None:
        """Write, and let it be seen."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            _forsake(self._stream)


def _forsake(stream: TextIO) -> None:
    """Let a stream lead nowhere: Python would write again, at its end, what it has kept."""
    with suppress(OSError):  # it is none of a file
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
