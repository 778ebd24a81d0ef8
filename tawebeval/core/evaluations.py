"""Values about evaluations: states, identifiers, commits, counters, and the cursors of lists.

Identifiers prove that this daemon issued them. An identifier is random bytes and a MAC of them
under the daemon's key, in lower-case base32. The MAC also covers the name of the caller: for any
other caller the identifier is unknown. So a daemon that has forgotten an evaluation, even over a
restart, still tells an expired evaluation from one that never existed.

Where several daemons share an address each has a name, and its identifiers begin with the name, so
that the proxy before the daemons knows which daemon to ask.

Commits and checkouts are plain values, so that sandbox and evaluations do not import git.

Counters and histograms are plain numbers, which cost little; `daemon.metrics` exports them. The
keys of a counter are the labels of its metric. All known labels are counted from the start, as 0:
to Prometheus the first sample of a series is no increase, so it would raise no alert.

A daemon lists its evaluations by their sequence numbers, so the place in its list is a number. The
list over several daemons has no common order that clocks could break: its cursor has the place in
the list of each daemon, and an answer has the next part of each. So each daemon's evaluations are
listed in that daemon's order, and none is skipped or repeated, whichever daemon answers. Within an
answer the parts are merged by the time of acceptance. A daemon that does not answer keeps its
place. It is asked again for the next part.
"""

from __future__ import annotations

import hmac
import re
from base64 import b32decode, b32encode
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from heapq import merge
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias, get_args

import attrs
import msgspec
import orjson

from tawebeval.errors import FailureReason, InvalidCursor

SECRET_KEY_BYTES = 32

_RANDOM = 13  # with the MAC 25 bytes, which base32 writes without padding
_MAC = 12
_FORM = re.compile(r"[a-z2-7]{40}")
_PURPOSE = b"tawebeval evaluation "
_NAME_PURPOSE = b"tawebeval daemon "

DAEMON_NAME_PATTERN = r"[a-z0-9]{1,16}"
"""The pattern of a daemon's name."""

IDENTIFIER_PATTERN = rf"(?:{DAEMON_NAME_PATTERN}-)?{_FORM.pattern}"
"""The pattern of the identifiers of any daemon, with a name or without."""


class EvaluationState(StrEnum):
    """State of an evaluation.

    In the first three states the daemon works on the evaluation, in the next three clients may read
    its events, and in the last two only its identifier is left.
    """

    QUEUED = "queued"
    FETCHING = "fetching"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DRAINED = "drained"
    EXPIRED = "expired"

    @property
    def has_ended(self) -> bool:
        """Whether no event can follow."""
        return self not in (
            EvaluationState.QUEUED,
            EvaluationState.FETCHING,
            EvaluationState.RUNNING,
        )


_BAD_ENDS = frozenset({EvaluationState.FAILED, EvaluationState.CANCELLED})
_FORGOTTEN = frozenset({EvaluationState.DRAINED, EvaluationState.EXPIRED})

CLIENT_VISIBLE_STATES = tuple(state.value for state in EvaluationState if state not in _FORGOTTEN)
"""The states that clients can see."""

TRANSITIONS: Mapping[EvaluationState, frozenset[EvaluationState]] = {
    EvaluationState.QUEUED: _BAD_ENDS | {EvaluationState.FETCHING},
    # An evaluation that was fetched before a slot was free is queued again.
    EvaluationState.FETCHING: _BAD_ENDS | {EvaluationState.QUEUED, EvaluationState.RUNNING},
    EvaluationState.RUNNING: _BAD_ENDS | {EvaluationState.FINISHED},
    EvaluationState.FINISHED: _FORGOTTEN,
    EvaluationState.FAILED: _FORGOTTEN,
    EvaluationState.CANCELLED: _FORGOTTEN,
    EvaluationState.DRAINED: frozenset(),
    EvaluationState.EXPIRED: frozenset(),
}
"""The states that may follow each state; docs/api.md names the events that lead to them."""


class IllegalTransition(AssertionError):
    """A transition that `TRANSITIONS` does not have: a bug."""


def check_transition(before: EvaluationState, after: EvaluationState) -> EvaluationState:
    """Return `after`, the state after `before`. Raises IllegalTransition."""
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(f"an evaluation cannot become {after.value} when {before.value}")
    return after


