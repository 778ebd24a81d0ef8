"""Following an evaluation on the screen, to its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import LoopingCall

from tawebeval.cli.asking import FAILED, GOOD, WRONG
from tawebeval.cli.saving import Folder
from tawebeval.cli.screen import Screen
from tawebeval.client import Client, ClientError, EvaluationError, Event, File, Page

_LOOK = 1.0  # seconds between two looks at what an evaluation is waiting for


async def follow(
    client: Client,
    identifier: str,
    screen: Screen,
    reactor: Any,
    folder: Folder | None = None,
) -> int:
    """Show all events as they come, and save files in `folder`; return the exit status."""
    waiting = _Waiting(client, identifier, screen, reactor)
    try:
        return await show(client.pages(identifier), screen, screen.show, folder, waiting.stop)
    finally:
        waiting.stop()


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
