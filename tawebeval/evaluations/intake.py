"""The inward road: stdout, read, parsed and put into the ring, as fast as readers allow.

Bytes come in at `received`, events go out into the ring. Against the stream runs the
back-pressure: the producer is paused while the ring is full, while a file is read, and
while the parser has more input than it parses in one turn of the reactor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.core.budget import Share
from tawebeval.core.events import Batch
from tawebeval.core.fileblock import WantedFile
from tawebeval.core.ring import Ring
from tawebeval.core.segi import Parser
from tawebeval.deferreds import Latch
from tawebeval.sandbox.workspace import FileRefused

PARTIAL_LINE = 0.02
"""Seconds that a partial line waits for its rest (contract, section 4)."""

log = Logger()


class Producer(Protocol):
    """What can be paused: the transport of the evaluator's process."""

    def pauseProducing(self) -> None:
        """Stop reading stdout."""

    def resumeProducing(self) -> None:
        """Read stdout again."""


class Owner(Protocol):
    """Whose stdout it is."""

    def printed(self) -> None:
        """Take that there are new events."""

    def hold(self, held: bool) -> None:
        """Take that the ring has become full, or that there is room again."""

    def read_file(self, wanted: WantedFile) -> Awaitable[bytes]:
        """Return the content of a file. Raises FileRefused."""

    def lose_output(self) -> None:
        """Take that events are lost by a defect of the daemon: the run is to be killed."""


class Intake:
    """Feeds one ring from one stdout, which is `owner`'s.

    While the ring's `share` of the buffers is full nothing is parsed, no file is read, and the
    producer is paused; the share calls `on_room` when that ends. `done` is set when all has been
    put into the ring, or `failed` is: a defect of the daemon has lost events, and what follows is
    thrown away.
    """

    __slots__ = (
        *("_clock", "_ended", "_finished", "_flush", "_full", "_owner", "_parser", "_paused"),
        *(
            "_producer",
            "_reading",
            "_refusing",
            "_released",
            "_ring",
            "_share",
            "_turn",
            "done",
            "failed",
        ),
    )

    def __init__(
        self,
        clock: IReactorTime,
        parser: Parser,
        ring: Ring,
        share: Share,
        owner: Owner,
    ) -> None:
        self.done: Latch[None] = Latch()
        self.failed = False
        self._clock = clock
        self._parser = parser
        self._ring = ring
        self._share = share
        self._owner = owner
        self._producer: Producer | None = None
        self._full = False
        self._paused = False
        self._reading = False
        self._released = False
        self._refusing = False
        self._ended = False
        self._finished = False
        self._flush: IDelayedCall | None = None
        self._turn: IDelayedCall | None = None

    def start(self, producer: Producer) -> None:
        """Take what `producer` reads, and pause it when that is too much."""
        self._producer = producer

    def received(self, chunk: bytes) -> None:
        """Take a chunk of stdout."""
        self._attempt(self._parse, self._parser.feed, chunk)

    def ended(self) -> None:
        """Take the end of stdout."""
        self._ended = True
        self._attempt(self._plan)
        if self.failed:
            self.done.set(None)

    def acknowledged(self) -> None:
        """Events were discarded: there may be room again, or others may have taken it."""
        if self.failed:
            self._share.resize(self._ring.size)
        self._attempt(self._resize)

    def release(self) -> None:
        """Take the rest of stdout however full the ring is: the processes have ended.

        It is at most what a pipe holds. The files that it names may be many times as much: each of
        them still waits for room in the ring.
        """
        self._released = True
        self._attempt(self._share.unbind)

    def refuse_files(self) -> None:
        """Refuse files for which there is no room: the run was stopped, and waits for no reader."""
        self._refusing = True
        self._attempt(self._plan)

    def on_room(self) -> None:
        """Take that the ring is not full any more."""
        self._attempt(self._plan)

    def _attempt(self, step: Callable[..., object], *arguments: Any) -> None:
        """Make a step on the road from stdout to the ring; where that raises events are lost."""
        if self.failed:
            return
        try:
            step(*arguments)
        except Exception:  # noqa: BLE001  (whatever the defect is)
            self._fail()

    def _fail(self) -> None:
        log.failure("events are lost by a defect on the road from stdout to the ring")
        self.failed = True
        self._cancel_calls()
        self._owner.lose_output()
        if self._ended:
            self.done.set(None)
        elif self._producer is not None:
            self._producer.resumeProducing()  # until the end, which has to come

    def _parse(self, parse: Callable[..., Batch], *arguments: Any) -> None:
        """Let the parser do something, and put what comes of it into the ring."""
        self._put(parse(*arguments))
        self._plan()

    def _put(self, batch: Batch) -> None:
        self._ring.append(batch)
        self._share.resize(self._ring.size)
        if batch.count:
            self._owner.printed()

    def _resize(self) -> None:
        self._share.resize(self._ring.size)
        self._plan()

    def _plan(self) -> None:
        """Plan what comes next: a turn of the parser, a read of stdout, or the end."""
        if self.failed:  # meanwhile, in telling somebody
            return
        full = self._must_wait()
        if full is not self._full:
            self._full = full
            self._owner.hold(full)
        busy = self._parser.pending or self._parser.wanted is not None
        if busy and not (full or self._reading or self._turn):
            self._turn = self._clock.callLater(0, self._attempt, self._take_turn)
        if self._flush is None and self._parser.partial:
            self._flush = self._clock.callLater(PARTIAL_LINE, self._attempt, self._deliver_partial)
        paused = full or busy
        if paused is not self._paused and self._producer is not None:
            self._paused = paused
            if paused:
                self._producer.pauseProducing()
            else:
                self._producer.resumeProducing()
        if self._ended and not (busy or self._finished):
            self._finish()

    def _must_wait(self) -> bool:
        """Return whether the next step has to wait for room in the ring."""
        if not self._released:
            return self._share.full
        asks = self._parser.wanted is not None and not self._refusing
        return asks and self._share.size >= self._share.limit

    def _take_turn(self) -> None:
        """Parse on, or read the file that is wanted, unless others have taken the room."""
        self._share.resize(self._ring.size)
        self._turn = None
        wanted = self._parser.wanted
        if self._must_wait():
            self._plan()
        elif wanted is None:
            self._parse(self._parser.proceed)
        elif self._released and self._share.size >= self._share.limit:
            self._parse(self._parser.refuse, "the run was stopped before there was room for a file")
        else:
            self._reading = True
            Deferred.fromCoroutine(self._read(wanted))

    async def _read(self, wanted: WantedFile) -> None:
        try:
            content = await self._owner.read_file(wanted)
        except FileRefused as error:
            step: Callable[[], None] = partial(self._parse, self._parser.refuse, str(error))
        except Exception as error:  # noqa: BLE001  (whatever the defect is)
            step = Failure(error).raiseException
        else:
            step = partial(self._parse, self._parser.supply, content)
        self._reading = False
        self._attempt(step)

    def _deliver_partial(self) -> None:
        self._flush = None
        self._parse(self._parser.flush)

    def _cancel_calls(self) -> None:
        for call in (self._flush, self._turn):
            if call is not None:
                call.cancel()
        self._flush = self._turn = None

    def _finish(self) -> None:
        self._finished = True
        self._cancel_calls()
        self._put(self._parser.finish())
        self._share.unbind()  # nothing waits any more: no pause lasts beyond the end of stdout
        self.done.set(None)
