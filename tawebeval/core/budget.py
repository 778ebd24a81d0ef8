"""Limits on what all evaluations hold together: memory for events, disk space for uploads.

`RingBudget` bounds the bytes in all rings. A ring is full when it holds as many bytes as are still
free, or as many as one ring may hold: dynamic thresholds, as switches use them for queues in one
memory (Choudhury and Hahne, 1998). So n rings that want all they can get have a part of 1 / (n + 1)
each, and another such part is free for the next ring. A `RingAllocation` reserves nothing: bytes
that one ring frees are free for all rings.

A quarter of the total is a reserve. As many rings as are filled at once may each hold an equal part
of the reserve, whatever other rings hold, and one such part is left over. So events taken from a
ring stay for a while even if nobody reads the other rings. No evaluation should start while only
the reserve is free. Evaluations that were waiting for a slot start all the same; if nobody reads
these either, so that they fill the reserve, the rest of the reserve is divided like the rest of the
memory.

A caller has a share, too. The share pauses no ring, because the size of an evaluator's output is
unknown at its start; but while the caller's rings hold that much, none of the caller's evaluations
should start.

An empty ring is never full. Hence a client that reads all events always gets more, whatever other
rings hold, and all rings exceed the total by at most one turn of the parser for each ring
(`core.segi`). Bytes that stopped processes leave in their pipes come on top and are counted, too.

`UploadBudget` bounds the bytes of all forms that arrive or that evaluations still need. Only
received bytes count. An announced length is checked but not reserved: otherwise a client that
announces much and sends little would keep other clients out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable

import attrs

from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import CallerQuotaExceeded, ServerBusy, format_size

TYPICAL_PARSED_BYTES_PER_TURN = 512 * 1024  # bytes that one turn of a parser brings, more or less

_MEMORY = 32 * 2**20  # bytes of forms that may wait for the disk
_RETRY_AFTER = 30  # seconds


def _nothing() -> None:
    """Do nothing."""


class RingBudget:
    """Bound of the bytes in all rings: `total` together, `per_ring` in one ring.

    `ring_count` is the number of rings that are filled at once. `per_caller` is the share of one
    caller in bytes, 0 for no share. `call_later(call)` makes a call in another turn of the reactor.
    `used_bytes` is the number of bytes that all rings hold.
    """

    def __init__(
        self,
        total: int,
        per_ring: int,
        ring_count: int,
        call_later: Callable[[Callable[[], object]], object],
        per_caller: int = 0,
    ) -> None:
        self.used_bytes = 0
        self._total = total
        self._per_ring = per_ring
        reserve = total // 4
        self._common = total - reserve
        self._reserved = min(per_ring, reserve // (ring_count + 1))
        # Otherwise all bytes are the share, and one caller would be blamed for others.
        self._per_caller = per_caller if per_caller < self._common else 0
        self.used_bytes_by_caller: Counter[str] = Counter()
        self._on_relief: dict[str, Callable[[], object]] = {}  # by caller whose share is used
        self._call_later = call_later
        self._number = 0  # of the newest allocation
        self._waiting: list[RingAllocation] = []  # full rings; the smallest is first
        self._is_resuming = False

    @property
    def max_ring_bytes(self) -> int:
        """Size in bytes from which a ring is full now."""
        reserved = min(self._reserved, self._total - self.used_bytes)
        return max(1, min(self._per_ring, self._common - self.used_bytes), reserved)

    @property
    def full_ring_count(self) -> int:
        """Number of full rings, whose evaluators are paused."""
        return len(self._waiting)

    @property
    def is_only_reserve_free(self) -> bool:
        """Whether only the reserve is free."""
        return self.used_bytes >= self._common

    def is_caller_quota_exhausted(self, caller: str) -> bool:
        """Return whether the caller's rings hold the caller's share or more."""
        return (
            caller != ANONYMOUS_CALLER and 0 < self._per_caller <= self.used_bytes_by_caller[caller]
        )

    def call_when_quota_available(
        self, caller: str, on_quota_available: Callable[[], object]
    ) -> None:
        """Call `on_quota_available`, later, once a caller holds less than its share again.

        It replaces an earlier one for the same caller that was not called yet.
        """
        self._on_relief[caller] = on_quota_available

    def allocate_ring(
        self,
        caller: str = ANONYMOUS_CALLER,
        on_full: Callable[[], object] = _nothing,
        on_room: Callable[[], object] = _nothing,
    ) -> RingAllocation:
        """Return the allocation of a new ring; `RingAllocation` describes the callbacks."""
        self._number += 1
        return RingAllocation(self, self._number, caller, on_full, on_room)

    def add_used_bytes(self, caller: str, size: int) -> None:
        """Count `size` bytes more for a caller; a negative size counts less."""
        self.used_bytes += size
        self.used_bytes_by_caller[caller] += size
        if not self.used_bytes_by_caller[caller]:
            del self.used_bytes_by_caller[caller]
        if caller in self._on_relief and not self.is_caller_quota_exhausted(caller):
            self._call_later(self._on_relief.pop(caller))

    def add_full_ring(self, ring: RingAllocation) -> None:
        """Let a full ring wait for room."""
        insort(self._waiting, ring, key=_order)

    def remove_full_ring(self, ring: RingAllocation) -> None:
        """Stop the wait of a ring; its size must be the size with which the wait began."""
        del self._waiting[bisect_left(self._waiting, _order(ring), key=_order)]

    def resume_full_rings(self) -> None:
        """Resume full rings, in another turn, if bytes were freed that suffice for one."""
        if not self._is_resuming and self._has_room():
            self._is_resuming = True
            self._call_later(self._resume)

    def _has_room(self) -> bool:
        return bool(self._waiting) and self._waiting[0].used_bytes < self.max_ring_bytes

    def _resume(self) -> None:
        """Resume as many rings as can print into the free bytes; later turns resume the others.

        All rings at once would use more bytes than are free, the reserve too, and would take as
        many turns to stop as there are rings.
        """
        self._is_resuming = False
        for _ in range(1 + max(0, self._common - self.used_bytes) // TYPICAL_PARSED_BYTES_PER_TURN):
            if not self._has_room():
                return
            self._waiting.pop(0).mark_not_full()
        self.resume_full_rings()


def _order(ring: RingAllocation) -> tuple[int, int]:
    return ring.used_bytes, ring.allocation_id


@attrs.define(eq=False)
class RingAllocation:
    """Part of the budget that one ring holds: `used_bytes` in bytes.

    `bytes_outside_ring` are stored beside the ring: they count for the caller, but do not fill
    the ring. `allocation_id` is unique in the budget.

    While `is_full`, the ring is to take no more events. `on_full()` is called when this begins, and
    may discard events; `on_room()` is called when this ends. `is_archive_behind` has the same
    effect for a while, whatever the size is: another taker of the events is behind.
    """

    _budget: RingBudget
    allocation_id: int
    caller: str
    _on_full: Callable[[], object]
    _on_room: Callable[[], object]
    used_bytes: int = 0
    bytes_outside_ring: int = 0
    is_full: bool = False
    is_archive_behind: bool = False
    _is_limited: bool = False
    _is_released: bool = False

    @property
    def max_ring_bytes(self) -> int:
        """Size in bytes from which the ring is full now."""
        return self._budget.max_ring_bytes

    def set_used_bytes(self, size: int) -> None:
        """Set the size of the ring in bytes; freed bytes may resume this ring and others."""
        if self._is_released:
            return
        was_full = self.is_full
        self._budget.add_used_bytes(self.caller, size - self.used_bytes)
        if was_full:
            self._budget.remove_full_ring(self)
        has_shrunk, self.used_bytes = size < self.used_bytes, size
        self.is_full = self._is_limited and size >= self.max_ring_bytes
        if self.is_full:
            self._budget.add_full_ring(self)
        if has_shrunk:
            self._budget.resume_full_rings()
        if was_full and not self.is_full:
            self._on_room()
        elif self.is_full and not was_full:
            self._on_full()

    def set_bytes_outside_ring(self, size: int) -> None:
        """Set the number of bytes that are stored beside the ring."""
        self._budget.add_used_bytes(self.caller, size - self.bytes_outside_ring)
        has_shrunk, self.bytes_outside_ring = size < self.bytes_outside_ring, size
        if has_shrunk:
            self._budget.resume_full_rings()

    def set_archive_behind(self, is_behind: bool) -> None:
        """Block the ring, or unblock it, whatever its size is."""
        was_blocked, self.is_archive_behind = self.is_archive_behind, is_behind
        if was_blocked and not is_behind and not self.is_full:
            self._on_room()

    def disable_limit(self) -> None:
        """Never let the ring be full again: the few events still to come must be stored."""
        self._is_limited = False
        self.set_used_bytes(self.used_bytes)
        self._drop_callbacks()

    def release(self) -> None:
        """Free all bytes: the ring is gone."""
        self._drop_callbacks()
        self._is_limited = False
        self.set_bytes_outside_ring(0)
        self.set_used_bytes(0)
        self._is_released = True

    def mark_not_full(self) -> None:
        """Let the ring not be full any more, because other rings have freed bytes."""
        self.is_full = False
        self._on_room()

    def _drop_callbacks(self) -> None:
        """Forget the callbacks, which refer to the owner of the ring."""
        self._on_full = self._on_room = _nothing


@attrs.define
class UploadBudget:
    """Counter of the bytes of forms; `stored_bytes` never exceeds `max_bytes`.

    `bytes_by_caller` are those of callers with a token, at most `max_bytes_per_caller` each.
    `unwritten_bytes` counts the bytes that are not yet written to the disk.
    `discard_kept_submissions(size, caller)` gives back at least `size` bytes of submissions that
    are only kept, without a caller those of any, and returns True; it gives back nothing, and
    returns False, if they are too few.
    """

    max_bytes: int
    discard_kept_submissions: Callable[..., bool] = lambda *_: False
    stored_bytes: int = 0
    unwritten_bytes: int = 0
    max_bytes_per_caller: int = 2**62
    bytes_by_caller: Counter[str] = attrs.field(factory=Counter)

    @property
    def is_memory_full(self) -> bool:
        """Whether forms must wait for the disk before they receive more."""
        return self.unwritten_bytes >= _MEMORY

    def check_space(self, size: int, caller: str = ANONYMOUS_CALLER) -> None:
        """Raise an error if `size` bytes would not fit, after kept submissions are discarded.

        Raises: CallerQuotaExceeded; ServerBusy.
        """
        excess = self.bytes_by_caller[caller] + size - self.max_bytes_per_caller
        has_share = caller != ANONYMOUS_CALLER
        if has_share and excess > 0 and not self.discard_kept_submissions(excess, caller):
            raise CallerQuotaExceeded(
                f"your uploads take up {format_size(self.max_bytes_per_caller)}, the part of"
                " limits.uploads for one caller; try again when evaluations have ended",
                _RETRY_AFTER,
            )
        excess = self.stored_bytes + size - self.max_bytes
        if excess > 0 and not self.discard_kept_submissions(excess):
            raise ServerBusy(
                "the disk space for uploads is used up (limits.uploads); try again later",
                _RETRY_AFTER,
            )

    def add_stored_bytes(self, size: int, caller: str = ANONYMOUS_CALLER) -> None:
        """Count `size` bytes more. Raises as `check_space`, and counts nothing then."""
        self.check_space(size, caller)
        self.restore_stored_bytes(size, caller)

    def restore_stored_bytes(self, size: int, caller: str) -> None:
        """Count `size` bytes more, whether they fit or not."""
        self.stored_bytes += size
        self.release_share(caller, -size)

    def release_share(self, caller: str, size: int) -> None:
        """Count `size` bytes less for a caller; `remove_stored_bytes` follows their removal."""
        if caller != ANONYMOUS_CALLER:
            self.bytes_by_caller[caller] -= size
            if not self.bytes_by_caller[caller]:
                del self.bytes_by_caller[caller]

    def remove_stored_bytes(self, size: int) -> None:
        """Count `size` bytes less, which were removed from the disk."""
        assert 0 <= size <= self.stored_bytes
        self.stored_bytes -= size


@attrs.define(eq=False)
class SharedUpload:
    """Files of a submission, counted once for the evaluation and for reruns, which link them.

    `reference_count` is the number of evaluations that need the files. `upload_number` is unique
    among the uploads. The files count for the `caller`.
    """

    _budget: UploadBudget
    size: int
    upload_number: int = 0
    reference_count: int = 1
    caller: str = ANONYMOUS_CALLER

    def add_reference(self) -> None:
        """Count one reference more."""
        self.reference_count += 1

    def remove_reference(self) -> None:
        """Count one reference less; the last one gives back the bytes."""
        self.reference_count -= 1
        if not self.reference_count:
            self._budget.release_share(self.caller, self.size)
            self._budget.remove_stored_bytes(self.size)
