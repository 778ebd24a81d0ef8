"""`tawebeval follow`: one evaluation to its end, and the files that it sends in a directory."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import attrs
import click

from tawebeval.cli.options import IDENTIFIER_ARGUMENT, combine_options, text_option
from tawebeval.cli.output import Screen
from tawebeval.cli.runtime import (
    FAILED,
    GOOD,
    NOT_ACCEPTED,
    WRONG,
    CommandContext,
    Interrupted,
)
from tawebeval.cli.servers import add_server_options
from tawebeval.linux.privileges import get_user_name
from tawebeval_client import (
    ClientError,
    EvaluationError,
    EvaluationGone,
    Event,
    File,
    Page,
    Refused,
    Text,
    UnknownEvaluation,
)
from tawebeval_client.events import split_cursor
from tawebeval_client.operations import MAX_WAIT_SECONDS

_MARKER = re.compile("~tawebeval:(data|file)-(begin|end):[0-9a-f]{32}")
_MARKER_SIZE = 64  # characters, at most
_WAITING = ("queued", "fetching")  # states before the evaluator runs


@attrs.frozen
class DownloadDirectory:
    """A directory for the files of one evaluation, whose names are untrusted."""

    path: Path
    _taken: set[str] = attrs.field(factory=set, init=False, repr=False, eq=False)

    def save_file(self, filename: str, content: bytes) -> Path:
        """Save a file under its base name and return its path. Blocks.

        A further file of the same name gets a number: `a-2.txt`. A file or a symbolic link that
        was there before is replaced. Raises ValueError for an invalid name, OSError.
        """
        from tawebeval.core.form import get_base_name  # late: it takes 10 ms

        name = self._free_name(get_base_name(filename))
        target = self.path / name
        self.path.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        stream = target.open("xb")
        try:
            with stream:
                stream.write(content)
        except OSError:
            target.unlink(missing_ok=True)  # cut off by a full disk
            raise
        self._taken.add(name)
        return target

    def _free_name(self, name: str) -> str:
        stem, suffix = os.path.splitext(name)
        numbered = (f"{stem}-{number}{suffix}" for number in itertools.count(2))
        return next(each for each in itertools.chain([name], numbered) if each not in self._taken)


@attrs.define
class EvaluationReader:
    """Reads the events of an evaluation and shows them.

    `cursor` is where reading begins, and then the end of the last page shown. `is_known_to_server`
    tells whether the server is known to have had the evaluation. `on_interrupt` is called for an
    interruption, and reading goes on; None lets an interruption end it.
    """

    _context: CommandContext
    identifier: str
    cursor: str | None = None
    is_known_to_server: bool = False
    _on_interrupt: Callable[[], object] | None = None
    _state: str = "queued"  # as the server has told last

    @property
    def resume_command(self) -> str:
        """The command that continues here."""
        after = [] if self.cursor is None else ["--after", self.cursor]
        server = self._context.server.server_options
        return shlex.join(["tawebeval", "follow", *server, *after, self.identifier])

    def follow_evaluation(self, folder: DownloadDirectory | None = None) -> int:
        """Show all events as they come, save files in `folder`, and return the exit status.

        A discarded evaluation is a failed one. Raises UnknownEvaluation for an evaluation that the
        server has never had.
        """
        screen = self._context.screen
        if self.cursor is not None:
            screen.shows_summary = False
        display = EventDisplay(screen, folder)
        try:
            with display:
                for page in self._pages():
                    display.show_page(page)
        except (EvaluationGone, UnknownEvaluation) as error:
            if isinstance(error, UnknownEvaluation) and not self.is_known_to_server:
                raise
            screen.show_message(f"failed: {error}", "red")
            return FAILED
        if self.cursor is None:
            warn_of_empty_stdout(screen)
        return display.exit_status

    def _pages(self) -> Iterator[Page]:
        """Yield the pages; continue after an interruption, and behind discarded events."""
        client = self._context.client
        while True:
            try:
                for page in client.pages(
                    self.identifier, self.cursor, choose_wait=self._choose_wait
                ):
                    # Or a part of the page is shown twice.
                    with self._context.interrupt_handler.defer_interrupt():
                        if self._state in _WAITING:
                            self._context.screen.show_progress("")
                        yield page
                        self.cursor = page.end
            except Interrupted:
                if self._on_interrupt is None:
                    raise
                self._on_interrupt()
            except EvaluationGone as error:
                if error.oldest in (None, self.cursor):
                    raise
                self._context.screen.show_message(
                    f"the events before {error.oldest} are discarded, as they were read before",
                    "yellow",
                )
                self.cursor, self.is_known_to_server = error.oldest, True
                self._context.screen.shows_summary = False
            else:
                return

    def _choose_wait(self) -> int:
        """Show on a terminal the state until the evaluator runs, and return the seconds to wait.

        A request that fails is left to the requests for events.
        """
        if not self._context.screen.can_show_progress or self._state not in _WAITING:
            return MAX_WAIT_SECONDS
        self._state = ""
        with suppress(ClientError):
            self.refresh_state()
        return 1 if self._state in _WAITING else MAX_WAIT_SECONDS

    def refresh_state(self) -> None:
        """Request the state; show it on a terminal until the evaluator has ended."""
        status = self._context.client.status(self.identifier)
        self._state, place = status["state"], status.get("queue_place")
        screen = self._context.screen
        if screen.can_show_progress and self._state in ("running", *_WAITING):
            screen.show_progress(self._state if place is None else f"{self._state}, {place} ahead")


@attrs.define
class EventDisplay:
    """Shows pages, and saves files in a directory; None saves none.

    It is a context, at whose end the screen is closed. `last_event` is the last event shown.
    """

    _screen: Screen
    _folder: DownloadDirectory | None = None
    last_event: Event | None = None
    _has_unsaved: bool = False
    _line: str = ""  # the end of the last line of text, if it has no terminator yet
    _is_warned: bool = False  # of the first marker that is shown as text

    def __enter__(self) -> EventDisplay:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._screen.prints_verdict &= kind is None  # else not all events have come
        self._screen.finish_output()

    @property
    def final_error(self) -> EvaluationError | None:
        """The last event, if it makes the evaluation a failure."""
        last = self.last_event
        return last if isinstance(last, EvaluationError) and last.is_failure else None

    @property
    def exit_status(self) -> int:
        """The exit status for the events shown."""
        if self.final_error is not None:
            return FAILED
        if self._has_unsaved:
            return WRONG
        is_refused = self._screen.exits_by_verdict and self._screen.verdict != "accepted"
        return NOT_ACCEPTED if is_refused else GOOD

    def show_page(self, page: Page) -> None:
        """Show the events of a page."""
        for event in page.events:
            self._screen.show_event(event)
            self._check_markers(event)
            if self._folder is not None and isinstance(event, File):
                self._has_unsaved |= not _save(
                    event.filename, event.content, self._folder, self._screen
                )
            self.last_event = event
        self._screen.flush()
        self._screen.redraw_progress()

    def _check_markers(self, event: Event) -> None:
        """Warn of the first marker in text: it counts only as a whole line."""
        line = self._line + event.text if isinstance(event, Text) else ""
        self._line = line.rpartition("\n")[2][-_MARKER_SIZE:]
        if not self._is_warned and (found := _MARKER.search(line)):
            self._is_warned = True
            variable = f"EVALUATION_{found[1]}_{found[2]}".upper()
            self._screen.show_message(
                f"warning: {variable} is not alone on its line, or ends no block: the block is"
                " shown as text; print newlines before and after it (`printf '\\n'`)",
                "yellow",
            )


def warn_of_empty_stdout(screen: Screen) -> None:
    """Show that an evaluator has printed neither text nor data."""
    screen.show_message("the evaluator printed nothing on stdout", "yellow")


def _save(filename: str, content: bytes, folder: DownloadDirectory, screen: Screen) -> bool:
    try:
        screen.show_message(f"  saved as {folder.save_file(filename, content)}")
    except PermissionError as error:
        user = get_user_name(os.geteuid())
        screen.show_message(f"  not saved: the user {user} cannot write {error.filename}", "red")
    except (OSError, ValueError) as error:
        screen.show_message(f"  not saved: {error}", "red")
    else:
        return True
    return False


def show_drawn_seed(screen: Screen, seed: int | None) -> None:
    """Show the seed that the command has drawn, if it has drawn one."""
    if seed is not None:
        screen.show_message(f"repeat this run with --seed {seed}")


add_output_options = combine_options(
    click.option(
        "--files",
        "folder",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        callback=lambda context, parameter, path: path and DownloadDirectory(path),
        help="Save files from the evaluator in this directory.",
    ),
    click.option(
        "--events", "lines", is_flag=True, help="Print all events as JSON Lines, for programs."
    ),
    click.option(
        "--exit-status",
        "exits_by_verdict",
        is_flag=True,
        help=f'Exit with status {NOT_ACCEPTED} unless the verdict is "accepted".',
    ),
)
"""Gives a command `--files`, `--events` and `--exit-status`."""


def _check_cursor(context: click.Context, _: click.Parameter, cursor: str | None) -> str | None:
    try:
        split_cursor(cursor)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return cursor


@click.command()
@IDENTIFIER_ARGUMENT
@text_option(
    "--after",
    "cursor",
    metavar="CURSOR",
    callback=_check_cursor,
    help="Start after this cursor, not at the first event.",
)
@add_output_options
@add_server_options
def follow(
    identifier: str,
    cursor: str | None,
    folder: DownloadDirectory | None,
    context: CommandContext,
) -> None:
    """Show the output of an evaluation that was submitted before.

    The server discards the events that a client has read. The command says so and shows the rest;
    `tawebeval status` shows how many events are discarded. A server with an archive shows all
    events again once a client has read the evaluation to its end; without one it is gone then.
    Ctrl-C stops following and prints the command that continues; the evaluation goes on.

    The exit status is that of `tawebeval evaluate`: 1 if the server no longer has the evaluation, 2
    if it never had it.

    \b
    Submit now, follow later:
      ID=$(tawebeval evaluate --detach --evaluator ./evaluate solution.py)
      tawebeval follow $ID
    """  # noqa: D301
    reader = EvaluationReader(context, identifier, cursor)
    try:
        with suppress(Refused):  # reported below
            # Unlike a request for events, this one gives up soon on a stopped server.
            reader.refresh_state()
        context.exit_status = reader.follow_evaluation(folder)
    except Interrupted:
        context.screen.show_message(f"continue here with `{reader.resume_command}`")
        raise


@click.command()
@IDENTIFIER_ARGUMENT
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIRECTORY")
@add_server_options
def download(identifier: str, folder: Path, context: CommandContext) -> None:
    """Save the submitted files of an evaluation in a directory.

    The directory is made if it does not exist; files of the same names are replaced. A server sends
    files of 256 KiB together; the command names the others, and exits with status 2.

    \b
      tawebeval download $ID submitted
    """  # noqa: D301
    screen, directory = context.screen, DownloadDirectory(folder)
    for file in context.client.submission(identifier):
        screen.show_message(f"{file['field']}: {file['filename']}", "cyan")
        text, encoded = file.get("text"), file.get("base64")
        content = None if encoded is None else b64decode(encoded)
        if text is not None:
            content = text.encode()
        if content is None:
            screen.show_message("  not saved: the files are too large together", "red")
        if content is None or not _save(file["filename"], content, directory, screen):
            context.exit_status = WRONG
