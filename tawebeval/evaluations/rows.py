"""What the store keeps, as values: evaluations, callbacks that are due, links."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec

from tawebeval.core.checkout import Commit
from tawebeval.core.states import EvaluationState
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.details import ArchivedRow, RunResult
from tawebeval.sandbox.base import RunnerStatus
from tawebeval.sandbox.environments import Environment
from tawebeval.webhooks.callback import CallbackRecord

T = TypeVar("T")


class RunRow(msgspec.Struct, omit_defaults=True):
    """An evaluator that runs.

    - `pid`, `start_time`: its first process, and the time of its start in clock ticks since the
      boot (proc(5)), by which a process of a later boot, or with a reused PID, is told apart.
    - `sandbox_description`: what the kind of sandbox needs to go on with the run.
    - `deadline`: the end of `limits.wall_clock`, in seconds of the monotonic clock; None while the
      run waits to be begun again. `left_at`: when the daemon has left it to the next process, None
      after a kill: the time until that goes on does not count.
    """

    pid: int
    start_time: int
    checkout_path: str
    deadline: float | None
    left_at: float | None = None
    sandbox_description: dict[str, Any] = {}


class EvaluationRow(msgspec.Struct, omit_defaults=True):
    """An evaluation, besides its events.

    - `sequence_number`: the place in the order of acceptance. `packed_request`: packed
      (`core.form`).
    - `upload_directory`: the name of the directory of the form's files, None once the workspace has
      them; `upload_size`: its bytes; `shared_upload_number`: that of their `SharedUpload`.
    - `state_times`: when each state began, and the keys `created` and `ended`, in seconds since the
      epoch. `clock_offset`: the time of day at acceptance less that of the boot clock, in seconds.
    - `limits`: those of the run, None before the start.
    - `packed_result_summary`: packed (`core.results`).
    - `failure`: the failure; before the end the reason of a stop. `failure_event`: its event, the
      last one before `end_cursor`.
    - `markers`: those of stdout (`core.segi`), None before the start.
    - `run`: None unless the evaluator runs.
    - `begin_cursor`: the acknowledged cursor. `end_cursor`: the cursor at the end, 0 before.
    - `is_forgotten`: whether the registry has forgotten it; the archive may still need it.
    - `archived`: None unless it is in the archive.

    A packed row takes 1 to 3 KiB. At most it takes the fields of the form that are no files (each
    64 KiB), 8 KiB of stderr in the result and three times that in the failure, 17
    KiB of goals, and the paths and variables of the operator's configuration.
    """

    identifier: str
    packed_request: bytes
    seed: int
    sequence_number: int
    state: EvaluationState = EvaluationState.QUEUED
    caller: str = ANONYMOUS_CALLER
    state_times: dict[str, float] = {}
    clock_offset: float | None = None
    upload_directory: str | None = None
    upload_size: int = 0
    shared_upload_number: int = 0
    should_keep_submission: bool = False
    has_kept_submission: bool = False
    is_cleaned_up: bool = False
    is_forgotten: bool = False
    idempotency_key: str | None = None
    form_digest: bytes = b""
    callback: CallbackRecord | None = None
    commit: Commit | None = None
    limits: dict[str, Any] | None = None
    environment: Environment | None = None
    runner_status: RunnerStatus | None = None
    markers: tuple[bytes, bytes, bytes, bytes] | None = None
    run: RunRow | None = None
    run_result: RunResult | None = None
    packed_result_summary: bytes = b""
    failure: EvaluationFailure | None = None
    failure_event: bytes = b""
    begin_cursor: int = 0
    end_cursor: int = 0
    archived: ArchivedRow | None = None


class PendingCallback(msgspec.Struct):
    """A callback that is not delivered yet, also after its evaluation is removed.

    `document` is the body of its request.
    """

    url: str
    caller: str
    webhook_id: str
    document: bytes


class LinkRow(msgspec.Struct, frozen=True):
    """The links of one evaluation; `last_expiry` is that of the last, in seconds since the epoch.

    Links of another `link_generation` are revoked.
    """

    caller: str
    link_generation: bytes
    last_expiry: int


@attrs.frozen
class ArchivedEvaluation:
    """An archived evaluation as lists and removals need it. Times are in seconds since the epoch.

    A row that does not match the query has no `listing_entry`.
    """

    identifier: str
    caller: str
    sequence_number: int
    created_time: float
    state: str
    file_bytes: int
    listing_entry: bytes = attrs.field(repr=False)


@attrs.frozen
class ArchivedQuery:
    """A caller's first `max_count` archived rows between two sequence numbers.

    The last number is included. Rows for which `matches`, called in a thread, is false have no
    entry, which saves memory.
    """

    caller: str
    after_sequence_number: int
    last_sequence_number: int
    max_count: int
    matches: Callable[[ArchivedEvaluation], bool]


_encoder = msgspec.msgpack.Encoder(enc_hook=str)  # of a Path


def pack(row: msgspec.Struct) -> bytes:
    """Return a row as bytes of MessagePack."""
    return _encoder.encode(row)


def _make_decoder(kind: type[T]) -> Callable[[bytes], T]:
    return msgspec.msgpack.Decoder(kind, dec_hook=lambda _, value: Path(value)).decode


unpack_evaluation = _make_decoder(EvaluationRow)
unpack_callback = _make_decoder(PendingCallback)
unpack_link = _make_decoder(LinkRow)
