"""What clients read of evaluations: events by pages and streams, status documents, lists, files.

A request for the page after a cursor acknowledges the events before the cursor. A stream and an
observer (a request by a link, or with a token that only reads) acknowledge nothing: the client of a
stream that was cut resumes at any cursor that no acknowledgement has passed.

What the registry has forgotten is read in the archive, if it is there. Reading an archived
evaluation changes nothing: any cursor can be read, any number of times.
"""

from __future__ import annotations

import errno
import os
import re
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime
from heapq import nsmallest
from itertools import islice, pairwise
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as WaitTimedOut
from twisted.internet.interfaces import IReactorTime

from tawebeval.archive.archive import ArchivedEvents
from tawebeval.config import LimitSettings
from tawebeval.core.evaluations import (
    CLIENT_VISIBLE_STATES,
    EvaluationState,
    ListEntry,
    ListPage,
    encode_json_without_slack,
    make_invalid_cursor_error,
    parse_list_cursor,
)
from tawebeval.core.events import (
    ALL_RECEIVED_CURSOR,
    EVENTS_LOST_ERROR,
    EventBatch,
    EventPage,
    EventRing,
    EventSegment,
    EventsEvicted,
    make_empty_last_page,
    parse_cursor,
    resolve_cursor,
)
from tawebeval.core.form import LABEL_FIELD_PATTERN, LIMIT_UNITS, format_label_name_error
from tawebeval.core.tokens import PROBLEM_NAME_PATTERN
from tawebeval.errors import EvaluationExpired, MalformedRequest, ServerBusy, ServerStopping
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.eventlog import EvaluationEvents
from tawebeval.evaluations.lifecycle import Evaluation, EvaluationIndex
from tawebeval.evaluations.store import (
    EvaluationDetails,
    EvaluationStore,
    Standing,
    format_rfc3339_time,
)
from tawebeval.linux.filetree import open_regular_file
from tawebeval.sandbox.base import Environment


