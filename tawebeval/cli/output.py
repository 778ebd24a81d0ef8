"""Events and messages on stdout and stderr.

What the evaluator printed goes to stdout unchanged, everything else to stderr. A terminal gets no
control characters of strangers: they could recolour or overwrite lines, or type commands.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

import attrs
import click

from tawebeval.errors import format_size
from tawebeval_client import Data, EvaluationError, Event, File, Outcome, Text, Unknown
from tawebeval_client.results import MAX_RESULT_BYTES, ResultSummary

_EXCERPTS = ("input", "expected", "printed")
_COLOURS = {"accepted": "green", "partial": "yellow", "skipped": "yellow"}


def format_test_case(payload: object, *, with_excerpts: bool) -> tuple[list[str], str] | None:
    """Return the lines of the case that a data value describes, and their colour.

    None for other values. The excerpts are of the input, and what was expected and printed.
    """
    match payload:
        case {"type": "case", "case": str(name), "verdict": str(verdict), **members}:
            pass
        case _:
            return None
    others = {key: value for key, value in members.items() if value is not None}
    first, *rest = describe_json_value(others.pop("message", "")).rstrip("\n").split("\n")
    excerpts = {key: others.pop(key) for key in _EXCERPTS if key in others}
    points = _take_figure(others, "points", "{:g}".format)
    words = (
        points and f"{points} point{'' if points == '1' else 's'}",
        _take_figure(others, "time", "{:.3f} s".format),
        _take_figure(others, "memory", format_size),
        describe_json_members(others),
    )
    figures = ", ".join(filter(None, words))
    shown = f"case {name}: {verdict.replace('_', ' ')}{figures and f' ({figures})'}"
    lines = [
        shown.replace("\n", " ") + (first and f": {first}"),
        *(f"    {line}" for line in rest),
    ]
    if with_excerpts:
        lines += [
            f"  {key}: {json.dumps(text, ensure_ascii=False)}"
            for key, text in excerpts.items()
            if isinstance(text, str) and text
        ]
    return lines, _COLOURS.get(verdict, "red")


def _take_figure(members: dict[Any, Any], name: str, describe: Any) -> str:
    """Remove a number from `members`, and return it in words; empty for anything else."""
    number = members.get(name)
    if not isinstance(number, int | float) or abs(number) >= 2**53:
        return ""
    del members[name]
    words: str = describe(number)
    return words


def describe_json_members(members: Mapping[Any, object]) -> str:
    """Return the members of an object as text."""
    return ", ".join(f"{name}: {describe_json_value(value)}" for name, value in members.items())


def describe_json_value(value: object) -> str:
    """Return a value as text: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# C0 except tab and line feed, DEL, C1, and characters that change the direction of writing.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_CLEAR = "\r\x1b[K"
_BAR_WIDTH = 30  # characters


class StdoutWriteError(Exception):
    """Stdout cannot be written to; `str()` says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"stdout: {error.strerror or error}")
        self.is_broken_pipe = isinstance(error, BrokenPipeError)
        """Whether stdout is a pipe without a reader, as after `head`."""


def escape_control_characters(text: str) -> str:
    r"""Return text with control characters written as in JSON (`\u001b`)."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def escape_table_row(row: str) -> str:
    """Return a row of a table without the control characters of a server, as one line."""
    return escape_control_characters(row.rstrip().replace("\n", " "))


