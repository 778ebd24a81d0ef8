"""One evaluation shown to its end, and the files that it sends saved in a directory."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import LoopingCall

from tawebeval.cli.output import Screen
from tawebeval.cli.runtime import FAILED, GOOD, WRONG
from tawebeval.client import (
    ClientError,
    EvaluationError,
    EvaluationGone,
    Event,
    File,
    Page,
    Text,
    UnknownEvaluation,
)
from tawebeval.client.twisted_client import TwistedClient as Client
from tawebeval.core.segi import StrayMarkers
from tawebeval.core.text import get_base_name
from tawebeval.linux.ownership import get_user_name

_INTERVAL = 1.0  # seconds between two requests for the status


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
        descriptor, unfinished = tempfile.mkstemp(dir=self.path, prefix=".tawebeval-")
        try:
            with open(descriptor, "wb") as stream:
                stream.write(file.content)
                umask = os.umask(0)
                os.umask(umask)
                os.fchmod(stream.fileno(), 0o666 & ~umask)
            os.replace(unfinished, target)
        except BaseException:
            os.unlink(unfinished)
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

    `cursor` is where reading begins, and then the end of the last page shown. `exists` tells
    whether the server is known to have had the evaluation. `times` requests the times of
    events. `on_cancel` is called for each cancellation, and reading goes on; None lets a
    cancellation end it.
    """

    _client: Client
    identifier: str
    _screen: Screen
    cursor: str | None = None
    exists: bool = False
    _times: bool = False
    _on_cancel: Callable[[], object] | None = None

    @property
    def resume_command(self) -> str:
        """The command that continues here."""
        after = f" --after {self.cursor}" if self.cursor is not None else ""
        return f"tawebeval follow{after} {self.identifier}"

    async def follow_evaluation(self, reactor: Any, folder: DownloadDirectory | None = None) -> int:
        """Show all events as they come, save files in `folder`, and return the exit status.

        A discarded evaluation is a failed one. Raises UnknownEvaluation for an evaluation that the
        server has never had.
        """
        if self.cursor is not None:
            self._screen.shows_summary = False
        progress = _Progress(self._client, self.identifier, self._screen, reactor)
        try:
            status = await show_events(
                self._pages(), self._screen, self._screen.show_event, folder, progress.stop
            )
        except (EvaluationGone, UnknownEvaluation) as error:
            if isinstance(error, UnknownEvaluation) and not self.exists:
                raise
            self._screen.show_message(f"failed: {error}", "red")
            return FAILED
        else:
            if self.cursor is None:
                note_nothing(self._screen)
            return status
        finally:
            progress.stop()

    async def _pages(self) -> AsyncIterator[Page]:
        """Yield the pages; continue after a cancellation, and behind discarded events."""
        while True:
            try:
                async for page in self._client.pages(
                    self.identifier, self.cursor, times=self._times
                ):
                    yield page
                    self.cursor = page.end
            except CancelledError:
                if self._on_cancel is None:
                    raise
                self._on_cancel()
            except EvaluationGone as error:
                if error.oldest in (None, self.cursor):
                    raise
                self._screen.show_message(
                    f"the events before {error.oldest} are discarded, as they were read before",
                    "yellow",
                )
                self.cursor, self.exists = error.oldest, True
                self._screen.shows_summary = False
            else:
                return


async def show_events(
    pages: AsyncIterator[Page],
    screen: Screen,
    show_event: Callable[[Event], object],
    folder: DownloadDirectory | None = None,
    on_page: Callable[[], object] = lambda: None,
) -> int:
    """Show all events by `show_event`, save files in `folder`, and return the exit status.

    `folder` None saves none. `on_page()` is called before the events of each page are shown.
    """
    last: Event | None = None
    unsaved = False
    markers = _MarkerWarning(screen)
    try:
        async for page in pages:
            on_page()
            for event in page.events:
                show_event(event)
                markers.check(event)
                if folder is not None and isinstance(event, File):
                    unsaved |= not _save(event, folder, screen)
            screen.flush()
            last = page.events[-1]
    finally:
        screen.close()
    if isinstance(last, EvaluationError) and last.final:
        return FAILED
    return WRONG if unsaved else GOOD


@attrs.define
class _MarkerWarning:
    """The warning about the first marker that is shown as text."""

    _screen: Screen
    _markers: StrayMarkers = attrs.field(factory=StrayMarkers)
    _shown: bool = False

    def check(self, event: Event) -> None:
        """Show the warning if the event completes a marker."""
        if not isinstance(event, Text):
            self._markers.end_line()
        elif (advice := self._markers.find(event.text)) and not self._shown:
            self._shown = True
            self._screen.show_message(f"warning: {advice}", "yellow")


def note_nothing(screen: Screen) -> None:
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
        return False
    return True


class _Progress:
    """Shows the state of an evaluation on a terminal every second, until it is stopped."""

    def __init__(self, client: Client, identifier: str, screen: Screen, reactor: Any) -> None:
        self._client, self._identifier, self._screen = client, identifier, screen
        self._request: Deferred[None] | None = None
        self._loop = LoopingCall(self._update)
        self._loop.clock = reactor
        if screen.shows_progress:
            self._loop.start(_INTERVAL)

    def stop(self) -> None:
        """Stop, and cancel the request that is under way."""
        if self._loop.running:
            self._loop.stop()
        if self._request is not None:
            self._request.cancel()

    def _update(self) -> Deferred[None]:
        self._request = Deferred.fromCoroutine(self._show_status())
        return self._request

    async def _show_status(self) -> None:
        # Errors are reported by the requests for events.
        with suppress(ClientError, CancelledError):
            status = await self._client.status(self._identifier)
            text = str(status["state"])
            if status.get("queue_place") is not None:
                text += f", {status['queue_place']} ahead"
            self._screen.show_progress(text)
