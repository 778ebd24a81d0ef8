"""Following one evaluation to its end, as streams do.

What a connection was given is not yet the client's: the kernels of both ends, and proxies between
them, hold megabytes of it, which are lost when the connection is cut. So a stream says for each
piece at which place in the connection's bytes it ended, and the connection tells, whenever the
ring needs room, up to which place the client has read. A client may also say so itself; then only
its word counts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from heapq import nsmallest
from pathlib import Path
from typing import Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from tawebeval.core.events import Batch
from tawebeval.core.form import EvaluationRequest
from tawebeval.core.identifiers import Identifiers
from tawebeval.core.ring import Reader, Retention
from tawebeval.core.states import State
from tawebeval.errors import EvaluationNotFound
from tawebeval.evaluations.evaluation import Evaluation

RESUME = 30.0
"""Seconds for which events are kept for the client of a stream that was cut."""

_NOTED = 8 * 1024  # bytes of a connection between two places that are noted, at least


class Connection(Protocol):
    """A connection that shows how much of what it was given the client has read."""

    def progress(self) -> tuple[int, int]:
        """Return the bytes that were given to it, and how many of them the client has read."""

    def probe(self, wanted: bool) -> None:
        """Have the client's machine asked again and again what `progress` tells, or no more.

        Without new data it need not say that more was read.
        """


class UnprobedConnection:
    """A connection that shows nothing: all that it was given counts as read."""

    def progress(self) -> tuple[int, int]:
        """Return that nothing is on the way."""
        return 0, 0

    def probe(self, wanted: bool) -> None:
        """Do nothing."""


@attrs.define
class Readers:
    """Who reads one evaluation: live streams, and pages.

    Pages count as being read until `paged`, a time of the clock, in seconds. (Whoever waits for one
    longer has everything.) `sent` is whether a stream has sent all there was to be, and its end.
    `furthest` is the last cursor up to which anybody has read.
    """

    evaluation: Evaluation
    retention: Retention
    _clock: IReactorTime
    paged: float = float("-inf")
    sent: bool = False
    furthest: int = 0
    _followings: dict[Subscription, None] = attrs.field(factory=dict)
    _due: IDelayedCall | None = None

    def enter(self, following: Subscription) -> Reader:
        """Keep for a stream what its client has yet to take."""
        self._followings[following] = None
        return self.retention.add_reader(following.position)

    def leave(self, following: Subscription, reader: Reader, *, cut: bool) -> None:
        """Let a stream end; if it was cut its client has `RESUME` seconds to come back."""
        del self._followings[following]
        if cut:
            self.retention.cut(reader, following.position, self._clock.seconds() + RESUME)
        else:
            self.retention.remove_reader(reader)
        self.make_room()

    def acknowledge(self, after: int) -> None:
        """Take that a page after that cursor is asked for."""
        self.furthest = max(self.furthest, after)
        if self.retention.acknowledge(after):  # most are asked for again, and make no room
            self.make_room()

    def make_room(self) -> None:
        """Discard what nobody needs, and let the evaluator print into the room.

        To be called whenever somebody needs less, and when the evaluator would have to wait.
        """
        for following in self._followings:
            following.look()
        now = self._clock.seconds()
        paged = now < self.paged
        self.retention.make_room(self.evaluation.share.limit, now=now, paged=paged)
        self.evaluation.acknowledged()
        self._look_again(now)

    def _look_again(self, now: float) -> None:
        """See to it that an evaluator goes on that waits for pages, or a resume, in vain.

        Its streams may have everything, and then nothing else would happen any more.
        """
        times = (self.paged, self.retention.resumable or self.paged)
        expected = [time - now for time in times if time > now]
        held = bool(len(self.retention) and expected) and self.evaluation.share.full
        if held and self._due is None:
            self._due = self._clock.callLater(min(expected), self._is_due)
        elif not held and self._due is not None:
            self._due.cancel()
            self._due = None

    def _is_due(self) -> None:
        self._due = None
        self.make_room()


@attrs.define
class Subscriptions:
    """All who follow an evaluation just now."""

    _present: dict[Subscription, None] = attrs.field(factory=dict)

    def __len__(self) -> int:
        return len(self._present)

    def enter(self, following: Subscription) -> None:
        """Note one more."""
        self._present[following] = None

    def leave(self, following: Subscription) -> None:
        """Note one less."""
        del self._present[following]


@attrs.define(eq=False)
class Subscription:
    """A stream that follows an evaluation; `position` is the cursor after what it has read.

    A context manager: within it nothing is discarded that its client has yet to take, and it reads
    on also when the evaluation is forgotten. `left()` is called after it. `connection` is set
    before that, where there is one that shows what the client takes.
    """

    position: int
    _readers: Readers
    _followers: Subscriptions
    _left: Callable[[], object]
    connection: Connection = attrs.field(factory=UnprobedConnection)
    _reader: Reader = attrs.field(init=False)
    _said: bool = False  # whether the client says by itself what it has
    # Where pieces ended: bytes given to the connection, and the cursor after the events.
    _places: deque[tuple[int, int]] = attrs.field(factory=deque)

    def __enter__(self) -> None:
        self._reader = self._readers.enter(self)
        self._followers.enter(self)
        # Where the ring is full and this stream has all of it, nothing else would make room.
        self._readers.make_room()

    def __exit__(self, broken_off: type[BaseException] | None, *_: object) -> None:
        ended = broken_off is None and self.ended
        if ended:
            self._readers.sent = True
        self._readers.leave(self, self._reader, cut=not ended)
        self._followers.leave(self)
        self._left()

    @property
    def ended(self) -> bool:
        """Whether everything was read, and no event will follow."""
        ring = self._readers.evaluation.ring
        return ring.closed and self.position == ring.newest

    def asks(self) -> bool:
        """Ask the connection how far the client has read, if the evaluator may wait for that.

        Tell whether it may: it waits, and the client was sent all events but has not shown that it
        has them.
        """
        held = self._readers.evaluation.share.full and self._reader.taken < self.position
        self.connection.probe(held and not self._said)
        return held

    def read(self, limit: int) -> Batch:
        """Return what follows, up to `limit` bytes or one event; it is empty for now, or ever."""
        batch = self._readers.evaluation.ring.read(self.position, limit)
        self.position += batch.count
        return batch

    def changed(self) -> Deferred[None]:
        """Return a Deferred of the next events, or the end."""
        return self._readers.evaluation.changed.wait()

    def handed_over(self) -> None:
        """Note that the connection was given all that was read."""
        if not self._said:
            given, _ = self.connection.progress()
            if len(self._places) > 1 and given - self._places[-2][0] < _NOTED:
                self._places.pop()
            self._places.append((given, self.position))
        self._readers.make_room()

    def look(self) -> None:
        """Note what the client has taken by now: it may be discarded when need be."""
        if self._said:
            self._places.clear()
        elif self._places:
            _, read = self.connection.progress()
            while self._places and self._places[0][0] <= read:
                self._take(self._places.popleft()[1])

    def acknowledge(self, cursor: int) -> bool:
        """Take from the client that it has all events before `cursor`; False if it cannot have.

        From the first time on nothing else shows what it has.
        """
        if cursor > self.position:
            return False
        self._said = True
        if cursor > self._reader.taken:
            self._take(cursor)
            self._readers.make_room()
        return True

    def _take(self, cursor: int) -> None:
        self._reader.taken = cursor
        self._readers.furthest = max(self._readers.furthest, cursor)


@attrs.frozen
class Upload:
    """A form that has arrived: its files lie below `directory`.

    `key` is the `Idempotency-Key`, if one was given, and `digest` tells forms apart. `size` is
    what it counts for among the uploads on the disk, in bytes.
    """

    request: EvaluationRequest
    directory: Path
    key: str | None = None
    digest: bytes = b""
    size: int = 0


@attrs.define(eq=False)
class Record:
    """What is noted about an evaluation.

    `key`, `digest`, which tells forms with one key apart, and `size` are of its upload. `number`
    tells in which order they were accepted, `asked` when a client last asked, in seconds of the
    clock. `fate` is DRAINED or EXPIRED when it is forgotten.
    """

    evaluation: Evaluation
    key: str | None
    digest: bytes
    size: int
    caller: str
    number: int
    asked: float
    readers: Readers
    fate: State | None = None

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for it, or follows it, just now.

        Who has asked for a callback waits for the end, unless that does not come without a reader.
        """
        evaluation = self.evaluation
        if len(evaluation.changed) or len(self.readers.retention):
            return True
        told = evaluation.callback is not None and not evaluation.over.is_set
        return told and not evaluation.share.full

    def settle(self) -> None:
        """Let the evaluation be gone if it is forgotten, nothing of it lives, and nobody reads."""
        if (
            self.fate is not None
            and self.evaluation.over.is_set
            and not len(self.readers.retention)
        ):
            self.evaluation.forget(self.fate)


