"""One evaluation shown to its end, and the files that it sends saved in a directory."""

from __future__ import annotations

import itertools
import os
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event as ThreadEvent
from threading import Lock, Thread

import attrs

from tawebeval.cli.output import Screen
from tawebeval.cli.runtime import FAILED, GOOD, WRONG, CommandContext, Interrupted, ServerAccess
from tawebeval.client import (
    Client,
    ClientError,
    EvaluationError,
    EvaluationGone,
    Event,
    File,
    Page,
    Text,
    UnknownEvaluation,
)
from tawebeval.core.segi import StrayMarkerDetector
from tawebeval.core.text import get_base_name
from tawebeval.linux.privileges import get_user_name

_STATUS_INTERVAL = 1.0  # seconds between two updates of the line of a terminal


@attrs.frozen
class DownloadDirectory:
    """A directory for the files of one evaluation, whose names are untrusted."""

    path: Path
    _taken: set[str] = attrs.field(factory=set, init=False, repr=False, eq=False)

    def save_file(self, file: File) -> Path:
        """Save a file under its base name and return its path. Blocks.

        A further file of the same name gets a number: `a-2.txt`. A file or a symbolic link that
        was there before is replaced. Raises ValueError for an invalid name, OSError.
        """
        name = self._free_name(get_base_name(file.filename))
        target = self.path / name
        self.path.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        stream = target.open("xb")
        try:
            with stream:
                stream.write(file.content)
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

    @property
    def resume_command(self) -> str:
        """The command that continues here."""
        after = [] if self.cursor is None else ["--after", self.cursor]
        server = self._context.server.command_arguments
        return shlex.join(["tawebeval", "follow", *server, *after, self.identifier])

    def follow_evaluation(self, folder: DownloadDirectory | None = None) -> int:
        """Show all events as they come, save files in `folder`, and return the exit status.

        A discarded evaluation is a failed one. Raises UnknownEvaluation for an evaluation that the
        server has never had.
        """
        screen = self._context.screen
        if self.cursor is not None:
            screen.shows_summary = False
        live = LiveStatus(self._context.server, self.identifier, screen)
        display = EventDisplay(screen, folder)
        try:
            with display, live:
                for page in self._pages():
                    live.set_running()
                    display.show_page(page)
        except (EvaluationGone, UnknownEvaluation) as error:
            if isinstance(error, UnknownEvaluation) and not self.is_known_to_server:
                raise
            screen.show_message(f"failed: {error}", "red")
            return FAILED
        if self.cursor is None:
            warn_of_empty_stdout(screen)
        return display.status

    def _pages(self) -> Iterator[Page]:
        """Yield the pages; continue after an interruption, and behind discarded events."""
        client = self._context.client
        while True:
            try:
                for page in client.pages(self.identifier, self.cursor):
                    with (
                        self._context.interrupt_handler.defer_interrupt()
                    ):  # or a part of the page is shown twice
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


@attrs.define
class LiveStatus:
    """A context in which a terminal shows the state of an evaluation, updated every second.

    The status is requested until `set_running` is called, by a thread with a client of its own: the
    command waits for events meanwhile.
    """

    _server: ServerAccess
    _identifier: str
    _screen: Screen
    is_running: bool = False
    _get_time: Callable[[], float] = time.monotonic
    _state: str = ""
    _since: float = 0.0  # the time when the state was seen first
    _lock: Lock = attrs.field(factory=Lock)
    _stopping: ThreadEvent = attrs.field(factory=ThreadEvent)

    def __enter__(self) -> LiveStatus:
        if self._screen.shows_progress:
            Thread(target=self._run, name="status", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopping.set()
            self._screen.show_status("")

    def _run(self) -> None:
        with self._server.make_quiet_client() as client:
            while not self._stopping.is_set():
                self.update(client)
                self._stopping.wait(_STATUS_INTERVAL)

    def set_running(self) -> None:
        """Show that the evaluator runs, and request the status no more."""
        if not self.is_running:
            self.is_running = True
            if self._screen.shows_progress:
                self._show("running")

    def update(self, client: Client) -> None:
        """Show the state; request the status first while the evaluator is not known to run."""
        state = "" if self.is_running else self._request_state(client)
        self._show("running" if self.is_running else state)  # perhaps since the request

    def _show(self, state: str) -> None:
        """Show a state and the time since it was shown first; empty for the last state."""
        now = self._get_time()
        with self._lock:
            if state and state != self._state:
                self._state, self._since = state, now
            if self._state and not self._stopping.is_set():
                self._screen.show_status(f"{self._state}, {int(now - self._since)} s")

    def _request_state(self, client: Client) -> str:
        """Return the state, empty without an answer."""
        try:
            status = client.status(self._identifier)
        except ClientError:  # reported by the requests for events
            return ""
        place = status.get("queue_place")
        return status["state"] if place is None else f"{status['state']}, {place} ahead"


@attrs.define
class EventDisplay:
    """Shows pages, and saves files in a directory; None saves none.

    It is a context, at whose end the screen is closed. `last` is the last event shown.
    """

    _screen: Screen
    _folder: DownloadDirectory | None = None
    last: Event | None = None
    _has_unsaved: bool = False
    _markers: StrayMarkerDetector = attrs.field(factory=StrayMarkerDetector)
    _is_warned: bool = False  # of the first marker that is shown as text

    def __enter__(self) -> EventDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.finish_output()

    @property
    def final_error(self) -> EvaluationError | None:
        """The last event, if it makes the evaluation a failure."""
        return self.last if isinstance(self.last, EvaluationError) and self.last.final else None

    @property
    def status(self) -> int:
        """The exit status for the events shown."""
        if self.final_error is not None:
            return FAILED
        return WRONG if self._has_unsaved else GOOD

    def show_page(self, page: Page) -> None:
        """Show the events of a page."""
        with self._screen.lock:
            for event in page.events:
                self._screen.show_event(event)
                self._check_markers(event)
                if self._folder is not None and isinstance(event, File):
                    self._has_unsaved |= not _save(event, self._folder, self._screen)
                self.last = event
            self._screen.flush()
            self._screen.draw_status()

    def _check_markers(self, event: Event) -> None:
        if not isinstance(event, Text):
            self._markers.note_non_text_event()
        elif (advice := self._markers.check_text_event(event.text)) and not self._is_warned:
            self._is_warned = True
            self._screen.show_message(f"warning: {advice}", "yellow")


def warn_of_empty_stdout(screen: Screen) -> None:
    """Show that an evaluator has printed neither text nor data."""
    screen.show_message("the evaluator printed nothing on stdout", "yellow")


def _save(file: File, folder: DownloadDirectory, screen: Screen) -> bool:
    try:
        screen.show_message(f"  saved as {folder.save_file(file)}")
    except PermissionError as error:
        user = get_user_name(os.geteuid())
        screen.show_message(f"  not saved: the user {user} cannot write {error.filename}", "red")
    except (OSError, ValueError) as error:
        screen.show_message(f"  not saved: {error}", "red")
    else:
        return True
    return False


def show_seed(screen: Screen, seed: int | None) -> None:
    """Show the seed that the command has drawn, if it has drawn one."""
    if seed is not None:
        screen.show_message(f"repeat this run with --seed {seed}")
