"""Events and messages on stdout and stderr.

What the evaluator printed goes to stdout unchanged, everything else to stderr. A terminal gets no
control characters of strangers: they could recolour or overwrite lines, or type commands.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

import attrs
import click

from tawebeval.client import Data, EvaluationError, Event, File, Text, Unknown
from tawebeval.core.results import MAX_RESULT_BYTES, ResultSummary
from tawebeval.errors import format_size

# C0 except tab and line feed, DEL, C1, and characters that change the direction of writing.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_CLEAR = "\r\x1b[K"
_EXCERPTS = ("expected", "printed")


class OutputError(Exception):
    """Stdout cannot be written to; `str()` says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"stdout: {error.strerror or error}")
        self.is_broken_pipe = isinstance(error, BrokenPipeError)
        """Whether stdout is a pipe without a reader, as after `head`."""


def escape_control_characters(text: str) -> str:
    r"""Return text with control characters written as in JSON (`\u001b`)."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Tell whether to write colours to a stream (see no-color.org)."""
    return stream.isatty() and not environment.get("NO_COLOR")


def redirect_to_devnull(stream: TextIO) -> None:
    """Redirect a broken stream to /dev/null, where Python flushes its buffer at exit."""
    with suppress(OSError):  # a stream without a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)


@attrs.define
class Screen:
    """Events on `out`, messages about them on `notes`.

    With `lines` each event is a line of JSON on `out` and nothing else is shown of it. Methods
    raise OutputLost when `out` becomes unwritable, once; later output is discarded. A broken
    `notes` is discarded without an error, which nobody could see. `stderr_lines` is the most lines
    of an evaluator's stderr that are shown; None shows all. `shows_summary` is False if not all
    events of the evaluation are shown: a summary of their results would mislead. `shows_excerpts`
    is whether a case shows what was expected and printed.
    """

    _out: TextIO
    _notes: TextIO
    _colour: bool
    _lines: bool = False
    stderr_lines: int | None = None
    shows_summary: bool = True
    shows_excerpts: bool = False
    _begun: bool = False  # the last line on `out` has no terminator yet
    _returned: bool = False  # a carriage return is held back, as a line feed may follow
    _progress: bool = False  # the last line on `notes` is one of `progress`
    _lost: bool = False  # `out` cannot be written to any more
    _error: EvaluationError | None = None  # the last event, while it may be the final one
    _results: ResultSummary = attrs.field(factory=ResultSummary)

    @property
    def shows_progress(self) -> bool:
        """Whether `show_progress` shows anything."""
        return self._notes.isatty()

    def show_event(self, event: Event) -> None:
        """Show an event: of a file only name and size, and a final error when nothing follows."""
        if self._lines:
            self._print(_line(event) + "\n")
            return
        if self._error is not None:  # an error that others follow is data that resembles one
            self.show_message(format_value(Data(self._error.written)), "cyan")
            self._error = None
        match event:
            case Text(text):
                self._print(text)
            case Data():
                self._show_value(event)
            case File(filename, content_type, content):
                size = format_size(len(content))
                self.show_message(f"file {filename} ({content_type}, {size})", "cyan")
            case EvaluationError(final=True):
                self._error = event
            case EvaluationError():
                self._complain("malformed block", event)
            case Unknown(type_, written):
                self.show_message(f"{type_}: {written}", "cyan")

    def show_message(self, text: str, colour: str | None = None) -> None:
        """Print a message on `notes`; `colour` is a name of click's."""
        self._make_room()
        if self._notes.isatty():
            self._end_line()
        text = escape_control_characters(text) if self._notes.isatty() else text
        self._write_note((click.style(text, fg=colour) if self._colour else text) + "\n")

    def show_stderr(self, stderr: str) -> None:
        """Print the last lines of an evaluator's stderr, indented, on `notes`."""
        lines = stderr.rstrip("\n").split("\n")
        shown = lines[-(self.stderr_lines or 0) :]
        if left_out := len(lines) - len(shown):
            note = f"(lines left out: {left_out}; `--raw` shows the last 8 KiB of stderr)"
            shown.insert(0, note)
        self.show_message("\n".join(f"  {line}" for line in shown))

    def show_progress(self, text: str) -> None:
        """Show a message on a terminal until the next output replaces it."""
        if self.shows_progress:
            self.flush()
            self._end_line()
            self._write_note(_CLEAR + escape_control_characters(text))
            self._progress = True

    def print_text(self, text: str) -> None:
        """Print lines that are not an event on `out`."""
        self._print(text + "\n")
        self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        self._write("", flush=True)

    def close(self) -> None:
        """Show a summary of the cases and the final error, and end a partial line on a terminal."""
        results, self._results = self._results.build_document(), ResultSummary()
        if results is not None and results["cases"] and self.shows_summary:
            words = summarize_results(results | {"progress": None})
            self.show_message(f"summary: {', '.join(words)}", "cyan")
        if self._error is not None:
            self._complain("failed", self._error)
            self._error = None
        self._make_room()
        if self._begun and self._out.isatty():
            self._write("\n", flush=True)

    def _show_value(self, data: Data) -> None:
        if len(data.written) <= MAX_RESULT_BYTES:
            self._results.add_value(data.written.encode())
        text = format_value(data, "\n    " if self.shows_excerpts else " ")
        if self.shows_progress and re.fullmatch("progress [0-9]+/[0-9]+", text):
            self.show_progress(text)
            return
        if self.shows_excerpts:
            text = "\n  ".join([text, *_list_excerpts(data)])
        self.show_message(text, "cyan")

    def _write(self, text: str, *, flush: bool = False) -> None:
        if self._lost:
            return
        try:
            if text:  # an unbuffered stream would write no bytes, which a full disk refuses
                self._out.write(text)
            if flush:
                self._out.flush()
        except OSError as error:
            self._lost = True
            redirect_to_devnull(self._out)
            raise OutputError(error) from None

    def _write_note(self, text: str) -> None:
        try:
            self._notes.write(text)
            self._notes.flush()
        except OSError:
            redirect_to_devnull(self._notes)

    def _print(self, text: str) -> None:
        if self._progress:
            self._make_room()
        self._write(self._for_terminal(text) if self._out.isatty() else text)
        self._begun = not text.endswith("\n")

    def _for_terminal(self, text: str) -> str:
        r"""Return text for a terminal: `\r\n` ends a line, any other `\r` is written out."""
        if self._returned:
            text = "\r" + text
        self._returned = text.endswith("\r")
        return escape_control_characters(text.removesuffix("\r").replace("\r\n", "\n"))

    def _make_room(self) -> None:
        """Flush `out` and clear the line of `show_progress`."""
        self.flush()
        if self._progress:
            self._progress = False
            self._write_note(_CLEAR)

    def _end_line(self) -> None:
        """End a partial line of `out` on the same terminal."""
        if self._begun and self._out.isatty():
            self._write_note("\n")
            self._begun = False

    def _complain(self, what: str, error: EvaluationError) -> None:
        self.show_message(f"{what}: {error.message}", "red")
        for name in ("stderr", "line"):
            said = error.members.get(name)
            if isinstance(said, str) and said:
                self.show_stderr(said)


