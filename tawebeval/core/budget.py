"""Limits on what all evaluations hold together on the disk: events and uploads.

`EventDiskBudget` counts the stdout of evaluations, with the files that it has named, from the
moment when it is printed until it is acknowledged or its evaluation is forgotten. While it is
exhausted no evaluation is accepted. Those that run go on: each is bounded by its `limits.output`.

`UploadBudget` bounds the bytes of all forms that arrive or that evaluations still need. Only
received bytes count. An announced length is checked but not reserved: otherwise a client that
announces much and sends little would keep other clients out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import attrs

from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import CallerQuotaExceeded, ServerBusy, format_size

_MEMORY = 32 * 2**20  # bytes of forms that may wait for the disk
_RETRY_AFTER = 30  # seconds


@attrs.define
class EventDiskBudget:
    """Counter of the bytes of events on the disk, in all and for each caller with a token.

    A caller may have half of `max_bytes`, so that others find room, too.
    """

    max_bytes: int
    used_bytes: int = 0
    bytes_by_caller: Counter[str] = attrs.field(factory=Counter)

    def add_bytes(self, caller: str, size: int) -> None:
        """Count `size` bytes more for a caller; a negative size counts less."""
        self.used_bytes += size
        if caller != ANONYMOUS_CALLER:
            self.bytes_by_caller[caller] += size
            if not self.bytes_by_caller[caller]:
                del self.bytes_by_caller[caller]

    def is_caller_quota_exhausted(self, caller: str) -> bool:
        """Return whether a caller has taken up the caller's part."""
        return self.bytes_by_caller[caller] >= self.max_bytes // 2

    @property
    def is_exhausted(self) -> bool:
        """Whether all bytes are taken up."""
        return self.used_bytes >= self.max_bytes


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
