"""What the registry notes: evaluations by identifier, by `Idempotency-Key`, by caller."""

from __future__ import annotations

from collections import Counter, OrderedDict
from heapq import nsmallest
from pathlib import Path

import attrs
from twisted.internet.interfaces import IReactorTime

from tawebeval.core.form import EvaluationRequest
from tawebeval.core.identifiers import Identities
from tawebeval.core.retention import Retention
from tawebeval.core.states import State
from tawebeval.errors import UnknownEvaluation
from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.evaluations.following import Readers


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

    def __init__(self, identities: Identities, clock: IReactorTime) -> None:
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
        if (record is None or record.caller != caller) and not self._identities.issued(
            identifier, caller
        ):
            raise UnknownEvaluation
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
