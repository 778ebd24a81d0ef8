"""Following an evaluation on the screen, to its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import LoopingCall

from tawebeval.cli.output import Screen
from tawebeval.cli.runtime import FAILED, GOOD, WRONG
from tawebeval.cli.saving import Folder
from tawebeval.client import (
    Client,
    ClientError,
    EvaluationError,
    EvaluationGone,
    Event,
    File,
    Page,
    UnknownEvaluation,
)

_LOOK = 1.0  # seconds between two looks at what an evaluation is waiting for


@attrs.define
class Reading:
    """The events of an evaluation, from a cursor on.

    `cursor` is where those end that were shown. `exists` is whether there has been such an
    evaluation, whatever the server may know of it.
    """

    _client: Client
    identifier: str
    _screen: Screen
    cursor: str | None = None
    exists: bool = False

    @property
    def resumption(self) -> str:
        """The command that goes on here."""
        after = f" --after {self.cursor}" if self.cursor is not None else ""
        return f"tawebeval follow{after} {self.identifier}"

    async def follow(self, reactor: Any, folder: Folder | None = None) -> int:
        """Show all events as they come, and save files in `folder`; return the exit status.

        One of which nothing is kept has come to no good end, whether anything of it was seen or
        not. Raises UnknownEvaluation for what has never been.
        """
        waiting = _Waiting(self._client, self.identifier, self._screen, reactor)
        try:
            return await show(self._pages(), self._screen, self._screen.show, folder, waiting.stop)
        except (EvaluationGone, UnknownEvaluation) as error:
            if isinstance(error, UnknownEvaluation) and not self.exists:
                raise
            self._screen.note(f"failed: {error}", "red")
            return FAILED
        finally:
            waiting.stop()

    async def _pages(self) -> AsyncIterator[Page]:
        """Yield the pages; what was discarded is told of, and left out."""
        while True:
            try:
                async for page in self._client.pages(self.identifier, self.cursor):
                    yield page
                    self.cursor = page.end
            except EvaluationGone as error:
                if error.oldest in (None, self.cursor):
                    raise
                self._screen.note(
                    f"what came before {error.oldest} was read already, and is discarded", "yellow"
                )
                self.cursor, self.exists = error.oldest, True
            else:
                return


async def show(
    pages: AsyncIterator[Page],
    screen: Screen,
    show_event: Callable[[Event], object],
    folder: Folder | None = None,
    begun: Callable[[], object] = lambda: None,
) -> int:
    """Show all events by `show_event`, and save files in `folder`; return the exit status.

    `begun()` is called when there is something to show.
    """
    last: Event | None = None
    unsaved = False
    try:
        async for page in pages:
            begun()
            for event in page.events:
                show_event(event)
                if folder is not None and isinstance(event, File):
                    unsaved |= not _save(event, folder, screen)
            screen.flush()
            last = page.events[-1]
    finally:
        screen.close()
    if isinstance(last, EvaluationError) and last.final:
        return FAILED
    return WRONG if unsaved else GOOD


def _save(file: File, folder: Folder, screen: Screen) -> bool:
    try:
        screen.note(f"  saved as {folder.save(file)}")
    except (OSError, ValueError) as error:
        screen.note(f"  not saved: {error}", "red")
        return False
    return True


class _Waiting:
    """Shows what an evaluation is waiting for, until it is stopped."""

    def __init__(self, client: Client, identifier: str, screen: Screen, reactor: Any) -> None:
        self._client, self._identifier, self._screen = client, identifier, screen
        self._looking: Deferred[None] | None = None
        self._loop = LoopingCall(self._look)
        self._loop.clock = reactor
        if screen.shows_progress:
            self._loop.start(_LOOK)

    def stop(self) -> None:
        """Show it no more."""
        if self._loop.running:
            self._loop.stop()
        if self._looking is not None:
            self._looking.cancel()

    def _look(self) -> Deferred[None]:
        self._looking = Deferred.fromCoroutine(self._tell())
        return self._looking

    async def _tell(self) -> None:
        # It is the reader of events who says what is wrong.
        with suppress(ClientError, CancelledError):
            status = await self._client.status(self._identifier)
            text = str(status["state"])
            if status.get("queue_place") is not None:
                text += f", {status['queue_place']} before it"
            self._screen.progress(f"{text} …")
