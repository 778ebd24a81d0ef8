"""The inward road: stdout, read, parsed and put into the ring, as fast as readers allow.

Bytes come in at `received`, events go out into the ring. Against the stream runs the
back-pressure: when the ring is full, or a file must be read first, the producer is paused.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from tawebeval.budget import Share
from tawebeval.events import Batch
from tawebeval.fileblock import WantedFile
from tawebeval.ring import Ring
from tawebeval.segi import Parser
from tawebeval.signals import Latch
from tawebeval.workspace import FileRefused

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


class Intake:
    """Feeds one ring from one stdout, which is `owner`'s.

    While the ring's `share` of the buffers is full the producer is paused. `done` is set when
    all has been put into the ring.
    """

    def __init__(
        self,
        clock: IReactorTime,
        parser: Parser,
        ring: Ring,
        share: Share,
        owner: Owner,
    ) -> None:
        self.done: Latch[None] = Latch()
        self._clock = clock
        self._parser = parser
        self._ring = ring
        self._share = share
        self._owner = owner
        self._producer: Producer | None = None
        self._full = False
        self._paused = False
        self._reading = False
        self._ended = False
        self._flush: IDelayedCall | None = None

    def start(self, producer: Producer) -> None:
        """Take what `producer` reads, and pause it when that is too much."""
        self._producer = producer
        self._share.room = self._balance

    def received(self, chunk: bytes) -> None:
        """Take a chunk of stdout."""
        self._take(self._parser.feed(chunk))

    def ended(self) -> None:
        """Take the end of stdout."""
        self._ended = True
        self._finish()

    def acknowledged(self) -> None:
        """Events were discarded: there may be room again, or others may have taken it."""
        self._share.resize(self._ring.size)
        self._balance()

    def release(self) -> None:
        """Take what still comes, however full the ring is: the process has ended."""
        self._share.unbind()

    def _take(self, batch: Batch) -> None:
        self._ring.append(batch)
        self._share.resize(self._ring.size)
        if self._parser.wanted is not None and not self._reading:
            self._reading = True
            Deferred.fromCoroutine(self._supply(self._parser.wanted))
        if self._flush is None and self._parser.partial:
            self._flush = self._clock.callLater(PARTIAL_LINE, self._deliver_partial)
        self._balance()
        if batch.count:
            self._owner.printed()

    def _deliver_partial(self) -> None:
        self._flush = None
        self._take(self._parser.flush())

    async def _supply(self, wanted: WantedFile) -> None:
        try:
            content = await self._owner.read_file(wanted)
        except FileRefused as error:
            batch = self._parser.refuse(str(error))
        except Exception:  # noqa: BLE001  (the run goes on)
            log.failure("cannot read the file of a file block")
            batch = self._parser.refuse("the file cannot be read")
        else:
            batch = self._parser.supply(content)
        self._reading = False
        self._take(batch)
        if self._ended:
            self._finish()

    def _finish(self) -> None:
        if self._reading or self.done.is_set:
            return
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        self._take(self._parser.finish())
        if not self._reading:
            self.done.set(None)

    def _balance(self) -> None:
        full = self._share.full
        if full is not self._full:
            self._full = full
            self._owner.hold(full)
        paused = full or self._reading
        if paused is not self._paused and self._producer is not None:
            self._paused = paused
            if paused:
                self._producer.pauseProducing()
            else:
                self._producer.resumeProducing()
