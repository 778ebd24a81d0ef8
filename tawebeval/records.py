"""What the registry notes: evaluations by identifier, by `Idempotency-Key`, by caller."""

from __future__ import annotations

from collections import OrderedDict
from heapq import nsmallest
from pathlib import Path

import attrs
from twisted.internet.interfaces import IReactorTime

from tawebeval.errors import UnknownEvaluation
from tawebeval.evaluation import Evaluation
from tawebeval.following import Readers
from tawebeval.form import EvaluationRequest
from tawebeval.identity import Identities
from tawebeval.retention import Retention


@attrs.frozen
class Upload:
    """A form that has arrived: its files lie below `directory`.

    `key` is the `Idempotency-Key`, if one was given, and `digest` tells forms apart.
    """

    request: EvaluationRequest
    directory: Path
    key: str | None = None
    digest: bytes = b""


@attrs.define(eq=False)
class Record:
    """What is noted about an evaluation.

    `number` tells in which order they were accepted, `asked` when a client last asked, in
    seconds of the clock.
    """

    evaluation: Evaluation
    upload: Upload
    caller: str
    number: int
    asked: float
    readers: Readers

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for it, or follows it, just now."""
        return bool(len(self.evaluation.changed) or len(self.readers.retention))


class Records:
    """The evaluations that are known. To each caller there are only its own."""

    def __init__(self, identities: Identities, clock: IReactorTime) -> None:
        self._identities = identities
        self._clock = clock
        # In the order in which clients last asked for them.
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._keys: dict[tuple[str, str], Record] = {}
        self._accepted = 0

    def __getitem__(self, identifier: str) -> Record:
        return self._records[identifier]

    def add(self, evaluation: Evaluation, upload: Upload, caller: str, capacity: int) -> None:
        """Note a new evaluation, of whose events `capacity` bytes may be kept."""
        self._accepted += 1
        record = self._records[evaluation.identifier] = Record(
            evaluation,
            upload,
            caller,
            self._accepted,
            self._clock.seconds(),
            Readers(evaluation, Retention(evaluation.ring, capacity)),
        )
        if upload.key is not None:
            self._keys[caller, upload.key] = record

    def keyed(self, key: str | None, caller: str) -> Record | None:
        """Return the record of an `Idempotency-Key`, if there is one."""
        return None if key is None else self._keys.get((caller, key))

    def find(self, identifier: str, caller: str) -> Record | None:
        """Return a record, None for one that is forgotten. Raises UnknownEvaluation."""
        if not self._identities.issued(identifier, caller):
            raise UnknownEvaluation
        record = self._records.get(identifier)
        if record is not None:
            self.touch(record)
        return record

    def touch(self, record: Record) -> None:
        """Note that a client asks for it, unless it is forgotten."""
        if record.evaluation.identifier in self._records:
            record.asked = self._clock.seconds()
            self._records.move_to_end(record.evaluation.identifier)

    def forget(self, identifier: str) -> None:
        """Drop a record; one that is not there is forgotten already."""
        record = self._records.pop(identifier, None)
        if record is not None and record.upload.key is not None:
            del self._keys[record.caller, record.upload.key]

    def abandoned(self, patience: float) -> list[Record]:
        """Return those for which nobody has asked in `patience` seconds, nor waits now."""
        latest = self._clock.seconds() - patience
        found = []
        for record in self._records.values():
            if record.asked > latest:
                break
            if not record.awaited:
                found.append(record)
        return found

    def of(self, caller: str, after: int, limit: int) -> list[Record]:
        """Return up to `limit` records of a caller in order, from that `number` on, without it."""
        records = self._records.values()
        return nsmallest(
            limit,
            (record for record in records if record.caller == caller and record.number > after),
            key=lambda record: record.number,
        )
