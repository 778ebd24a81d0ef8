"""The evaluations that are known: admission, finding, reading, cancelling, forgetting."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
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
    KeyReused,
    OverShare,
    UnknownEvaluation,
)
from tawebeval.evaluation import Evaluation, Surroundings
from tawebeval.form import MAX_SEED, EvaluationRequest
from tawebeval.identity import Identities
from tawebeval.pages import DUMMY_END, Page, after_the_end, parse_cursor, read_page
from tawebeval.status import status
from tawebeval.workspace import Workspace, remove

_RETRY_AFTER = 5  # seconds

log = Logger()


@attrs.frozen
class Upload:
    """A form that has arrived: its files lie below `directory`.

    `key` is the `Idempotency-Key`, if one was given, and `digest` tells forms apart.
    """

    request: EvaluationRequest
    directory: Path
    key: str | None = None
    digest: bytes = b""


@attrs.define
class _Record:
    """What the registry notes about an evaluation; `asked` is when a client last asked."""

    evaluation: Evaluation
    upload: Upload
    asked: float
    caller: str


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
        # In the order in which clients last asked for them.
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._keys: dict[tuple[str, str], str] = {}
        # Those of which a process or a directory may be left, also when they are forgotten.
        self._alive: dict[str, Evaluation] = {}
        self._closing = False

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
        if upload.key is not None and (caller, upload.key) in self._keys:
            identifier = self._keys[caller, upload.key]
            if self._records[identifier].upload.digest != upload.digest:
                raise KeyReused("this Idempotency-Key was used before, with another form")
            self.discard(upload.directory)
            return identifier
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
        self._records[identifier] = _Record(evaluation, upload, self._clock.seconds(), caller)
        if upload.key is not None:
            self._keys[caller, upload.key] = identifier
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

    def _find(self, identifier: str, caller: str) -> Evaluation | None:
        """Return an evaluation, None for one that is forgotten. Raises UnknownEvaluation."""
        if not self._identities.issued(identifier, caller):
            raise UnknownEvaluation
        record = self._records.get(identifier)
        if record is None:
            return None
        record.asked = self._clock.seconds()
        self._records.move_to_end(identifier)
        return record.evaluation

    def _forget(self, identifier: str) -> None:
        record = self._records.pop(identifier)
        if record.upload.key is not None:
            del self._keys[record.caller, record.upload.key]

    def page(self, identifier: str, after: str | None, caller: str = "") -> Page:
        """Return the page that begins at the cursor `after`, acknowledging what is before it.

        Raises the RequestErrors of the contract, section 3.
        """
        cursor = parse_cursor(after)
        evaluation = self._find(identifier, caller)
        if evaluation is None:
            if cursor == DUMMY_END:
                return after_the_end()
            raise EvaluationGone
        if cursor == DUMMY_END and evaluation.ring.closed:
            self._forget(identifier)
            return after_the_end()
        page = read_page(evaluation.ring, cursor, self._configuration.buffers.page)
        evaluation.acknowledged()
        return page

    async def next_page(
        self, identifier: str, after: str | None, wait: float, caller: str = ""
    ) -> Page:
        """Return the page as `page` does, up to `wait` seconds later while it would be empty."""
        page = self.page(identifier, after, caller)
        if page.events.count or page.final or wait <= 0:
            return page
        changed = self._records[identifier].evaluation.changed.wait()
        with suppress(WaitedInVain):
            await changed.addTimeout(wait, self._clock)
        return self.page(identifier, after, caller)

    def status(self, identifier: str, caller: str = "") -> dict[str, Any]:
        """Return the status document. Raises UnknownEvaluation, EvaluationGone."""
        evaluation = self._find(identifier, caller)
        if evaluation is None:
            raise EvaluationGone
        return status(evaluation, self._queue.place(identifier))

    async def cancel(self, identifier: str, caller: str = "") -> None:
        """End an evaluation; return when nothing of it is left but its events.

        Raises UnknownEvaluation. One that has ended is left as it is.
        """
        evaluation = self._find(identifier, caller) or self._alive.get(identifier)
        if evaluation is not None:
            evaluation.stop(EvaluationError("cancelled", "the evaluation was cancelled"))
            await evaluation.over.wait()

    def expire(self) -> None:
        """Kill and forget the evaluations for which nobody has asked for too long."""
        latest = self._clock.seconds() - self._configuration.evaluations.abandon_after
        for identifier, record in list(self._records.items()):
            if record.asked > latest:
                break
            if len(record.evaluation.changed):
                continue  # somebody is waiting for it just now
            log.info("{id}: nobody asks for it any more", id=identifier)
            record.evaluation.stop(EvaluationError("lost", "nobody asked for the events"))
            self._forget(identifier)

    async def close(self) -> bool:
        """Accept nothing more, end everything, and return when nothing is left.

        Tell whether there was anything to end.
        """
        self._closing = True
        over = [evaluation.over.wait() for evaluation in self._alive.values()]
        for evaluation in list(self._alive.values()):
            evaluation.stop(EvaluationError("shutdown", "the service was stopped"))
        await gatherResults(over)
        return bool(over)


def directory_of(identifier: str) -> str:
    """Return the name of an evaluation's directory.

    Evaluators can read it among their mounts; the identifier gives rights to who knows it.
    """
    return hashlib.sha256(identifier.encode()).hexdigest()[:32]