@attrs.frozen
class IdentifierIssuer:
    """Issuer of identifiers; `key` is secret, `random(n)` returns n random bytes.

    `daemon_name` is the daemon's name, "" for none. Each name has a key of its own.
    """

    _key: bytes = attrs.field(repr=False)
    _random: Callable[[int], bytes] = attrs.field(repr=False)
    daemon_name: str = ""
    _prefix: str = attrs.field(init=False)
    _own_key: bytes = attrs.field(init=False, repr=False)

    @_prefix.default
    def _named(self) -> str:
        return f"{self.daemon_name}-" if self.daemon_name else ""

    @_own_key.default
    def _derived(self) -> bytes:
        if not self.daemon_name:
            return self._key
        return hmac.digest(self._key, _NAME_PURPOSE + self.daemon_name.encode(), "sha256")

    def issue_identifier(self, caller: str = "") -> str:
        """Return a new identifier for a caller: the daemon's name and 40 characters of `a-z2-7`."""
        drawn = self._random(_RANDOM)
        return self._prefix + b32encode(drawn + self._mac(drawn, caller)).decode().lower()

    def has_issued(self, identifier: str, caller: str = "") -> bool:
        """Return whether this daemon issued `identifier` to the caller."""
        return self.find_owner(identifier, (caller,)) is not None

    def find_owner(self, identifier: str, callers: Iterable[str]) -> str | None:
        """Return to which of `callers` this daemon issued `identifier`; 2 µs for each of them."""
        own = identifier.removeprefix(self._prefix)
        if len(own) + len(self._prefix) != len(identifier) or not _FORM.fullmatch(own):
            return None
        decoded = b32decode(own.upper())
        drawn, mac = decoded[:_RANDOM], decoded[_RANDOM:]
        for caller in callers:
            if hmac.compare_digest(mac, self._mac(drawn, caller)):
                return caller
        return None

    def _mac(self, drawn: bytes, caller: str) -> bytes:
        # The random bytes have a fixed length, so two different messages never have the same bytes.
        message = _PURPOSE + drawn + caller.encode()
        # Not hmac.digest(): it gives the interpreter's lock away, for 100 µs beside busy threads.
        return hmac.new(self._own_key, message, "sha256").digest()[:_MAC]


@attrs.frozen
class Submodule:
    """A commit of another repository that belongs at `path` in a tree.

    `url` is as in `.gitmodules`: it may be relative.
    """

    path: str
    oid: str
    url: str = ""


@attrs.frozen
class Commit:
    """A commit and its tree, by their OIDs.

    The tree has `file_count` files of `size` bytes together. `has_gitattributes`: it has a file
    `.gitattributes`.
    """

    oid: str
    tree_oid: str
    file_count: int = 0
    size: int = 0
    submodules: tuple[Submodule, ...] = ()
    has_gitattributes: bool = attrs.field(default=False, eq=False)


@attrs.frozen
class Checkout:
    """A commit and the read-only directory `path` of its tree, which exists until `release()`."""

    commit: Commit
    path: Path
    release: Callable[[], None] = attrs.field(eq=False)


TreeCopier: TypeAlias = Callable[[Path], tuple[int, int]]
"""Function that copies a tree, and returns the number of its files, and of their bytes. Blocks."""

TreeBuilder: TypeAlias = Callable[[TreeCopier], Awaitable[tuple[int, int]]]
"""Function that builds a tree and passes its directory to the given function, in a thread.

It returns what that has returned."""


@attrs.frozen
class ArchiveRecord:
    """What the row of an archived evaluation has: bytes on the disk, and number of events."""

    file_bytes: int
    event_count: int


LONG_DURATION_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Bounds of a histogram, in seconds, for stages that may take minutes: queue, fetch, run."""

SHORT_DURATION_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bounds of a histogram, in seconds, for short work: responses, turns of the reactor."""

_ENDS = (
    (EvaluationState.FINISHED, ""),
    (EvaluationState.CANCELLED, "cancelled"),
    *(
        (EvaluationState.FAILED, reason)
        for reason in get_args(FailureReason)
        if reason != "cancelled"
    ),
)


