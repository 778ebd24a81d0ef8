"""Streams of events in one response: SSE and JSON Lines.

A stream has one piece of bounded size on its way, and reads the next one when the transport has
taken it. Each piece, and the start of a stream, waits for another turn of the reactor, and those of
one turn take at most `MAX_TURN_SECONDS`, so that other requests are served in between
(`StreamTurns`). Readers at the same place share the frames of a piece (`FramedBatches`).
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.interfaces import IPushProducer, IReactorTime
from twisted.logger import Logger
from zope.interface import implementer

from tawebeval.core.events import EventBatch
from tawebeval.core.framing import StreamFraming
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.deferreds import Condition
from tawebeval.errors import RequestError
from tawebeval.evaluations.archive_reader import EventSubscription
from tawebeval.web.server.request import ApiRequest

MAX_STREAM_WRITE_BYTES = 64 * 1024
"""Bytes of JSON Lines framed and written at once; a single larger event is written whole."""

MAX_FRAMED_BATCHES = 8
"""Batches that are kept, with their frames, for other readers: some 150 KiB each."""

MAX_TURN_SECONDS = 0.005
"""Seconds in which streams go on in one turn of the reactor; one stream may exceed them."""

log = Logger()


HEARTBEAT_SECONDS = 15
"""Seconds of silence before a heartbeat: proxies close silent connections, often after 60."""


@attrs.define
class FramedBatches:
    """The batches that were framed last, for other readers at the same place."""

    # By encoder, cursor and size: the lines, and their frames.
    _framed: dict[tuple[object, int, int], tuple[bytes, bytes]] = attrs.field(factory=dict)

    def frame(self, framing: StreamFraming, begin_cursor: int, batch: EventBatch) -> bytes:
        """Return a batch, which begins at a cursor, in a framing."""
        key = (framing.encode_events, begin_cursor, len(batch.lines))
        found = self._framed.get(key)
        if found is not None and found[0] == batch.lines:  # of the same evaluation
            return found[1]
        framed = framing.encode_events(begin_cursor, batch)
        if len(batch.lines) <= MAX_STREAM_WRITE_BYTES:
            while len(self._framed) >= MAX_FRAMED_BATCHES:
                del self._framed[next(iter(self._framed))]
            self._framed[key] = batch.lines, framed
        return framed


@attrs.define(eq=False)
class StreamTurns:
    """The streams that wait for a turn of the reactor; each turn has some milliseconds for them.

    The callers take turns: however many streams one has, a stream of another comes next.
    """

    clock: IReactorTime
    framed_batches: FramedBatches = attrs.field(factory=FramedBatches)
    # By caller; those that begin to wait in a turn have to wait for the next.
    _waiting: dict[str, dict[Deferred[None], None]] = attrs.field(factory=dict)
    _arrived: dict[str, dict[Deferred[None], None]] = attrs.field(factory=dict)
    _is_due: bool = False

    def wait(self, caller: str) -> Deferred[None]:
        """Return a Deferred of another turn. It can be cancelled."""
        turn: Deferred[None] = Deferred(lambda turn: self._forget(caller, turn))
        self._arrived.setdefault(caller, {})[turn] = None
        self._plan()
        return turn

    def _forget(self, caller: str, turn: Deferred[None]) -> None:
        for group in (self._waiting, self._arrived):
            group.get(caller, {}).pop(turn, None)

    def _plan(self) -> None:
        if not self._is_due:
            self._is_due = True
            self.clock.callLater(0, self._run)

    def _run(self) -> None:
        arrived, self._arrived = self._arrived, {}
        for caller, turns in arrived.items():
            self._waiting.setdefault(caller, {}).update(turns)
        end = perf_counter() + MAX_TURN_SECONDS
        while self._waiting and perf_counter() < end:
            caller = next(iter(self._waiting))
            turns = self._waiting.pop(caller)
            if not turns:  # cancelled
                continue
            turn = next(iter(turns))
            del turns[turn]
            if turns:
                self._waiting[caller] = turns
            turn.callback(None)
        self._is_due = False
        if self._waiting or self._arrived:
            self._plan()


@implementer(IPushProducer)
@attrs.define(eq=False)
class StreamFlowControl:
    """The producer of a stream of `caller`, which waits until the transport takes more."""

    clock: IReactorTime
    turns: StreamTurns = attrs.Factory(lambda self: StreamTurns(self.clock), takes_self=True)
    caller: str = ANONYMOUS_CALLER
    _is_paused: bool = False
    _is_stopped: bool = False
    _resumed: Condition = attrs.field(factory=Condition)

    def pauseProducing(self) -> None:
        """Pause: the transport's buffer is full."""
        self._is_paused = True

    def resumeProducing(self) -> None:
        """Resume: the transport's buffer is empty."""
        self._is_paused = self._is_stopped
        self._resumed.notify()

    def stopProducing(self) -> None:
        """Pause for good: the connection is about to end."""
        self._is_paused = self._is_stopped = True

    async def wait_until_ready(self) -> None:
        """Return in another turn of the reactor, once the transport takes more."""
        await self.turns.wait(self.caller)
        while self._is_paused:
            await self._resumed.wait()
            await self.turns.wait(self.caller)  # many may be resumed in one turn


async def write_events(
    subscription: EventSubscription,
    flow_control: StreamFlowControl,
    framing: StreamFraming,
    write: Callable[[bytes], object],
    send_heartbeat: Callable[[], object],
    heartbeat_seconds: float,
) -> None:
    """Write the events of `subscription`, from its position to the end of the evaluation.

    `send_heartbeat()` is called after each `heartbeat_seconds` seconds without an event. Raises:
    DiscardedCursor, if an acknowledgement has discarded events before they were sent; ServerBusy.
    """
    with subscription:
        write(framing.first_bytes)
        while not subscription.has_ended:
            batch = await subscription.read_events(MAX_STREAM_WRITE_BYTES)
            if batch.count:
                begin = subscription.read_cursor - batch.count
                write(flow_control.turns.framed_batches.frame(framing, begin, batch))
            elif not await _await_change(
                subscription.wait_for_events().addTimeout(heartbeat_seconds, flow_control.clock)
            ):
                await flow_control.wait_until_ready()
                send_heartbeat()
            # Also right after a write: more output may arrive in the same turn.
            await flow_control.wait_until_ready()
        write(framing.last_bytes)


async def _await_change(change: Deferred[None]) -> bool:
    try:
        await change
    except DeferredTimeout:
        return False
    return True


async def send_stream(
    request: ApiRequest,
    subscription: EventSubscription,
    framing: StreamFraming,
    turns: StreamTurns,
    heartbeat_seconds: float,
) -> None:
    """Answer with the events in this framing; the response ends with the evaluation.

    At discarded events the connection is closed: resuming there is 410.
    """
    channel = request.channel
    flow = StreamFlowControl(turns.clock, turns, request.caller)
    request.registerProducer(flow, True)
    try:
        await write_events(
            subscription,
            flow,
            framing,
            request.write,
            lambda: request.write(framing.heartbeat_bytes),
            heartbeat_seconds,
        )
    except CancelledError:  # the client has gone
        raise
    except Exception as error:  # noqa: BLE001  (a begun response can only be aborted)
        if not isinstance(error, RequestError):
            log.failure("defect: a stream failed")
        channel.forceAbortClient()
        await Deferred()
    request.unregisterProducer()
