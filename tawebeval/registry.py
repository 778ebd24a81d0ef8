"""The evaluations that are known: admission, finding, reading, cancelling, forgetting."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.defer import TimeoutError as WaitedInVain
from twisted.logger import Logger

from tawebeval.admission import Queue
from tawebeval.errors import (
    Busy,
    EvaluationError,
    EvaluationGone,
    InvalidCursor,
    KeyReused,
    OverShare,
)
from tawebeval.evaluation import Evaluation, Surroundings
from tawebeval.following import Followers, Following
from tawebeval.form import MAX_SEED
from tawebeval.identity import Identities
from tawebeval.pages import DUMMY_END, Page, after_the_end, parse_cursor, place, read_page
from tawebeval.records import Record, Records, Upload
from tawebeval.status import status, summary
from tawebeval.workspace import Workspace, remove

_RETRY_AFTER = 5  # seconds
_FAREWELL = 5.0  # seconds in which streams can still take what they have not, at the end
_LISTED = 100  # evaluations in one answer
_NEXT_PAGE = 30.0  # seconds after a page for which its reader is expected to ask again

log = Logger()


@attrs.frozen
class Listing:
    """Some of a caller's evaluations, in the order in which they were accepted.

    `end` is the cursor after the last of them, None where no other follows now.
    """

    begin: str | None
    end: str | None
    data: list[dict[str, Any]]


class Registry:
    """All evaluations of one daemon, in directories below `root`.

    `caller` is always who asks. What another has begun is to it as if it had never been.
    """

    def __init__(
        self, surroundings: Surroundings, identities: Identities, queue: Queue, root: Path
    ) -> None:
        self._surroundings = surroundings
        self._configuration = surroundings.configuration
        self._clock = surroundings.clock
        self._identities = identities
        self._queue = queue
        self._root = root
        self._records = Records(identities, surroundings.clock)
        # Those of which a process or a directory may be left, also when they are forgotten.
        self._alive: dict[str, Evaluation] = {}
        self._closing = False
        self._followers = Followers()

    def check_admission(self, caller: str = "") -> None:
        """Raise Busy, or OverShare, where a new evaluation would not be accepted."""
        if self._closing:
            raise Busy("the service is about to stop", _RETRY_AFTER)
        if self._queue.share_used(caller):
            raise OverShare("as many of your evaluations wait as may; try later", _RETRY_AFTER)
        if self._queue.full(caller):
            raise Busy("as many evaluations are waiting as may; try again later", _RETRY_AFTER)

    def accept(self, upload: Upload, caller: str = "") -> str:
        """Begin an evaluation and return its identifier.

        With an `Idempotency-Key` that this caller has sent before, return what it was answered
        then. Raises KeyReused when that was for another form, Busy and OverShare.
        """
        known = self._records.keyed(upload.key, caller)
        if known is not None:
            if known.upload.digest != upload.digest:
                raise KeyReused("this Idempotency-Key was used before, with another form")
            self.discard(upload.directory)
            return known.evaluation.identifier
        self.check_admission(caller)
        identifier = self._identities.issue(caller)
        seed = upload.request.seed
        if seed is None:
            seed = int.from_bytes(self._surroundings.random(4), "big") & MAX_SEED
        evaluation = Evaluation(
            identifier=identifier,
            request=upload.request,
            seed=seed,
            upload=upload.directory,
            workspace=Workspace(self._root / directory_of(identifier)),
            surroundings=self._surroundings,
            caller=caller,
        )
        self._records.add(evaluation, upload, caller, self._configuration.buffers.evaluation)
        self._alive[identifier] = evaluation
        evaluation.begin(
            lambda: self._queue.enter(identifier, caller), lambda: self._queue.leave(identifier)
        )
        evaluation.over.wait().addCallback(lambda _: self._alive.pop(identifier))
        return identifier

    def discard(self, upload: Path) -> None:
        """Remove the directory of a form that no evaluation takes over."""
        Deferred.fromCoroutine(self._surroundings.threads.run(remove, upload)).addErrback(
            lambda failure: log.failure("an upload could not be removed", failure)
        )

    def _at(self, identifier: str, after: str | None, caller: str) -> Record | None:
        """Return the record in which to read after that cursor; None after the very end."""
        cursor = parse_cursor(after)
        record = self._records.find(identifier, caller)
        if record is None and cursor != DUMMY_END:
            raise EvaluationGone
        if cursor == DUMMY_END and (record is None or record.evaluation.ring.closed):
            return None
        return record

    def peek(self, identifier: str, after: str | None, caller: str = "") -> Page:
        """Return the page that begins at the cursor `after`; nothing is acknowledged.

        Raises the RequestErrors of the contract, section 3.
        """
        record = self._at(identifier, after, caller)
        if record is None:
            return after_the_end()
        limit = self._configuration.buffers.page
        return read_page(record.evaluation.ring, parse_cursor(after), limit)

    def page(self, identifier: str, after: str | None, caller: str = "", wait: float = 0) -> Page:
        """Return the page as `peek` does, acknowledging what is before it.

        In `wait` seconds the same reader will ask again if there is nothing.
        """
        page = self.peek(identifier, after, caller)
        if page.end is None:
            self._records.forget(identifier)
            return page
        record = self._records[identifier]
        now = self._clock.seconds()
        begin = place(record.evaluation.ring, page.begin)
        record.readers.acknowledge(begin, now, now + wait + _NEXT_PAGE)
        return page

    async def next_page(
        self, identifier: str, after: str | None, wait: float, caller: str = ""
    ) -> Page:
        """Return the page as `page` does, up to `wait` seconds later while it would be empty."""
        page = self.page(identifier, after, caller, wait)
        if page.events.count or page.final or wait <= 0:
            return page
        changed = self._records[identifier].evaluation.changed.wait()
        with suppress(WaitedInVain):
            await changed.addTimeout(wait, self._clock)
        return self.page(identifier, after, caller)

    def follow(
        self, identifier: str, after: str | None, caller: str = "", skip: int = 0
    ) -> Following | None:
        """Return what follows an evaluation, from `skip` events after the cursor `after`.

        After the very end there is nobody: as with pages that shows that everything has
        arrived, and the evaluation is forgotten. Raises as `peek` does.
        """
        record = self._at(identifier, after, caller)
        if record is None:
            self._records.forget(identifier)
            return None
        cursor = parse_cursor(after)
        if skip:
            cursor = str(int(cursor or 0) + skip)
        return Following(
            place(record.evaluation.ring, cursor),
            record.readers,
            self._followers,
            self._clock.seconds,
            lambda: self._records.touch(record),
        )

    def status(self, identifier: str, caller: str = "") -> dict[str, Any]:
        """Return the status document. Raises UnknownEvaluation, EvaluationGone."""
        record = self._records.find(identifier, caller)
        if record is None:
            raise EvaluationGone
        return status(record.evaluation, self._queue.place(identifier))

    def evaluations(self, after: str | None, caller: str = "") -> Listing:
        """Return the caller's evaluations that were accepted after that cursor, some at a time.

        Raises InvalidCursor.
        """
        cursor = parse_cursor(after)
        if cursor == DUMMY_END:
            raise InvalidCursor(f"after: {after!r} is no cursor of this list")
        records = self._records.of(caller, int(cursor or 0), _LISTED + 1)
        return Listing(
            cursor,
            str(records[_LISTED - 1].number) if len(records) > _LISTED else None,
            [summary(record.evaluation) for record in records[:_LISTED]],
        )

    async def cancel(self, identifier: str, caller: str = "") -> None:
        """End an evaluation; return when nothing of it is left but its events.

        Raises UnknownEvaluation. One that has ended is left as it is.
        """
        record = self._records.find(identifier, caller)
        evaluation = self._alive.get(identifier) if record is None else record.evaluation
        if evaluation is not None:
            evaluation.stop(EvaluationError("cancelled", "the evaluation was cancelled"))
            await evaluation.over.wait()

    def expire(self) -> None:
        """Kill and forget the evaluations for which nobody has asked for too long."""
        for record in self._records.abandoned(self._configuration.evaluations.abandon_after):
            identifier = record.evaluation.identifier
            log.info("{id}: nobody asks for it any more", id=identifier)
            record.evaluation.stop(EvaluationError("lost", "nobody asked for the events"))
            self._records.forget(identifier)

    async def close(self) -> bool:
        """Accept nothing more, end everything, and return when nothing is left.

        Streams have some seconds to take the end. Tell whether there was anything to end.
        """
        self._closing = True
        over = [evaluation.over.wait() for evaluation in self._alive.values()]
        for evaluation in list(self._alive.values()):
            evaluation.stop(EvaluationError("shutdown", "the service was stopped"))
        await gatherResults(over)
        followed = bool(self._followers)
        with suppress(WaitedInVain):
            left = Deferred.fromCoroutine(self._followers.all_left())
            await left.addTimeout(_FAREWELL, self._clock)
        return bool(over) or followed


def directory_of(identifier: str) -> str:
    """Return the name of an evaluation's directory.

    Evaluators can read it among their mounts; the identifier gives rights to who knows it.
    """
    return hashlib.sha256(identifier.encode()).hexdigest()[:32]