class Records:
    """The evaluations that are known. To each caller there are only its own.

    `accepted` counts all that there were.
    """

    def __init__(self, identities: Identifiers, clock: IReactorTime) -> None:
        self._identities = identities
        self._clock = clock
        self._records: dict[str, Record] = {}
        # Of those that are over and the others, in the order in which clients last asked for
        # them; the end of an evaluation counts as that, too.
        self._living: OrderedDict[str, Record] = OrderedDict()
        self._kept: OrderedDict[str, Record] = OrderedDict()
        self._sent: dict[str, Record] = {}  # of these, what streams have sent to the end
        self._keys: dict[tuple[str, str], Record] = {}
        self._kept_of: Counter[str] = Counter()  # by caller
        self.accepted = 0

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._records

    @property
    def kept(self) -> int:
        """How many are over, and not forgotten."""
        return len(self._kept)

    def kept_of(self, caller: str) -> int:
        """Return how many of those are a caller's."""
        return self._kept_of[caller]

    def __getitem__(self, identifier: str) -> Record:
        return self._records[identifier]

    def add(self, evaluation: Evaluation, upload: Upload, caller: str) -> Record:
        """Note a new evaluation; `end` is for when it is over."""
        self.accepted += 1
        identifier = evaluation.identifier
        readers = Readers(evaluation, Retention(evaluation.ring), self._clock)
        record = self._records[identifier] = self._living[identifier] = Record(
            evaluation,
            upload.key,
            upload.digest if upload.key is not None else b"",
            upload.size,
            caller,
            self.accepted,
            self._clock.seconds(),
            readers,
        )
        if upload.key is not None:
            self._keys[caller, upload.key] = record
        return record

    def end(self, record: Record) -> None:
        """Note that nothing is left of an evaluation but its events."""
        identifier = record.evaluation.identifier
        if self._living.pop(identifier, None) is not None:
            self._kept[identifier] = record
            self._kept_of[record.caller] += 1
            self._left(record)
        record.settle()

    def leave(self, record: Record) -> None:
        """Note that a stream has left it."""
        self._left(record)
        record.settle()

    def _left(self, record: Record) -> None:
        """Note when it was left, by its evaluator or a stream, and whether all of it was sent."""
        self.touch(record)
        if record.readers.sent and record.evaluation.identifier in self._kept:
            self._sent[record.evaluation.identifier] = record

    def make_room(self, record: Record) -> None:
        """Let an evaluation go on that has no room, if that can be; it waits for a reader else."""
        if record.evaluation.callback is not None:
            self.touch(record)  # until now somebody has waited for its end
        record.readers.make_room()

    def keyed(self, key: str | None, caller: str) -> Record | None:
        """Return the record of an `Idempotency-Key`, if there is one."""
        return None if key is None else self._keys.get((caller, key))

    def find(self, identifier: str, caller: str, *, reads: bool = True) -> Record | None:
        """Return a record, None for one that is forgotten. Raises UnknownEvaluation.

        Who does not read counts as asking for it only while it gets on without a reader: one that
        is held, or has ended, would keep the memory for ever of what nobody reads.
        """
        record = self._records.get(identifier)
        if (record is None or record.caller != caller) and not self._identities.is_issued(
            identifier, caller
        ):
            raise EvaluationNotFound
        if record is not None:
            waits = record.evaluation.state.ended or record.evaluation.share.full
            if reads or not waits:
                self.touch(record)
        return record

    def touch(self, record: Record) -> None:
        """Note that a client asks for it, unless it is forgotten."""
        identifier = record.evaluation.identifier
        if identifier in self._records:
            record.asked = self._clock.seconds()
            (self._living if identifier in self._living else self._kept).move_to_end(identifier)

    def forget(self, identifier: str, fate: State) -> None:
        """Drop a record; one that is not there is forgotten already."""
        record = self._records.pop(identifier, None)
        if record is None:
            return
        if self._living.pop(identifier, None) is None:
            del self._kept[identifier]
            self._sent.pop(identifier, None)
            self._kept_of[record.caller] -= 1
            if not self._kept_of[record.caller]:
                del self._kept_of[record.caller]
        if record.key is not None:
            del self._keys[record.caller, record.key]
        record.fate = fate
        record.settle()

    def forget_sent(self, caller: str | None = None) -> bool:
        """Forget one, of that caller, that a stream has sent to the end; tell whether one was.

        It is that for which this was so first, and that nobody is reading again.
        """
        now = self._clock.seconds()
        for identifier, record in self._sent.items():
            read = record.awaited or now < record.readers.paged
            if caller in (None, record.caller) and not read:
                self.forget(identifier, State.EXPIRED)
                return True
        return False

    def abandoned(self, patience: float) -> list[Record]:
        """Return those not over for which nobody has asked in so many seconds, nor waits now."""
        return self._unasked(self._living, patience)

    def unread(self, patience: float) -> list[Record]:
        """Return those over for so many seconds for which nobody has asked since, nor waits."""
        return self._unasked(self._kept, patience)

    def _unasked(self, records: OrderedDict[str, Record], patience: float) -> list[Record]:
        latest = self._clock.seconds() - patience
        found = []
        for record in records.values():
            if record.asked > latest:
                break
            if not record.awaited:
                found.append(record)
        return found

    def read_by_pages(self) -> list[str]:
        """Return the identifiers of those for whose next page somebody is expected to ask."""
        now = self._clock.seconds()
        return [name for name, record in self._records.items() if now < record.readers.paged]

    def of(self, caller: str, after: int, limit: int) -> list[Record]:
        """Return up to `limit` records of a caller in order, from that `number` on, without it."""
        records = self._records.values()
        return nsmallest(
            limit,
            (record for record in records if record.caller == caller and record.number > after),
            key=lambda record: record.number,
        )