def format_value(data: Data, separator: str = " ") -> str:
    """Return a value for people: results in words, other objects by their members.

    `separator` is what stands between the lines of a case's message.
    """
    try:
        payload = data.payload
    except ValueError:
        return data.written
    match payload:
        case {"type": "goal_result", "goal": str(goal), "result": bool(reached), **others}:
            more = f" ({_members(others)})" if others else ""
            return f"goal {goal}: {'yes' if reached else 'no'}{more}"
        case {"type": "case", "case": str(name), "verdict": str(verdict), **others}:
            return _format_case(name, verdict, others, separator)
        case {"type": "progress", "done": int(done), "total": int(total), **others} if not others:
            return f"progress {done}/{total}"
        case {"type": "score", "score": int() | float() as score, **others} if not (
            others.keys() - {"maximum"}
        ):
            maximum = others.get("maximum")
            return f"score {_plain(score)}{'' if maximum is None else f'/{_plain(maximum)}'}"
        case {"type": kind, **others} if kind is not None:
            return f"{_plain(kind)}: {_members(others)}"
        case {}:
            return _members(payload) or "{}"
    return data.written


def summarize_results(results: dict[str, Any] | None) -> list[str]:
    """Return the results of a status document in a few words each, the most telling first."""
    if results is None:
        return []
    found = []
    if (score := results["score"]) is not None:
        maximum = "" if score["maximum"] is None else f"/{score['maximum']}"
        found.append(f"score {score['score']}{maximum}")
    if goals := results["goals"]:
        more = "+" if results["goals_omitted"] else ""
        found.append(f"{sum(goals.values())}/{len(goals)}{more} goals")
    if cases := results["cases"]:
        others = [
            f"{count} {verdict.replace('_', ' ')}"
            for verdict, count in cases.items()
            if verdict != "accepted"
        ]
        rest = f" ({', '.join(others)})" if others else ""
        found.append(f"{cases.get('accepted', 0)}/{sum(cases.values())} cases{rest}")
    if (progress := results["progress"]) is not None:
        found.append(f"progress {progress['done']}/{progress['total']}")
    return found


def _format_case(name: str, verdict: str, members: Mapping[Any, object], separator: str) -> str:
    """Return a case without the excerpts of expected and printed output."""
    others = {key: value for key, value in members.items() if value is not None}
    message = others.pop("message", None)
    figures = []
    for key, describe in (
        ("points", lambda points: f"{points:g} point{'' if points == 1 else 's'}"),
        ("time", lambda time: f"{time:.3f} s"),
        ("memory", format_size),
    ):
        if isinstance(number := others.get(key), int | float) and abs(number) < 2**53:
            figures.append(describe(number))
            del others[key]
    for key in _EXCERPTS:
        others.pop(key, None)
    if others:
        figures.append(_members(others))
    shown = f"case {name}: {verdict.replace('_', ' ')}"
    if figures:
        shown += f" ({', '.join(figures)})"
    shown = shown.replace("\n", " ")
    if message is not None:
        shown += ": " + _plain(message).rstrip("\n").replace("\n", separator)
    return shown


def _list_excerpts(data: Data) -> list[str]:
    """Return what a case expected and what was printed, each as a line."""
    with suppress(ValueError):
        match data.payload:
            case {"type": "case", "case": str(), "verdict": str(), **others}:
                return [
                    f"{key}: {json.dumps(text, ensure_ascii=False)}"
                    for key in _EXCERPTS
                    if isinstance(text := others.get(key), str) and text
                ]
    return []


def _members(members: Mapping[Any, object]) -> str:
    return ", ".join(f"{name}: {_plain(value)}" for name, value in members.items())


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _line(event: Event) -> str:
    """Return an event as the JSON that the daemon sends."""
    if isinstance(event, Text):
        kind, payload = "text", json.dumps(event.text, ensure_ascii=False)
    else:
        kind, payload = event.type if isinstance(event, Unknown) else "data", event.written
    time = ""
    if event.time is not None:
        time = f', "time": "{event.time.isoformat(timespec="milliseconds")}"'
    return f'{{"type": {json.dumps(kind)}, "payload": {payload}{time}}}'
