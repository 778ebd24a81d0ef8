"""What people and programs see of an evaluation, on stdout and stderr.

What was printed goes to stdout, just as it was; everything else goes to stderr. A terminal gets no
control characters of strangers: they could recolour or overwrite what stands there, or type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TextIO

import attrs
import click

from tawebeval.cli.streams import Notes, Output
from tawebeval.client import Data, EvaluationError, Event, File, Text, Unknown

# C0 but for tabulators and line terminators, DEL, C1, and what changes the direction of writing.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_MOST = 2000  # characters of one value that are shown to people
_CLEAR = "\r\x1b[K"


def escaped(text: str) -> str:
    r"""Return text in which control characters are written out, as JSON would (`\u001b`)."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Tell whether to write in colours there (see no-color.org)."""
    return stream.isatty() and not environment.get("NO_COLOR")


@attrs.define
class Screen:
    """Shows events on `out`, and what is to be said about them on `notes`.

    With `lines` each event becomes a line of JSON on `out`, and nothing else does. Whatever writes
    there raises OutputLost where that is not possible.
    """

    _out: Output = attrs.field(converter=Output)
    _notes: Notes = attrs.field(converter=Notes)
    _colour: bool
    _lines: bool = False
    _begun: bool = False  # a line on `out`, which has not ended
    _returned: bool = False  # a carriage return that may be the first half of a line's end
    _progress: bool = False
    _error: EvaluationError | None = None  # the newest event, if it may be how all ends

    @property
    def shows_progress(self) -> bool:
        """Whether there is somebody to see what `progress` says."""
        return self._notes.isatty()

    def show(self, event: Event) -> None:
        """Show an event; a file is only told of, and how it ended when nothing follows."""
        if self._lines:
            self._print(_line(event) + "\n")
            return
        if self._error is not None:  # evaluators may send the like; then it is data
            self.note(readable(Data(self._error.written)), "cyan")
            self._error = None
        match event:
            case Text(text):
                self._print(text)
            case Data():
                self.note(readable(event), "cyan")
            case File(filename, content_type, content):
                self.note(f"file {filename} ({content_type}, {len(content)} bytes)", "cyan")
            case EvaluationError(final=True):
                self._error = event
            case EvaluationError():
                self._complain("broken block", event)
            case Unknown(type_, written):
                self.note(f"{type_}: {_cut(written)}", "cyan")

    def note(self, text: str, colour: str | None = None) -> None:
        """Say something beside what was printed."""
        self._make_room()
        if self._notes.isatty():
            self._end_line()
        text = escaped(text) if self._notes.isatty() else text
        self._notes.write((click.style(text, fg=colour) if self._colour else text) + "\n")

    def progress(self, text: str) -> None:
        """Say on a terminal what is going on; it stands there until something else does."""
        if self.shows_progress:
            self._out.flush()
            self._end_line()
            self._notes.write(_CLEAR + escaped(text))
            self._progress = True

    def print(self, text: str) -> None:
        """Print lines that are no event."""
        self._print(text + "\n")
        self.flush()

    def flush(self) -> None:
        """Let everything be seen."""
        self._out.flush()

    def close(self) -> None:
        """Tell how it ended, if badly, and end the line that has begun on a terminal."""
        if self._error is not None:
            self._complain("failed", self._error)
            self._error = None
        self._make_room()
        if self._begun and self._out.isatty():
            self._out.write("\n")
            self._out.flush()

    def _print(self, text: str) -> None:
        if self._progress:
            self._make_room()
        self._out.write(self._for_terminal(text) if self._out.isatty() else text)
        self._begun = not text.endswith("\n")

    def _for_terminal(self, text: str) -> str:
        r"""Return text for a terminal, where `\r\n` is a line's end and `\r` is nothing but odd."""
        if self._returned:
            text = "\r" + text
        self._returned = text.endswith("\r")
        return escaped(text.removesuffix("\r").replace("\r\n", "\n"))

    def _make_room(self) -> None:
        self._out.flush()
        if self._progress:
            self._progress = False
            self._notes.write(_CLEAR)

    def _end_line(self) -> None:
        """End the line that has begun on the same terminal."""
        if self._begun and self._out.isatty():
            self._notes.write("\n")
            self._begun = False

    def _complain(self, what: str, error: EvaluationError) -> None:
        self.note(f"{what}: {error.message}", "red")
        for name in ("stderr", "line"):
            said = error.members.get(name)
            if isinstance(said, str) and said:
                self.note("\n".join(f"  {line}" for line in said.rstrip("\n").split("\n")))


def readable(data: Data) -> str:
    """Return a value as people like it: members of objects by name, and not endless."""
    try:
        payload = data.payload
    except ValueError:
        return _cut(data.written)
    if not isinstance(payload, dict):
        return _cut(data.written)
    kind = payload.pop("type", None)
    members = ", ".join(f"{name}: {_plain(value)}" for name, value in payload.items())
    return _cut(f"{_plain(kind)}: {members}" if kind is not None else members or "{}")


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST]}… ({len(text)} characters)"


def _line(event: Event) -> str:
    """Return an event as the daemon has it."""
    if isinstance(event, Text):
        return json.dumps({"type": "text", "payload": event.text}, ensure_ascii=False)
    kind = event.type if isinstance(event, Unknown) else "data"
    return f'{{"type": {json.dumps(kind)}, "payload": {event.written}}}'