@attrs.define(eq=False)
class Histogram:
    """Number of values up to each of the ascending `bounds`, and above all; `sum` of all values."""

    bounds: Sequence[float]
    sum: float = 0.0
    _counts: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def record_value(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def list_buckets(self) -> Iterator[tuple[float, int]]:
        """Yield each bound, infinity at last, and the number of values up to it."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            yield bound, total


@attrs.define(eq=False)
class EvaluationCounters:
    """Counters of evaluations.

    `counts_by_state` counts evaluations by their present state, `ended_counts_by_state_and_reason`
    by the state and the reason at their end; the reason of FINISHED is empty. `durations_by_state`
    has the seconds spent in each state before the end.

    `latest_machine_fault` has the time in seconds and the message if the latest evaluation to end
    was lost by a fault of this machine, else None.
    """

    counts_by_state: Counter[EvaluationState] = attrs.field(
        factory=lambda: Counter(dict.fromkeys(EvaluationState, 0))
    )
    ended_counts_by_state_and_reason: Counter[tuple[str, str]] = attrs.field(
        factory=lambda: Counter(dict.fromkeys(_ENDS, 0))
    )
    durations_by_state: dict[str, Histogram] = attrs.field(
        factory=lambda: {
            state: Histogram(LONG_DURATION_BUCKETS)
            for state in EvaluationState
            if not state.has_ended
        }
    )
    latest_machine_fault: tuple[float, str] | None = None
    restored_count: int = 0  # of evaluations that an earlier process has accepted

    @property
    def admitted_count(self) -> int:
        """Number of evaluations accepted since the daemon's start."""
        return self.counts_by_state.total() - self.restored_count

    def record_admission(self) -> None:
        """Count an accepted evaluation."""
        self.counts_by_state[EvaluationState.QUEUED] += 1

    def record_restored_evaluation(self, state: EvaluationState) -> None:
        """Count an evaluation that an earlier process of the daemon has accepted."""
        self.restored_count += 1
        self.counts_by_state[state] += 1

    def set_latest_machine_fault(self, fault: str | None, now: float) -> None:
        """Set or clear `fault`; `now` is in seconds."""
        self.latest_machine_fault = None if fault is None else (now, fault)

    def record_transition(
        self, before: EvaluationState, after: EvaluationState, seconds: float, reason: str = ""
    ) -> None:
        """Count a change of state after `seconds` in `before`.

        `reason` is the reason of a bad end, else "".
        """
        self.counts_by_state[before] -= 1
        self.counts_by_state[after] += 1
        if before.has_ended:
            return
        self.durations_by_state[before].record_value(seconds)
        if after.has_ended:
            self.ended_counts_by_state_and_reason[after, reason] += 1


@attrs.define(eq=False)
class GitCacheCounters:
    """Counters of the cache of repositories.

    `fetch_counts` counts attempts to fetch a commit by their end; a fetch that several evaluations
    wait for counts once. `fetch_durations` has the seconds that fetches take.
    """

    fetch_counts: Counter[str] = attrs.field(
        factory=lambda: Counter(fetched=0, failed=0, cancelled=0)
    )
    fetch_durations: Histogram = attrs.field(factory=lambda: Histogram(LONG_DURATION_BUCKETS))


_CURSOR = re.compile("[1-9][0-9]{0,17}")  # the sequence number before it
_PLACE = re.compile(rf"({DAEMON_NAME_PATTERN})(?:-({_CURSOR.pattern}))?")


def parse_list_cursor(text: str) -> int:
    """Return the sequence number before the cursor of a query. Raises: InvalidCursor."""
    if not _CURSOR.fullmatch(text):
        raise make_invalid_cursor_error(text)
    return int(text)


def make_invalid_cursor_error(text: str) -> InvalidCursor:
    """Return the error about a list cursor that cannot be used."""
    return InvalidCursor(
        f"after: {text[:80]!r} is not a cursor of this list; begin again without `after`"
    )


@attrs.frozen
class MultiDaemonListCursor:
    """Place in the list over several daemons.

    `cursors_by_daemon` has the list cursor of each daemon by its name, None if its list has ended.
    A daemon that is not in it has its whole list before it.
    """

    cursors_by_daemon: Mapping[str, str | None] = attrs.field(factory=dict)

    @classmethod
    def parse(cls, text: str, daemon_names: Collection[str]) -> MultiDaemonListCursor:
        """Return the cursor of a query over these daemons. Raises: InvalidCursor."""
        places: dict[str, str | None] = {}
        for part in text.split("_") if text else ():
            place = _PLACE.fullmatch(part)
            if place is None or place[1] not in daemon_names or place[1] in places:
                raise make_invalid_cursor_error(text)
            places[place[1]] = place[2]
        return cls(places)

    def __str__(self) -> str:
        return "_".join(
            name if place is None else f"{name}-{place}"
            for name, place in sorted(self.cursors_by_daemon.items())
        )

    def find_unfinished_cursors(self, daemon_names: Collection[str]) -> dict[str, str | None]:
        """Return the daemons whose lists have not ended, with their cursors, None for the start."""
        return {
            name: self.cursors_by_daemon.get(name)
            for name in sorted(daemon_names)
            if name not in self.cursors_by_daemon or self.cursors_by_daemon[name] is not None
        }


def encode_json_without_slack(document: Mapping[str, Any]) -> bytes:
    """Return a JSON object as bytes that take no more memory than they are.

    orjson alone leaves room behind its result, often of several times the size.
    """
    return bytes(memoryview(orjson.dumps(document)))


@attrs.frozen
class ListEntry:
    """An evaluation as a list shows it: the time of acceptance, and the JSON."""

    created_time: str
    encoded_json: bytes

    @classmethod
    def make_from_document(cls, document: Mapping[str, Any]) -> ListEntry:
        """Return the entry of a JSON object. Raises: TypeError, for a value that is not JSON."""
        return cls(document["created"], encode_json_without_slack(document))

    @property
    def orjson_fragment(self) -> orjson.Fragment:
        """The JSON, to be encoded as a part of a document."""
        return orjson.Fragment(self.encoded_json)


@attrs.frozen
class ListPage:
    """A part of a list; `end_cursor` is the cursor after it, None at the end."""

    end_cursor: str | None
    entries: Sequence[ListEntry]


def make_list_page(end_cursor: str | None, documents: Sequence[Mapping[str, Any]]) -> ListPage:
    """Return a part of these entries. Raises: TypeError, for a value that is not JSON."""
    return ListPage(end_cursor, [ListEntry.make_from_document(one) for one in documents])


class _Entry(msgspec.Struct):
    evaluation_id: str
    created: str


class _Answer(msgspec.Struct):
    daemon: str
    end: str | None
    data: list[_Entry]


def parse_list_page(body: bytes, daemon_name: str) -> ListPage:
    """Return the part in the answer of the daemon `daemon_name`.

    Raises: ValueError, with a message for the operator.
    """
    try:
        document = orjson.loads(body)
        answer = msgspec.convert(document, _Answer)
        part = make_list_page(answer.end, document["data"])
    except (ValueError, TypeError):  # TypeError: nested too deeply
        raise ValueError("the answer is not a list of evaluations") from None
    if answer.daemon != daemon_name:
        raise ValueError(f"the answer is of the daemon {answer.daemon[:80]!r}")
    if answer.end is not None and not _CURSOR.fullmatch(answer.end):
        raise ValueError("the answer has a malformed cursor")
    return part


def merge_list_pages(
    cursor: MultiDaemonListCursor, asked_daemons: Collection[str], pages: Mapping[str, ListPage]
) -> ListPage:
    """Return the part after a cursor, of the `pages` of those `asked_daemons` that have answered.

    It is the last one if all lists have ended, or if those left belong to daemons that are away
    and nobody else was asked.
    """
    after = MultiDaemonListCursor(
        {**cursor.cursors_by_daemon, **{name: part.end_cursor for name, part in pages.items()}}
    )
    is_any_away = not set(asked_daemons) <= set(pages)
    has_more = is_any_away or any(part.end_cursor is not None for part in pages.values())
    ordered = merge(
        *(pages[name].entries for name in sorted(pages)), key=attrgetter("created_time")
    )
    return ListPage(str(after) if pages and has_more else None, list(ordered))