@attrs.define(eq=False)
class Subscription:
    """A stream's subscription to the events of an evaluation, which reads within `reader_context`.

    `last_read_cursor` is the cursor after the last event read. Events have their times if
    `includes_times`.
    """

    last_read_cursor: int
    _events: EvaluationEvents | ArchivedEvents
    reader_context: AbstractContextManager[object] = attrs.field(factory=nullcontext)
    includes_times: bool = False
    _has_read_end: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether all events were read, and no event will follow."""
        return self._has_read_end or self._events.is_after_all_events(self.last_read_cursor)

    async def read_events(self, max_bytes: int) -> EventBatch:
        """Return the next events, which may have to wait for a thread.

        No event means that none has come yet. Raises: DiscardedCursor, ServerBusy.
        """
        batch = await self._events.read(
            self.last_read_cursor, max_bytes, includes_times=self.includes_times
        )
        self.last_read_cursor += batch.count
        if batch is EVENTS_LOST_ERROR:
            self._has_read_end = True
            self.last_read_cursor = max(self.last_read_cursor, self._events.end_cursor)
        elif (
            batch.count
            and self._events.has_ended
            and self.last_read_cursor == self._events.end_cursor
        ):
            self._has_read_end = True
        return batch

    def wait_for_events(self, seconds: float, clock: IReactorTime) -> Deferred[bool]:
        """Return a Deferred that fires with True at the next events, or at the end.

        With False after `seconds` seconds.
        """
        return self._events.reader_wakeup_condition.wait_up_to(seconds, clock)


_MAX_WAIT, _RETRY_AFTER = 5, 5  # seconds


@attrs.define(eq=False)
class ArchiveReader:
    """Reader of archived evaluations. The methods raise EvaluationExpired for what is not archived.

    They wait some seconds for one of `evaluations_to_archive`: its client has received all events,
    or it is expired, and the archive has yet to take it. They raise ServerBusy and
    CallerQuotaExceeded as `EvaluationArchive.find_events`.
    """

    _context: EvaluationContext
    evaluations_to_archive: dict[str, Evaluation] = attrs.field(factory=dict, init=False)

    @property
    def is_enabled(self) -> bool:
        """Whether there is an archive."""
        return self._context.archive is not None

    async def _wait_until_archived(self, identifier: str, caller: str) -> None:
        evaluation = self.evaluations_to_archive.get(identifier)
        if evaluation is not None and evaluation.details.caller == caller:
            try:
                await evaluation.archive_completion.wait().addTimeout(
                    _MAX_WAIT, self._context.clock
                )
            except WaitTimedOut:
                what = "the evaluation is not archived yet; try again"
                raise ServerBusy(what, _RETRY_AFTER) from None

    async def _find_events(self, identifier: str, caller: str) -> ArchivedEvents:
        await self._wait_until_archived(identifier, caller)
        found, archive = None, self._context.archive
        if archive is not None:
            found = await archive.find_events(identifier, caller)
        if found is None:
            raise EvaluationExpired
        return found

    async def read_page(
        self,
        identifier: str,
        after_cursor: str | None,
        caller: str,
        max_bytes: int,
        includes_times: bool,
    ) -> EventPage:
        """Return the page after a cursor.

        `max_bytes` is in bytes of events, with their times. Raises: InvalidCursor.
        """
        cursor = parse_cursor(after_cursor)
        events = await self._find_events(identifier, caller)
        if cursor == ALL_RECEIVED_CURSOR:
            return make_empty_last_page()
        begin = resolve_cursor(EventRing(end_cursor=events.end_cursor), cursor)
        batch = await events.read(begin, max_bytes, includes_times=includes_times)
        end = begin + batch.count
        return EventPage(
            cursor, ALL_RECEIVED_CURSOR if end == events.end_cursor else str(end), batch
        )

    async def read_status(self, identifier: str, caller: str) -> dict[str, Any]:
        """Return the status document."""
        await self._wait_until_archived(identifier, caller)
        row, store = None, self._context.store
        if self.is_enabled and store is not None:
            row = await store.find_archived(identifier)
        if row is None or row.caller != caller:
            raise EvaluationExpired
        return build_archived_status_document(row)

    async def subscribe(
        self, identifier: str, after_cursor: str | None, caller: str, skip_count: int
    ) -> Subscription:
        """Return a subscription. Raises: InvalidCursor; as `ArchivedEvents.read`."""
        cursor = parse_cursor(after_cursor)
        events = await self._find_events(identifier, caller)
        begin = resolve_cursor(EventRing(end_cursor=events.end_cursor), cursor, skip_count)
        await events.read(begin, 1)  # a stream that has begun could only be cut
        return Subscription(begin, events)


_NEXT_PAGE = 30.0  # seconds after a page in which its reader is expected to ask for the next


@attrs.frozen
class EventReader:
    """Requests for the events of all evaluations in memory.

    - `on_reader_left(evaluation)`: called when a stream or the wait of a poll has ended that has
      read an evaluation which is forgotten.
    - `subscriptions`: those of the streams at work.
    - `archive_reader`: where `read_page` and `open_subscription` find what is forgotten.

    The parameter `caller` of the methods is the name of the caller that makes the request. An
    evaluation of another caller raises the same error as an unknown identifier: EvaluationNotFound.
    """

    _records: EvaluationIndex
    _context: EvaluationContext
    _on_reader_left: Callable[[Evaluation], object]
    archive_reader: ArchiveReader
    subscriptions: set[Subscription] = attrs.field(factory=set, init=False)

    def read_page_now(
        self,
        identifier: str,
        after_cursor: str | None,
        caller: str = "",
        max_bytes: int | None = None,
        *,
        includes_times: bool = False,
        is_observer: bool = False,
    ) -> EventPage:
        """Return the page that begins at `after_cursor`; acknowledge the events before it.

        A request that `is_observer` acknowledges nothing, and keeps the evaluation as a look at the
        status does. The page has at most `max_bytes` bytes of events, at most those of a page, and
        at least one event if there are any. If `includes_times`, each event has its time,
        on top of the limit.

        Raises: InvalidCursor, DiscardedCursor, EvaluationNotFound, EvaluationExpired,
        ServerStopping; and EventsEvicted, if `read_page` has to wait for the events.
        """
        evaluation = self._find(identifier, after_cursor, caller, is_observer=is_observer)
        if evaluation is None:
            return self._end_reading(identifier, is_observer=is_observer)
        most = self._compute_max_page_bytes(max_bytes)
        return self._read_now(evaluation, after_cursor, most, includes_times, is_observer)

    def _read_now(
        self,
        evaluation: Evaluation,
        after_cursor: str | None,
        max_bytes: int,
        includes_times: bool,
        is_observer: bool,
    ) -> EventPage:
        begin = evaluation.events.resolve_cursor(after_cursor)
        batch = evaluation.events.read_now(begin, max_bytes, includes_times=includes_times)
        page = evaluation.events.make_page(after_cursor or None, batch)
        if not is_observer:
            self._expect_next_page(evaluation)
            evaluation.events.acknowledge(int(after_cursor or 0))
        return page

    async def read_page(
        self,
        identifier: str,
        after_cursor: str | None,
        caller: str = "",
        max_bytes: int | None = None,
        *,
        includes_times: bool = False,
        is_observer: bool = False,
        wait_seconds: float = 0,
    ) -> EventPage:
        """Return the page of `read_page_now`; load its events if they have left memory.

        If there are no new events, wait for them up to `wait_seconds`. The page of an archived
        evaluation is returned at once. Raises: as `read_page_now` without EventsEvicted;
        ServerBusy.
        """
        most = self._compute_max_page_bytes(max_bytes)
        archived = identifier, after_cursor, caller, most, includes_times
        try:
            evaluation = self._find(identifier, after_cursor, caller, is_observer=is_observer)
        except EvaluationExpired:
            return await self.archive_reader.read_page(*archived)
        if evaluation is None:
            return self._end_reading(identifier, is_observer=is_observer)
        while evaluation.forgotten_state is None:
            evicted: EventSegment | None = None
            try:
                page = self._read_now(evaluation, after_cursor, most, includes_times, is_observer)
            except EventsEvicted as error:
                evicted = error.segment
            else:
                if page.has_events_or_is_last or not wait_seconds:
                    return page
            try:
                with self._count_reader(evaluation, is_observer=is_observer):
                    if evicted is not None:
                        await evaluation.events.load_segment(evicted)
                        continue
                    change, clock = evaluation.events.reader_wakeup_condition, self._context.clock
                    await change.wait_up_to(wait_seconds, clock)
                    wait_seconds = 0
            finally:
                if not is_observer:
                    self._expect_next_page(evaluation)
        return await self.archive_reader.read_page(*archived)  # it was forgotten meanwhile

    @contextmanager
    def _count_reader(self, evaluation: Evaluation, *, is_observer: bool) -> Iterator[None]:
        """Keep an evaluation while a poll waits or a stream is at work, if that is to keep it."""
        events = evaluation.events
        events.read_only_client_count += is_observer
        events.reader_count += not is_observer
        try:
            yield
        finally:  # also when the client has gone: a reader may ask again
            events.read_only_client_count -= is_observer
            events.reader_count -= not is_observer
            if not (is_observer and evaluation.details.state.has_ended):
                evaluation.last_request_time = self._context.clock.seconds()
            if events.was_streamed_completely and not is_observer:
                self._records.note_streamed(evaluation)
            if evaluation.forgotten_state is not None:
                self._on_reader_left(evaluation)

    @contextmanager
    def _follow(
        self, evaluation: Evaluation, subscription: Subscription, *, is_observer: bool
    ) -> Iterator[None]:
        with self._count_reader(evaluation, is_observer=is_observer):
            self.subscriptions.add(subscription)
            try:
                yield
            finally:
                self.subscriptions.remove(subscription)
            if subscription.has_ended and not is_observer:
                evaluation.events.was_streamed_completely = True

    def subscribe(
        self,
        identifier: str,
        after_cursor: str | None,
        caller: str = "",
        skip_count: int = 0,
        *,
        is_observer: bool = False,
    ) -> Subscription | None:
        """Return a subscription to the events from `skip_count` events after `after_cursor` on.

        The answer to the cursor of the very end is None. A request that is not an observer's
        thereby acknowledges all events, as with pages: the evaluation is forgotten. Raises: as
        `read_page`.
        """
        evaluation = self._find(identifier, after_cursor, caller, is_observer=is_observer)
        if evaluation is None:
            self._end_reading(identifier, is_observer=is_observer)
            return None
        begin = evaluation.events.resolve_cursor(after_cursor, skip_count)
        subscription = Subscription(begin, evaluation.events)
        subscription.reader_context = self._follow(
            evaluation, subscription, is_observer=is_observer
        )
        return subscription

    async def open_subscription(
        self,
        identifier: str,
        after_cursor: str | None,
        caller: str,
        skip_count: int,
        *,
        is_observer: bool = False,
    ) -> Subscription | None:
        """Return a subscription as `subscribe`, also to an archived evaluation."""
        try:
            return self.subscribe(
                identifier, after_cursor, caller, skip_count, is_observer=is_observer
            )
        except EvaluationExpired:
            return await self.archive_reader.subscribe(identifier, after_cursor, caller, skip_count)

    def _compute_max_page_bytes(self, max_bytes: int | None) -> int:
        """Return the bytes of events that a page may have if a client asks for `max_bytes`."""
        most = self._context.configuration.buffers.max_page_bytes
        return most if max_bytes is None else min(max_bytes, most)

    def _find(
        self, identifier: str, after_cursor: str | None, caller: str, *, is_observer: bool
    ) -> Evaluation | None:
        """Return the evaluation in which to read after a cursor; None after the very end."""
        cursor = parse_cursor(after_cursor)
        evaluation = self._records.find_evaluation(identifier, caller, is_reader=not is_observer)
        is_end = cursor == ALL_RECEIVED_CURSOR
        if evaluation is None and not is_end:
            raise EvaluationExpired
        return (
            None
            if is_end and (evaluation is None or evaluation.events.has_readable_end)
            else evaluation
        )

    def _end_reading(self, identifier: str, *, is_observer: bool) -> EventPage:
        """Answer the cursor of the very end; forget an evaluation that a reader has read to it.

        Raises: ServerStopping, if the evaluation is left to the next process, which forgets it.
        """
        if not is_observer and identifier in self._records:
            if self._records[identifier].handed_to_next_daemon_at is not None:
                raise ServerStopping
            if self._records[identifier].events.event_log.has_ended:  # else it was read to a damage
                self._records.forget_evaluation(identifier, EvaluationState.DRAINED)
        return make_empty_last_page()

    def _expect_next_page(self, evaluation: Evaluation) -> None:
        evaluation.events.next_page_deadline = self._context.clock.seconds() + _NEXT_PAGE


def build_status_document(evaluation: Evaluation, queue_position: int | None) -> dict[str, Any]:
    """Return the status document of an evaluation as a JSON object; null is for unknown values.

    `queue_position` is the number of evaluations before this one in the queue, None outside of it.
    """
    details, event_log = evaluation.client_visible_details, evaluation.events.event_log
    document = _build(details, evaluation.limits)
    if details.state is EvaluationState.QUEUED:
        document["queue_place"] = queue_position
    document["build"] = evaluation.build_state
    if evaluation.run is not None:
        document["stderr"] = evaluation.run.stderr_text
    document["buffered_bytes"] = evaluation.events.unread_bytes
    document["events"] = {
        "buffered": event_log.end_cursor - event_log.begin_cursor,
        "discarded": event_log.begin_cursor,
    }
    return document


def build_archived_status_document(details: EvaluationDetails) -> dict[str, Any]:
    """Return the status document of an archived evaluation; all events can be read."""
    assert details.limits is not None, "it has ended"
    assert details.archive_record is not None, "it is archived"
    document = _build(details, details.limits)
    events = {"buffered": details.archive_record.event_count, "discarded": 0}
    return {**document, "events": events, "archived": True}


def _build(details: EvaluationDetails, limits: LimitSettings) -> dict[str, Any]:
    request, commit, result = details.request, details.commit, details.run_result
    document: dict[str, Any] = {
        "evaluation_id": details.identifier,
        "log_name": details.log_name,
        "state": details.state.value,
        "queue_place": None,
        "caller": details.caller or None,
        "problem": request.problem_name,
        "counts": details.counted_problem is not None,
        "repository": request.repository.url,
        "commit_oid": request.commit_oid or None,  # None until the branch is resolved
        "tree_oid": commit and commit.tree_oid,
        "directory": request.directory,
        "evaluator_cmd": request.truncated_command,
        "seed": details.seed,
        "build": None,
        "environment": _build_environment(details.environment, request.environment_name),
        "limits": {name: getattr(limits, name) for name in LIMIT_UNITS},
        "metadata": dict(request.metadata),
        "submitted": format_rfc3339_time(details.submission_time),
        "created": _time(details, "created"),
        "fetching": _time(details, EvaluationState.FETCHING.value),
        "running": _time(details, EvaluationState.RUNNING.value),
        "ended": _time(details, "ended"),
        "exit": None,
        "usage": None,
        "error": _build_error(details),
        "results": _build_results(details),
        "runner": details.cluster_job and attrs.asdict(details.cluster_job),
        "callback": None,
        "stderr": "" if result is None else result.stderr_text,
        "events": {"buffered": 0, "discarded": 0},
        "buffered_bytes": 0,
    }
    if result is not None:
        document["exit"] = result.exit_status and attrs.asdict(result.exit_status)
        document["usage"] = {
            "cpu_seconds": result.usage.cpu_seconds and round(result.usage.cpu_seconds, 3),
            "peak_memory_bytes": result.usage.peak_memory_bytes,
            "wall_seconds": round(
                details.state_times["ended"] - details.state_times[EvaluationState.RUNNING.value],
                3,
            )
            if "ended" in details.state_times
            else None,
        }
    callback = details.callback
    if callback is not None:
        document["callback"] = {
            "url": callback.url_without_query,
            "state": callback.state.value,
            "attempts": callback.attempt_count,
            "last_error": callback.last_error,
        }
    return document


def build_list_entry(details: EvaluationDetails) -> dict[str, Any]:
    """Return the members of the status document that a list shows."""
    request = details.request
    return {
        "evaluation_id": details.identifier,
        "state": details.state.value,
        "caller": details.caller or None,
        "problem": request.problem_name,
        "counts": details.counted_problem is not None,
        "directory": request.directory,
        "evaluator_cmd": request.truncated_command,
        "metadata": request.metadata,
        "submitted": format_rfc3339_time(details.submission_time),
        "created": _time(details, "created"),
        "ended": _time(details, "ended"),
        "error": _build_error(details),
        "results": _build_results(details),
    }


def _build_error(details: EvaluationDetails) -> dict[str, str] | None:
    if details.failure is None:
        return None
    return {"reason": details.failure.reason, "message": details.failure.message}


def _build_environment(environment: Environment | None, name: str | None) -> dict[str, Any] | None:
    """Return the environment of a run, or before the start the `name` that the request has."""
    if environment is None:
        return None if name is None else {"name": name, "digest": None}
    return {"name": environment.name, "digest": environment.digest}


def _build_results(details: EvaluationDetails) -> Mapping[str, Any] | None:
    return None if details.result_summary is None else details.result_summary.build_json_object()


def _time(details: EvaluationDetails, name: str) -> str | None:
    moment = details.state_times.get(name)
    return None if moment is None else format_rfc3339_time(moment)


_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})"
)  # RFC 3339


@attrs.frozen
class EvaluationFilter:
    """Condition on the evaluations of a list; the empty one holds for all.

    `state` is one of `CLIENT_VISIBLE_STATES`, `problem` the name of a problem. `labels` are labels
    that an evaluation has, among others. The time of acceptance, in seconds since the epoch, is at
    least `since` and below `until`.
    """

    state: str | None = None
    labels: Mapping[str, str] = attrs.field(factory=dict)
    since: float | None = None
    until: float | None = None
    problem: str | None = None

    def matches(self, details: EvaluationDetails) -> bool:
        """Return whether the filter holds for an evaluation."""
        created = round(details.state_times["created"], 6)  # as clients see it, or finer
        if (
            self.state not in (None, details.state.value)
            or (self.since is not None and created < self.since)
            or (self.until is not None and created >= self.until)
        ):
            return False
        if self.problem is None and not self.labels:
            return True
        found = details.request
        return self.problem in (None, found.problem_name) and (
            self.labels.items() <= found.metadata.items()
        )


MATCH_ALL_FILTER = EvaluationFilter()


def is_filter_parameter(name: str) -> bool:
    """Return whether a query parameter is part of a filter."""
    return name in ("state", "caller", "problem", "since", "until") or name.startswith("metadata[")


def parse_filter(parameters: Mapping[str, str]) -> EvaluationFilter:
    """Return the filter of the parameters of a query. Raises: MalformedRequest.

    An empty parameter is refused: it would list evaluations that the client does not expect.
    """
    labels = {}
    for name, value in parameters.items():
        if name.startswith("metadata["):
            match = LABEL_FIELD_PATTERN.fullmatch(name)
            if match is None:
                raise MalformedRequest(f"{name[:80]}: {format_label_name_error()}")
            if not value:
                raise MalformedRequest(f"{name}: is empty; no label is")
            labels[match[1]] = value
    state = parameters.get("state")
    if state is not None and state not in CLIENT_VISIBLE_STATES:
        raise MalformedRequest(
            f"state: {state[:80]!r} is no state; allowed: {', '.join(CLIENT_VISIBLE_STATES)}"
        )
    problem = parameters.get("problem")
    if problem is not None and not re.fullmatch(PROBLEM_NAME_PATTERN, problem):
        raise MalformedRequest(
            f"problem: {problem[:80]!r} is no name of a problem; GET /problems lists them"
        )
    return EvaluationFilter(
        state,
        labels,
        _parse_time(parameters, "since"),
        _parse_time(parameters, "until"),
        problem,
    )


def _parse_time(parameters: Mapping[str, str], name: str) -> float | None:
    if name not in parameters:
        return None
    # Clients often forget to encode the plus sign of a time zone, which then means a space.
    text = parameters[name].replace(" ", "+").upper()
    with suppress(ValueError):  # such as a 30th of February
        if _TIME.fullmatch(text):
            return datetime.fromisoformat(text).timestamp()
    raise MalformedRequest(
        f"{name}: {text[:80]!r} is no time of RFC 3339, such as 2026-11-20T20:07:08Z"
    )


MAX_PAGE_EVALUATIONS = 100  # evaluations in one answer, at most
MAX_LIST_PAGE_BYTES = 64 * 1024  # from which no further evaluation follows in an answer: 1 ms
# Evaluations that a filter examines for one answer, at most: of the archive 4 ms in a thread, if
# each row is large.
MAX_EVALUATIONS_EXAMINED_PER_PAGE = 100


@attrs.define
class EvaluationLister:
    """Lister of the evaluations in memory and in the archive."""

    _records: EvaluationIndex
    _archived: ArchiveReader
    _store: EvaluationStore | None

    async def list_evaluations(
        self,
        after_cursor: str | None,
        reader: str = "",
        callers: Collection[str] = ("",),
        evaluation_filter: EvaluationFilter = MATCH_ALL_FILTER,
        max_count: int | None = None,
    ) -> ListPage:
        """Return up to 100 evaluations of `callers`, or `max_count`, accepted after a cursor.

        `reader` is the caller that asks. There are fewer beyond `MAX_LIST_PAGE_BYTES`. None and the
        empty cursor stand for the start of the list. A filter examines a bounded number of
        evaluations in one call, so there may be fewer, or none. Raises: InvalidCursor; ServerBusy,
        if the disk of the archive does not answer.
        """
        number = parse_list_cursor(after_cursor) if after_cursor else 0
        newest = self._records.last_sequence_number
        if number > newest:
            raise make_invalid_cursor_error(str(number))
        size = max_count or MAX_PAGE_EVALUATIONS
        examined = (
            size if evaluation_filter == MATCH_ALL_FILTER else MAX_EVALUATIONS_EXAMINED_PER_PAGE
        )
        present = [
            evaluation.client_visible_details
            for evaluation in self._records.list_evaluations(callers, number, examined + 1)
        ]
        present += [
            one.client_visible_details
            for one in self._archived.evaluations_to_archive.values()
            if one.details.caller in callers and one.details.sequence_number > number
        ]
        # Thousands may wait for the archive; an entry takes 6 µs.
        present = nsmallest(examined + 1, present, key=attrgetter("sequence_number"))
        found: dict[int, ListEntry | None] = {}
        # What is archived meanwhile is in both, what is accepted meanwhile in neither.
        if self._store is not None and self._archived.is_enabled and callers:
            found = await self._store.list_archived(
                reader,
                callers,
                number,
                newest,
                examined + 1,
                lambda row: _make_entry(row, evaluation_filter),
            )
        found |= {one.sequence_number: _make_entry(one, evaluation_filter) for one in present}
        entries: list[ListEntry] = []
        end, bytes_left = None, MAX_LIST_PAGE_BYTES
        for one, following in pairwise((*sorted(found)[: examined + 1], None)):
            assert one is not None, "only the last is None"
            entry = found[one]
            if entry is not None:
                entries.append(entry)
                bytes_left -= len(entry.encoded_json)
            examined -= 1
            is_full = len(entries) == size or bytes_left <= 0 or not examined
            if following is not None and is_full:
                end = str(one)
                break
        return ListPage(end, entries)

    async def list_caller_standings(
        self, reader: str, callers: Collection[str], after_cursor: str, problem: str | None
    ) -> ListPage:
        """Return standings of callers, in all problems or one; `reader` is the caller that asks."""
        caller, _, name = after_cursor.partition("/")
        if self._store is None:
            return ListPage(None, [])
        found, end = await self._store.list_caller_standings(
            reader, callers, (caller, name), problem, _make_standing_entry
        )
        entries, bytes_left = [], MAX_LIST_PAGE_BYTES
        for place, entry in found:
            entries.append(entry)
            bytes_left -= len(entry.encoded_json)
            if bytes_left <= 0 and len(entries) < len(found):
                end = place
                break
        return ListPage(end and "/".join(end), entries)


def _make_standing_entry(standing: Standing) -> ListEntry:
    return ListEntry(
        "",
        encode_json_without_slack(
            {
                "caller": standing.caller or None,
                "problem": standing.problem,
                "submissions": standing.submission_count,
                "evaluated": standing.ended_count,
                "last_submitted": format_rfc3339_time(standing.last_submission_time),
                "best": build_list_entry(standing.best_evaluation),
            }
        ),
    )


def _make_entry(details: EvaluationDetails, wanted: EvaluationFilter) -> ListEntry | None:
    """Return what a list shows of an evaluation, None if the filter does not hold for it."""
    if not wanted.matches(details):
        return None
    return ListEntry.make_from_document(build_list_entry(details))


MAX_SHOWN_SUBMISSION_BYTES = 256 * 1024
"""Bytes of the files in one answer, in all; a file beyond them is named without its content."""

MAX_SHOWN_SUBMISSION_FILES = 1000
"""Files in one answer, at most."""

# In JSON six bytes each; and no editor shows them.
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1f]")


def read_submitted_files(directories: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the files below the first of `directories` that exists: FIELD/FILENAME.

    Each has `field`, `filename`, `size` in bytes and either `text` or `base64`, or neither if it is
    beyond `MAX_SHOWN_SUBMISSION_BYTES`. Blocks. Raises: OSError; FileNotFoundError, if none exists.
    """
    for directory in directories[:-1]:
        with suppress(FileNotFoundError):
            return _read_directory(directory)
    return _read_directory(directories[-1])


def _read_directory(directory: Path) -> list[dict[str, Any]]:
    left = MAX_SHOWN_SUBMISSION_BYTES
    files = []
    for path in islice(_list_files(directory), MAX_SHOWN_SUBMISSION_FILES):
        with _open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            document = {"field": path.parent.name, "filename": path.name, "size": size}
            if size <= left:
                content = file.read(left)
                left -= len(content)
                document |= _encode_content(content)
            files.append(document)
    return files


def _open_file(path: Path) -> IO[bytes]:
    """Open a file. Raises: OSError; FileNotFoundError also for anything but a regular file.

    Without a sandbox an evaluator may have put anything in its place.
    """
    try:
        return open_regular_file(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileNotFoundError(errno.ENOENT, "a link", str(path)) from None
        raise


def _list_files(directory: Path) -> Iterator[Path]:
    for field in sorted(os.listdir(directory)):
        if not (directory / field).is_symlink():
            yield from (directory / field / name for name in sorted(os.listdir(directory / field)))


def _encode_content(content: bytes) -> dict[str, str]:
    if not _CONTROL.search(content):
        with suppress(UnicodeDecodeError):
            return {"text": content.decode()}
    return {"base64": b64encode(content).decode()}
