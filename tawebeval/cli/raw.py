"""Stdout as it is, for who writes an evaluator: with its blocks marked."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from typing import Any

from twisted.internet.interfaces import IProcessTransport
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from tawebeval.cli.output import Screen
from tawebeval.cli.streams import OutputLost
from tawebeval.client import Text
from tawebeval.core.markers import Markers
from tawebeval.linux.child import ChildProcess, Spawner
from tawebeval.linux.starting import Started

_NAMES = {
    "data_begin": "<<< data begins >>>",
    "data_end": "<<< data ends >>>",
    "file_begin": "<<< file begins >>>",
    "file_end": "<<< file ends >>>",
}


class Marked:
    """Replaces the markers, where they are lines with a terminator, by words for people."""

    def __init__(self, markers: Markers) -> None:
        self._names: Mapping[bytes, bytes] = {
            getattr(markers, name): words.encode() for name, words in _NAMES.items()
        }
        self._held = b""  # the beginning of a line that may become a marker
        self._fresh = True  # nothing of the current line was let through
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Take some of stdout; return what can be shown of it."""
        shown = []
        *lines, last = (self._held + data).split(b"\n")
        for line in lines:
            shown.append((self._names.get(line, line) if self._fresh else line) + b"\n")
            self._fresh = True
        self._held = b""
        if self._fresh and any(marker.startswith(last) for marker in self._names):
            self._held = last
        elif last:
            shown.append(last)
            self._fresh = False
        return self._decoder.decode(b"".join(shown))

    def finish(self) -> str:
        """Return the rest, after the end of stdout."""
        held, self._held = self._held, b""
        return self._decoder.decode(held, final=True)


class OverhearingSpawner(Spawner):
    """Starts children whose stdout is shown on a screen.

    `markers` are drawn before the start; `unread(why)` is called when nobody sees the screen.
    """

    def __init__(self, reactor: Any, screen: Screen) -> None:
        super().__init__(reactor)
        self.markers: Callable[[], Markers | None] = lambda: None
        self.unread: Callable[[OutputLost], object] = lambda why: None
        self._screen = screen

    def adopt(self, protocol: ProcessProtocol, started: Started) -> ChildProcess:
        """Let a child drive a protocol, and be heard."""
        markers = self.markers()
        assert markers is not None, "nothing starts before they are drawn"
        heard = Overheard(protocol, Marked(markers), self._screen, lambda why: self.unread(why))
        return super().adopt(heard, started)


class Overheard(ProcessProtocol):
    """Shows the stdout of a process on a screen, and hands all on to another protocol."""

    def __init__(
        self,
        protocol: ProcessProtocol,
        marked: Marked,
        screen: Screen,
        unread: Callable[[OutputLost], object],
    ) -> None:
        self._protocol = protocol
        self._marked = marked
        self._screen = screen
        self._unread = unread

    def makeConnection(self, process: IProcessTransport) -> None:
        """Hand on the child."""
        self._protocol.makeConnection(process)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        """Hand on what was printed."""
        if childFD == 1:
            self._show(self._marked.feed(data))
        self._protocol.childDataReceived(childFD, data)

    def childConnectionLost(self, childFD: int) -> None:
        """Hand on the end of stdout or stderr."""
        if childFD == 1:
            self._show(self._marked.finish())
        self._protocol.childConnectionLost(childFD)

    def processExited(self, reason: Failure) -> None:
        """Hand on the end of the child."""
        self._protocol.processExited(reason)

    def processEnded(self, reason: Failure) -> None:
        """Hand on the end of all."""
        self._protocol.processEnded(reason)

    def _show(self, text: str) -> None:
        if text:
            try:
                self._screen.show(Text(text))
                self._screen.flush()
            except OutputLost as error:
                self._unread(error)