def should_use_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
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
    raise StdoutWriteError when `out` becomes unwritable, once; later output is discarded. A broken
    `notes` is discarded without an error, which nobody could see. `shows_summary` is False if not
    all events of the evaluation are shown: a summary of their results would mislead.
    `shows_excerpts` is whether a case shows its input, and what was expected and printed.
    `prints_verdict` is whether the last line of `out` is the verdict; `exits_by_verdict`, whether
    the exit status of the command tells if it is "accepted".
    """

    _out: TextIO
    _notes: TextIO
    _colour: bool
    _lines: bool = False
    shows_summary: bool = True
    shows_excerpts: bool = False
    prints_verdict: bool = False
    exits_by_verdict: bool = False
    verdict: str = ""
    """The verdict after `finish_output`; empty if not all events were shown."""
    _status: str = ""  # the last line of a terminal, below all output
    _begun: bool = False  # the last line on `out` has no terminator yet
    _returned: bool = False  # a carriage return is held back, as a line feed may follow
    _progress: bool = False  # the last line on `notes` is that of `show_progress`
    _lost: bool = False  # `out` cannot be written to any more
    _error: EvaluationError | None = None  # the last event, while it may be the final one
    _results: ResultSummary = attrs.field(factory=ResultSummary)

    @property
    def can_show_progress(self) -> bool:
        """Whether `show_progress` shows anything."""
        return self._notes.isatty()

    def show_event(self, event: Event) -> None:
        """Show an event: of a file only name and size, and a final error when nothing follows."""
        if isinstance(event, Data) and len(value := event.raw_json.encode()) <= MAX_RESULT_BYTES:
            self._results.add_if_result(value)
        if self._lines:
            self._print(_line(event) + "\n")
            return
        if self._error is not None:  # an error that others follow is data that resembles one
            self.show_message(format_data_event(Data(self._error.raw_json)), "cyan")
            self._error = None
        match event:
            case Text(text):
                self._print(text)
            case Data():
                self._show_value(event)
            case File(filename, content_type, content):
                size = format_size(len(content))
                self.show_message(f"file {filename} ({content_type}, {size})", "cyan")
            case EvaluationError(is_failure=True):
                self._error = event
            case EvaluationError():
                self._complain("malformed block", event)
            case Unknown(type_, raw_json):
                self.show_message(f"{type_}: {raw_json}", "cyan")

    def show_message(self, text: str, colour: str | None = None) -> None:
        """Print a message of one line on `notes`; `colour` is a name of click's."""
        text = text.replace("\n", "\\n")
        self._make_room()
        if self._notes.isatty():
            self._end_line()
            text = escape_control_characters(text)
        self._write_note((click.style(text, fg=colour) if self._colour else text) + "\n")

    def show_evaluator_stderr(self, stderr: str) -> None:
        """Print an evaluator's stderr, indented, on `notes`."""
        for line in stderr.rstrip("\n").split("\n"):
            self.show_message(f"  {line}")

    def show_progress(self, text: str) -> None:
        """Show a message and the results so far below all output of a terminal; empty for none."""
        self._status = text
        self._clear_progress()
        self.redraw_progress()

    def redraw_progress(self) -> None:
        """Show the message of `show_progress` again, unless a partial line stands in its place."""
        if not self._status or (self._begun and self._out.isatty()):
            return
        results: Mapping[str, Any] = self._results.build_json_object() or {}
        words = [self._status]
        if (progress := results.get("progress")) and progress["total"] > 0:
            done, total = progress["done"], progress["total"]
            bar = "#" * (_BAR_WIDTH * max(0, min(done, total)) // total)
            words.append(f"[{bar:-<{_BAR_WIDTH}}] {done}/{total}")
        if results:
            words += summarize_results({**results, "progress": None})
        text = escape_control_characters(", ".join(words).replace("\n", " "))
        columns = 0
        with suppress(OSError):  # shutil would look at stdout, which may go to a file
            columns = os.get_terminal_size(self._notes.fileno()).columns
        self._write_note(_CLEAR + text[: (columns or 80) - 1])
        self._progress = True

    def print_text(self, text: str) -> None:
        """Print lines that are not an event on `out`."""
        self._print(text + "\n")
        self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        self._write("", flush=True)

    def finish_output(self) -> None:
        """Show a summary of the cases, the final error and the verdict; end a partial line."""
        results, uncounted = self._results.build_json_object(), self._results.uncounted_value
        self._results, self._status = ResultSummary(), ""
        if self.shows_summary:
            self.verdict = Outcome("", results, self._error).verdict
        if results is not None and results["cases"] and self.shows_summary and not self._lines:
            words = summarize_results({**results, "progress": None})
            self.show_message(f"summary: {', '.join(words)}", "cyan")
        if uncounted and not self._lines:
            self.show_message(f"warning: {uncounted}", "yellow")
        if self._error is not None:
            self._complain("failed", self._error)
            self._error = None
        self._make_room()
        if self._begun and (self.prints_verdict or self._out.isatty()):
            self._write("\n", flush=True)
        if self.prints_verdict and self.verdict and not self._lines:
            self.print_text(self.verdict)

    def _show_value(self, data: Data) -> None:
        with suppress(ValueError):  # Python cannot decode the value
            if case := format_test_case(data.payload, with_excerpts=self.shows_excerpts):
                lines, colour = case
                for line in lines:
                    self.show_message(line, colour)
                return
        text = format_data_event(data)
        if not (self._status and re.fullmatch("progress [0-9]+/[0-9]+", text)):
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
            raise StdoutWriteError(error) from None

    def _write_note(self, text: str) -> None:
        try:
            self._notes.write(text)
            self._notes.flush()
        except OSError:
            redirect_to_devnull(self._notes)

    def _print(self, text: str) -> None:
        if self._progress:
            self._make_room()
        if self._out.isatty():
            text = self._for_terminal(text)
        self._write(text)
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
        self._clear_progress()

    def _clear_progress(self) -> None:
        if self._progress:
            self._write_note(_CLEAR)
            self._progress = False

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
                self.show_evaluator_stderr(said)


def format_data_event(data: Data) -> str:
    """Return a value for people: results in words, other objects by their members."""
    try:
        payload = data.payload
    except ValueError:
        return data.raw_json
    match payload:
        case {"type": "goal_result", "goal": str(goal), "result": bool(reached), **others}:
            more = f" ({describe_json_members(others)})" if others else ""
            return f"goal {goal}: {'yes' if reached else 'no'}{more}"
        case {"type": "progress", "done": int(done), "total": int(total), **others} if not others:
            return f"progress {done}/{total}"
        case {"type": "score", "score": int() | float() as score, **others} if not (
            others.keys() - {"maximum"}
        ):
            maximum = others.get("maximum")
            most = "" if maximum is None else f"/{describe_json_value(maximum)}"
            return f"score {describe_json_value(score)}{most}"
        case {"type": kind, **others} if kind is not None:
            return f"{describe_json_value(kind)}: {describe_json_members(others)}"
        case {}:
            return describe_json_members(payload) or "{}"
    return data.raw_json


def summarize_results(results: Mapping[str, Any] | None) -> list[str]:
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


def _line(event: Event) -> str:
    """Return an event as the JSON that the daemon sends."""
    if isinstance(event, Text):
        kind, payload = "text", json.dumps(event.text, ensure_ascii=False)
    else:
        kind, payload = event.type if isinstance(event, Unknown) else "data", event.raw_json
    return f'{{"type": {json.dumps(kind)}, "payload": {payload}}}'


def format_json(value: Any) -> str:
    """Return a value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def print_documents(
    screen: Screen,
    documents: Sequence[Mapping[str, Any]],
    as_json: bool,
    row_format: str,
    rows: Iterable[Sequence[object]],
) -> None:
    """Print a list of documents, as JSON or as a table with these rows."""
    if as_json:
        screen.print_text(format_json(documents))
        return
    for cells in rows:
        screen.print_text(escape_table_row(row_format.format(*cells)))
