"""Whether one more evaluation is accepted, or begins: what may be unread and what may wait."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import orjson
from twisted.internet.defer import TimeoutError as WaitedInVain
from twisted.logger import Logger

from tawebeval.core.budget import Spool
from tawebeval.core.form import draw_seed
from tawebeval.core.identifiers import Identifiers
from tawebeval.core.pages import DUMMY_END, EventPage, end_page, locate, parse_cursor, read_page
from tawebeval.core.states import State
from tawebeval.core.tokens import ANONYMOUS
from tawebeval.deferreds import FairQueue, in_background
from tawebeval.errors import (
    Busy,
    EvaluationExpired,
    EvaluationFailure,
    InvalidCursor,
    KeyReused,
    OverShare,
    Stopping,
)
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.evaluations.records import Record, Records, Subscription, Subscriptions, Upload
from tawebeval.evaluations.shutdown import Drain
from tawebeval.evaluations.status import shown_time, status, summary
from tawebeval.linux.filetree import remove
from tawebeval.sandbox.workspace import Workspace, directory_of
from tawebeval.webhooks.callback import Callback
from tawebeval.webhooks.deliveries import Callbacks

_RETRY_AFTER = 5  # seconds, where a place in the queue is missing
_RETRY_LATER = 30  # seconds, where readers are behind


class AdmissionControl:
    """Knows what there is of everything, and how much there may be.

    What is a caller's own fault is said first, for that the caller can mend. `queue` has these
    `bounds`, and lets in whom `admits` does.
    """

    def __init__(
        self, surroundings: EvaluationContext, records: Records, bounds: tuple[int, int, int, int]
    ) -> None:
        self._surroundings = surroundings
        self._records = records
        self.queue = FairQueue(*bounds, admits=self.admits)

    def check(self, caller: str) -> None:
        """Raise OverShare where the caller has its share of something, Busy where all is full.

        What streams have sent to the end, and is kept only in case that some of it was lost, is
        forgotten before anybody is refused for it.
        """
        while self._kept_share_used(caller) and self._records.forget_sent(caller):
            pass
        while self._too_much_kept() and self._records.forget_sent():
            pass
        if self._kept_share_used(caller):
            raise OverShare(
                "as many of your evaluations have ended and are not read to the end as may: read"
                " some, or discard them by asking for their events with after=end",
                _RETRY_LATER,
            )
        if not self.admits(caller):
            raise OverShare(
                "the events of your evaluations take as much memory as they may: read some, or"
                " discard those that have ended by asking for their events with after=end",
                _RETRY_LATER,
            )
        if self._too_much_kept():
            raise Busy("too much has not been read yet; try again later", _RETRY_LATER)
        if self.queue.share_used(caller):
            raise OverShare("as many of your evaluations wait as may; try later", _RETRY_AFTER)
        if self.queue.is_full(caller):
            raise Busy("as many evaluations are waiting as may; try again later", _RETRY_AFTER)

    def admits(self, caller: str) -> bool:
        """Whether what a caller has waiting may begin: not while it has its share of the memory.

        The queue goes on when the caller has less again.
        """
        budget = self._surroundings.budget
        while budget.share_used(caller) and self._records.forget_sent(caller):
            pass
        if not budget.share_used(caller):
            return True
        budget.call_on_relief(caller, self.queue.dispatch)
        return False

    def _too_much_kept(self) -> bool:
        return (
            self._records.kept >= self._surroundings.configuration.evaluations.kept
            or self._surroundings.budget.is_spent
        )

    def _kept_share_used(self, caller: str) -> bool:
        configuration = self._surroundings.configuration
        share = configuration.callers.kept
        if caller == ANONYMOUS or not 0 < share < configuration.evaluations.kept:
            return False
        return self._records.kept_of(caller) >= share


_MOST = 100  # evaluations in one answer
_MARK = 5  # bytes
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")


@attrs.frozen
class Listing:
    """Some of a caller's evaluations, in the order in which they were accepted.

    `end` is the cursor after the last of them, None where no other follows now.
    """

    begin: str | None
    end: str | None
    data: list[dict[str, Any]]


@attrs.frozen
class Listings:
    """What one daemon lists from its start to its end; `random` is as `os.urandom`."""

    _records: Records
    _random: Callable[[int], bytes]
    _mark: str = attrs.field(init=False)

    @_mark.default
    def _drawn(self) -> str:
        return self._random(_MARK).hex()

    def evaluations(self, after: str | None, caller: str) -> Listing:
        """Return a caller's evaluations that come after that cursor; an empty one is as none.

        Raises InvalidCursor for one that was not given out here.
        """
        found = self._records.of(caller, self._number(after) if after else 0, _MOST + 1)
        return Listing(
            after or None,
            f"{self._mark}-{found[_MOST - 1].number}" if len(found) > _MOST else None,
            [summary(record.evaluation) for record in found[:_MOST]],
        )

    def _number(self, cursor: str) -> int:
        mark, _, number = cursor.partition("-")
        if (
            mark != self._mark
            or not _NUMBER.fullmatch(number)
            or int(number) > self._records.accepted
        ):
            raise InvalidCursor(
                f"after: {cursor[:80]!r} is no cursor of this list that the daemon has given out"
                " since its start; begin again without `after`"
            )
        return int(number)


@attrs.frozen
class EndCallbacks:
    """Tells by callbacks."""

    _callbacks: Callbacks

    def expect(self, url: str | None, caller: str) -> Callback | None:
        """Return the callback that a form asks for, if it does. Raises InvalidField."""
        return None if url is None else self._callbacks.expect(url, caller)

    def tell(self, evaluation: Evaluation) -> None:
        """Tell, if it was asked for, that nothing is left of an evaluation but its events."""
        callback = evaluation.callback
        if callback is not None:
            self._callbacks.send(
                callback, evaluation.name, lambda: orjson.dumps(status(evaluation, None))
            )


_NEXT_PAGE = 30.0  # seconds after an answer for which a reader of pages is expected to ask again

log = Logger()


class Registry:
    """All evaluations of one daemon, in directories below `root`.

    `caller` is always who asks. What another has begun is to it as if it had never been. `bounds`
    are those of its `queue`: how many run and wait, of all and of one caller (`admission.Queue`).
    """

    def __init__(
        self,
        surroundings: EvaluationContext,
        identities: Identifiers,
        bounds: tuple[int, int, int, int],
        root: Path,
        telling: EndCallbacks,
    ) -> None:
        self._surroundings = surroundings
        self._clock = surroundings.clock
        self._started = shown_time(surroundings.time())
        self._identities = identities
        self._root = root
        self._telling = telling
        self._records = Records(identities, surroundings.clock)
        self._lists = Listings(self._records, surroundings.random)
        self._acceptance = AdmissionControl(surroundings, self._records, bounds)
        self.queue = self._acceptance.queue
        # Those of which a process or a directory may be left, also when they are forgotten.
        self._alive: dict[str, Record] = {}
        self.followers = Subscriptions()
        self._closing = Drain(self._alive, self._records, self.followers, self._clock)
        self.spool = Spool(surroundings.configuration.limits.uploads)

    def check_open(self) -> None:
        """Raise Stopping where the daemon is about to stop."""
        if self._closing.begun:
            raise Stopping

    def check_admission(self, caller: str = "") -> None:
        """Raise Busy, or OverShare, where a new evaluation would not be accepted."""
        self.check_open()
        self._acceptance.check(caller)

    def accept(self, upload: Upload, caller: str = "") -> str:
        """Begin an evaluation and return its identifier.

        With an `Idempotency-Key` that this caller has sent before, return what it was answered
        then. Raises KeyReused when that was for another form, Busy, OverShare, and InvalidField
        where no callback is to be had.
        """
        known = self._records.keyed(upload.key, caller)
        if known is not None:
            if known.digest != upload.digest:
                raise KeyReused("this Idempotency-Key was used before, with another form")
            self.discard(upload.directory, upload.size)
            return known.evaluation.identifier
        callback = self._telling.expect(upload.request.callback_url, caller)
        self.check_admission(caller)
        identifier = self._identities.issue(caller)
        seed = upload.request.seed
        if seed is None:
            seed = draw_seed(self._surroundings.random)
        evaluation = Evaluation(
            identifier=identifier,
            request=upload.request,
            seed=seed,
            upload=upload.directory,
            workspace=Workspace(self._root / directory_of(identifier)),
            surroundings=self._surroundings,
            caller=caller,
            callback=callback,
            on_full=self._make_room,
        )
        self._alive[identifier] = self._records.add(evaluation, upload, caller)
        evaluation.over.add_callback(self._over)
        evaluation.begin(self.queue)
        return identifier

    def _make_room(self, evaluation: Evaluation) -> None:
        """Take that the ring of an evaluation has become full."""
        self._records.make_room(self._alive[evaluation.identifier])

    def _over(self, evaluation: Evaluation) -> None:
        record = self._alive[evaluation.identifier]
        try:
            # Before it is forgotten, if it is already, for that changes its state.
            self._telling.tell(evaluation)
        finally:
            self._records.end(record)
            del self._alive[evaluation.identifier]
            self.spool.give_back(record.size)
            self.queue.dispatch()
            self._closing.progress()

    def discard(self, upload: Path, size: int) -> None:
        """Remove the directory of a form that no evaluation takes over, and of that size."""
        attempt = self._surroundings.arrears.attempt(
            "the removal of an upload",
            remove,
            upload,
            made=lambda: self.spool.give_back(size),
        )
        in_background(attempt, log, "an upload could not be removed")

    def _at(self, identifier: str, after: str | None, caller: str) -> Record | None:
        """Return the record in which to read after that cursor; None after the very end."""
        cursor = parse_cursor(after)
        record = self._records.find(identifier, caller)
        if record is None and cursor != DUMMY_END:
            raise EvaluationExpired(self._started)
        if cursor == DUMMY_END and (record is None or record.evaluation.ring.closed):
            return None
        return record

    def peek(
        self, identifier: str, after: str | None, caller: str = "", limit: int | None = None
    ) -> EventPage:
        """Return the page that begins at the cursor `after`; nothing is acknowledged.

        Its events have up to `limit` bytes, and up to `buffers.page`, but for the first of them.
        Raises the RequestErrors of the contract, section 3.
        """
        record = self._at(identifier, after, caller)
        return end_page() if record is None else self._read(record, after, limit)

    def _read(self, record: Record, after: str | None, limit: int | None) -> EventPage:
        most = self._surroundings.configuration.buffers.page
        size = most if limit is None else min(limit, most)
        return read_page(record.evaluation.ring, after or None, size)

    def page(
        self, identifier: str, after: str | None, caller: str = "", limit: int | None = None
    ) -> EventPage:
        """Return the page as `peek` does, acknowledging what is before it."""
        record = self._at(identifier, after, caller)
        if record is None:
            self._drained(identifier)
            return end_page()
        page = self._read(record, after, limit)
        begin = locate(record.evaluation.ring, page.begin)
        self._closing.note_reader(identifier)
        self._expect_next_page(record)
        record.readers.acknowledge(begin)
        return page

    async def next_page(
        self,
        identifier: str,
        after: str | None,
        wait: float,
        caller: str = "",
        limit: int | None = None,
    ) -> EventPage:
        """Return the page in which `page` has just found no news, with news or `wait` seconds on.

        Raises as `page` does.
        """
        record = self._records[identifier]
        try:
            with suppress(WaitedInVain):
                await record.evaluation.changed.wait().addTimeout(wait, self._clock)
        finally:  # also when the client has gone: it may ask again
            self._expect_next_page(record)
        return self.page(identifier, after, caller, limit)

    def _expect_next_page(self, record: Record) -> None:
        record.readers.paged = self._clock.seconds() + _NEXT_PAGE

    def follow(
        self, identifier: str, after: str | None, caller: str = "", skip: int = 0
    ) -> Subscription | None:
        """Return what follows an evaluation, from `skip` events after the cursor `after`.

        After the very end there is nobody: as with pages that shows that everything has
        arrived, and the evaluation is forgotten. Raises as `peek` does.
        """
        record = self._at(identifier, after, caller)
        if record is None:
            self._drained(identifier)
            return None
        return Subscription(
            locate(record.evaluation.ring, after or None, skip),
            record.readers,
            self.followers,
            lambda: self._left(record),
        )

    def can_follow(
        self, identifier: str, after: str | None, caller: str = "", skip: int = 0
    ) -> bool:
        """Tell whether `follow` would return anybody; nothing is forgotten. Raises as it does."""
        record = self._at(identifier, after, caller)
        if record is not None:
            locate(record.evaluation.ring, after or None, skip)
        return record is not None

    def _left(self, record: Record) -> None:
        """Take that a stream has left."""
        self._records.leave(record)
        self.queue.dispatch()  # where what it has sent was in somebody's way
        self._closing.progress()

    def _drained(self, identifier: str) -> None:
        """Forget what was read to its end."""
        self._records.forget(identifier, State.DRAINED)
        self._closing.progress()

    def status(self, identifier: str, caller: str = "") -> dict[str, Any]:
        """Return the status document. Raises UnknownEvaluation, EvaluationGone.

        Who only looks at it keeps no evaluation that waits for somebody to read its events.
        """
        record = self._records.find(identifier, caller, reads=False)
        if record is None:
            raise EvaluationExpired(self._started)
        return status(record.evaluation, self.queue.position(identifier))

    def evaluations(self, after: str | None, caller: str = "") -> Listing:
        """Return the caller's evaluations that were accepted after that cursor, some at a time.

        Raises InvalidCursor.
        """
        return self._lists.evaluations(after, caller)

    async def cancel(self, identifier: str, caller: str = "") -> None:
        """End an evaluation; return when nothing of it is left but its events.

        Raises UnknownEvaluation. One that has ended is left as it is.
        """
        record = self._records.find(identifier, caller, reads=False)
        record = record or self._alive.get(identifier)
        if record is not None:
            record.evaluation.stop(EvaluationFailure("cancelled", "the evaluation was cancelled"))
            await record.evaluation.over.wait()

    def expire(self) -> None:
        """Kill those for which nobody has asked for too long; forget them, and what is unread.

        Those that wait too long for their readers end. To be called about once a second.
        """
        settings = self._surroundings.configuration.evaluations
        for record in self._records.abandoned(settings.abandon_after):
            record.evaluation.abandon()
            self._records.forget(record.evaluation.identifier, State.EXPIRED)
        for record in self._records.unread(settings.retain):
            self._records.forget(record.evaluation.identifier, State.EXPIRED)
        for identifier, wanted in self.queue.holders():
            record = self._alive[identifier]
            record.evaluation.check_readers(record.readers.furthest, wanted=wanted)
        self.queue.dispatch()  # where pages were read until now

    def stop_now(self) -> None:
        """Let nothing run any longer, now that everything is to end."""
        self._closing.stop_now()

    async def close(self, drain: float = 0) -> bool:
        """Accept nothing more, end everything, and return when nothing is left.

        What runs has `drain` seconds to end by itself, and readers have some to take the ends.
        Tell whether there was anything to end, or anybody.
        """
        return await self._closing.close(drain)
