"""A screen in memory."""

from __future__ import annotations

import io

from tawebeval.cli.output import Screen
from tawebeval_client import Event

CLEAR = "\r\x1b[K"


class Stream(io.StringIO):
    """A text stream that may claim to be a terminal, and may be a pipe without a reader."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal
        self.broken = False

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        if self.broken:
            raise BrokenPipeError
        return super().write(text)


class Shown:
    """A screen and its streams, which are one on a terminal."""

    def __init__(self, terminal: bool = False, **settings: bool) -> None:
        self.out = Stream(terminal)
        self.notes = self.out if terminal else Stream(False)
        self.screen = Screen(self.out, self.notes, settings.pop("colour", False), **settings)

    def show(self, *events: Event) -> str:
        """Show events and close the screen; return stdout."""
        for event in events:
            self.screen.show_event(event)
        self.screen.finish_output()
        return self.out.getvalue()
