"""Stdout of one evaluator on the way into the ring.

The pump has a `SegiParser` (`core.segi`) make events of the bytes that an `EvaluatorRun` hands it,
and appends these to the ring. Back-pressure goes the other way: the pump pauses the child's stdout
while the ring is full, while a file is read, and while the parser has more input than it parses in
one turn of the reactor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.core.budget import RingAllocation
from tawebeval.core.events import EventBatch
from tawebeval.core.fileblock import FileReference
from tawebeval.core.ring import EventRing
from tawebeval.core.segi import SegiParser
from tawebeval.deferreds import OneShotEvent
from tawebeval.linux.child import StdoutProducer
from tawebeval.sandbox.workspace import FileRefused

PARTIAL_LINE_DELAY = 0.02
"""Seconds that a partial line waits for its rest (contract, section 4)."""

log = Logger()


class StdoutPumpOwner(Protocol):
    """Owner of a `StdoutPump`: the supervisor of the run."""

    def on_new_events(self) -> None:
        """Handle new events in the ring."""

    def on_pause_change(self, paused: bool) -> None:
        """Handle that the ring has become full, or has room again."""

    def on_lost_events(self) -> None:
        """Handle the loss of events by a defect of the daemon: the run is to be killed."""

    def read_referenced_file(self, wanted: FileReference) -> Awaitable[bytes]:
        """Return the content of a file. Raises: FileRefused."""


class EventRecorder(Protocol):
    """Recorder of events, for a later process of the daemon."""

    def record_batch(self, begin_cursor: int, batch: EventBatch, time_ms: int) -> None:
        """Record the events after a cursor, which no client has seen yet.

        The parser has just returned them; an empty batch is its progress alone. `time_ms` is their
        time, in milliseconds since the epoch.
        """


@attrs.define(eq=False)
class StdoutPump:
    """Pump from the stdout of one evaluator through the parser into its ring.

    A `event_recorder` records the events. While the ring's `share` of the buffers is full the pump
    parses nothing, reads no file and pauses the producer; the share calls `on_ring_has_room` when
    that ends. `output_stored_event` is set when stdout has ended and all its events are in the
    ring. `has_lost_events` is set when a defect of the daemon has lost events; the pump then drops
    the rest of stdout.
    """

    _clock: IReactorTime
    _parser: SegiParser
    _ring: EventRing
    _share: RingAllocation
    _owner: StdoutPumpOwner
    event_recorder: EventRecorder | None = None
    output_stored_event: OneShotEvent[None] = attrs.field(factory=OneShotEvent)
    has_lost_events: bool = False
    _producer: StdoutProducer | None = None
    _full: bool = False
    _paused: bool = False
    _reading: bool = False
    _draining: bool = False
    _is_left: bool = False
    _refusing: bool = False
    _ended: bool = False
    _finished: bool = False
    _flush: IDelayedCall | None = None
    _turn: IDelayedCall | None = None

    @property
    def stray_marker_advice(self) -> str | None:
        """Advice about a begin marker that was text, None without one."""
        return self._parser.stray_marker_advice

    def start(self, producer: StdoutProducer) -> None:
        """Set the producer, whose stdout `feed` gets, and which the pump pauses."""
        self._producer = producer

    def feed(self, chunk: bytes) -> None:
        """Parse a chunk of stdout."""
        self._attempt(self._parse, self._parser.feed, chunk)

    def on_stdout_end(self) -> None:
        """Handle the end of stdout."""
        self._ended = True
        self._attempt(self._plan)
        if self.has_lost_events:
            self.output_stored_event.set_value(None)

    def on_acknowledge(self) -> None:
        """Handle a discard of events: the ring may have room, or other rings may have taken it."""
        if self.has_lost_events:
            self._share.set_used_bytes(self._ring.memory_bytes)
        self._attempt(self._resize)

    def accept_remaining_output(self) -> None:
        """Accept the rest of stdout however full the ring is: the processes have ended.

        The rest is at most the content of a pipe. Files that it names may be many times as large:
        each file still waits for room in the ring.
        """
        self._draining = True
        self._attempt(self._share.disable_limit)

    def refuse_referenced_files(self) -> None:
        """Refuse files for which the ring has no room: a stopped run waits for no reader."""
        self._refusing = True
        self._attempt(self._plan)

    def on_ring_has_room(self) -> None:
        """Go on: the ring is not full any more."""
        self._attempt(self._plan)

    def hand_over(self) -> None:
        """Stop for good: another process goes on with what was recorded."""
        self._is_left = True
        self._cancel_calls()

    def _attempt(self, step: Callable[..., object], *arguments: Any) -> None:
        """Call `step`; if it raises, events are lost."""
        if self.has_lost_events or self._is_left:
            return
        try:
            step(*arguments)
        except Exception:  # noqa: BLE001  (whatever the defect is)
            self._fail()

    def _fail(self) -> None:
        log.failure("defect: events between stdout and the ring are lost")
        self.has_lost_events = True
        self._cancel_calls()
        self._owner.on_lost_events()
        if self._ended:
            self.output_stored_event.set_value(None)
        elif self._producer is not None:
            self._producer.resumeProducing()  # the end of stdout is still needed

    def _parse(self, parse: Callable[..., EventBatch], *arguments: Any) -> None:
        """Call a method of the parser, and put its events into the ring."""
        self._put(parse(*arguments))
        self._plan()

    def _put(self, batch: EventBatch) -> None:
        cursor, time_ms = self._ring.end_cursor, int(self._ring.read_wall_clock() * 1000)
        self._ring.append_batch(batch, time_ms)
        if self.event_recorder is not None:
            self.event_recorder.record_batch(cursor, batch, time_ms)
        self._share.set_used_bytes(self._ring.memory_bytes)
        if batch.count:
            self._owner.on_new_events()

    def _resize(self) -> None:
        self._share.set_used_bytes(self._ring.memory_bytes)
        self._plan()

    def _plan(self) -> None:
        """Plan the next step: a turn of the parser, a read of stdout, or the end."""
        if self.has_lost_events:  # in a call of the owner
            return
        full = self._must_wait()
        if full is not self._full:
            self._full = full
            self._owner.on_pause_change(full)
        busy = self._parser.has_pending_input or self._parser.awaited_file is not None
        if busy and not (full or self._reading or self._turn):
            self._turn = self._clock.callLater(0, self._attempt, self._take_turn)
        if self._flush is None and self._parser.has_partial_line:
            self._flush = self._clock.callLater(
                PARTIAL_LINE_DELAY, self._attempt, self._deliver_partial
            )
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
        if not self._draining:
            return self._share.is_full or self._share.is_archive_behind
        wants_file = self._parser.awaited_file is not None and not self._refusing
        return wants_file and self._share.used_bytes >= self._share.max_ring_bytes

    def _take_turn(self) -> None:
        """Parse on, or read the wanted file, unless other rings have taken the room."""
        self._share.set_used_bytes(self._ring.memory_bytes)
        self._turn = None
        wanted = self._parser.awaited_file
        if self._must_wait():
            self._plan()
        elif wanted is None:
            self._parse(self._parser.parse_pending)
        elif self._draining and self._share.used_bytes >= self._share.max_ring_bytes:
            self._parse(
                self._parser.refuse_file,
                "the file was not read: the run was stopped before the buffers had room for it",
            )
        else:
            self._reading = True
            Deferred.fromCoroutine(self._read(wanted))

    async def _read(self, wanted: FileReference) -> None:
        try:
            content = await self._owner.read_referenced_file(wanted)
        except FileRefused as error:
            step: Callable[[], None] = partial(self._parse, self._parser.refuse_file, str(error))
        except Exception as error:  # noqa: BLE001  (whatever the defect is)
            step = Failure(error).raiseException
        else:
            step = partial(self._parse, self._parser.supply_file, content)
        self._reading = False
        self._attempt(step)

    def _deliver_partial(self) -> None:
        self._flush = None
        self._parse(self._parser.flush_partial_line)

    def _cancel_calls(self) -> None:
        for call in (self._flush, self._turn):
            if call is not None:
                call.cancel()
        self._flush = self._turn = None

    def _finish(self) -> None:
        self._finished = True
        self._cancel_calls()
        self._put(self._parser.finish())
        self._share.disable_limit()  # no pause lasts beyond the end of stdout
        self.output_stored_event.set_value(None)
