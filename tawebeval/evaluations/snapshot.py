"""State of an evaluation as its journal has it.

A snapshot is a map of names. So a daemon of the version before ignores what it does not know, and
what it does not find has a default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec

from tawebeval.config import LimitSettings
from tawebeval.core.checkout import Commit, Submodule
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.run import RunProgress, RunResult
from tawebeval.linux.cgroups.manager import ResourceUsage
from tawebeval.sandbox.base import EvaluatorExit, RunnerStatus
from tawebeval.sandbox.environments import Environment
from tawebeval.webhooks.callback import CallbackRecord, CallbackState

T = TypeVar("T")

# Keys in journals that older releases have written.
_RUN_KEYS = {
    "checkout_path": "checkout",
    "sandbox_description": "sandbox",
    "progress_time": "moment",
}
_EVALUATION_KEYS = {
    "packed_request": "request",
    "sequence_number": "number",
    "upload_directory": "upload",
    "shared_upload_number": "share",
    "should_keep_submission": "keeps_submission",
    "has_kept_submission": "is_submission_kept",
    "is_forgotten_by_registry": "is_forgotten",
    "idempotency_key": "key",
    "state_times": "times",
    "run_result": "result",
    "packed_result_summary": "results",
    "end_cursor": "newest",
    "failure_event": "last_event",
    "runner_status": "runner",
}


class CallbackSnapshot(
    msgspec.Struct,
    omit_defaults=True,
    rename={"attempt_count": "attempts", "webhook_id": "event"},
):
    """A callback and its progress, as `webhooks.callback.CallbackRecord`."""

    url: str
    state: str
    attempt_count: int = 0
    last_error: str | None = None
    webhook_id: str = ""


class UndeliveredCallback(msgspec.Struct, rename={"webhook_id": "event"}):
    """A callback that is not delivered yet, also after its evaluation is forgotten."""

    url: str
    caller: str
    webhook_id: str
    document: bytes

    def pack(self) -> bytes:
        """Return the content of a file."""
        return msgspec.msgpack.encode(self)


def unpack_undelivered_callback(packed: bytes) -> UndeliveredCallback:
    """Return a kept callback. Raises: msgspec.MsgspecError."""
    return msgspec.msgpack.decode(packed, type=UndeliveredCallback)


class RunSnapshot(msgspec.Struct, omit_defaults=True, rename=_RUN_KEYS):
    """An evaluator that runs.

    - `pid`: its first process.
    - `sandbox_description`: what `SandboxedRun.describe_for_resume` has returned.
    - `checkout_path`: the path of its checkout. `quota_directory`: None without quotas.
    - `progress`: as it was at `progress_time`, in seconds of the monotonic clock.
    """

    pid: int
    checkout_path: str
    markers: tuple[bytes, bytes, bytes, bytes]
    sandbox_description: dict[str, Any]
    progress: RunProgress
    progress_time: float
    quota_directory: str | None = None

    @property
    def runner_kind(self) -> str:
        """The word of `runner.kind` under which it began."""
        return str(self.sandbox_description.get("kind", "local"))


class EvaluationSnapshot(msgspec.Struct, omit_defaults=True, rename=_EVALUATION_KEYS):
    """An evaluation and its record in the registry.

    - `sequence_number`: the place in the order of acceptance. `packed_request`: packed
      (`core.form`).
    - `upload_directory`: the directory of the form's files, None once the workspace has them;
      `upload_size`: its bytes; `shared_upload_number`: that of their `SharedUpload`.
    - `is_forgotten_by_registry`: whether the registry has forgotten it; the archive may still need
      it.
    - `failure`, `failure_event`: the failure, and its event, which is the last one before the
      cursor `end_cursor`. Before the end the failure is the reason of a stop.

    """

    identifier: str
    packed_request: bytes
    seed: int
    state: str
    sequence_number: int = 0
    caller: str = ANONYMOUS_CALLER
    upload_directory: str | None = None
    upload_size: int = 0
    shared_upload_number: int = 0
    should_keep_submission: bool = False
    has_kept_submission: bool = False
    is_cleaned_up: bool = False
    is_forgotten_by_registry: bool = False
    idempotency_key: str | None = None
    form_digest: bytes = b""
    state_times: dict[str, float] = {}
    callback: CallbackSnapshot | None = None
    commit: dict[str, Any] | None = None
    limits: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    run: RunSnapshot | None = None
    run_result: dict[str, Any] | None = None
    packed_result_summary: bytes = b""
    failure: dict[str, Any] | None = None
    end_cursor: int = 0
    failure_event: bytes = b""
    runner_status: dict[str, Any] | None = None
    clock_offset: float | None = None

    @property
    def has_only_callback_left(self) -> bool:
        """Whether only a kept callback is left of the callback."""
        return self.is_forgotten_by_registry and self.is_cleaned_up

    def pack(self) -> bytes:
        """Return the content of a frame."""
        return msgspec.msgpack.encode(self)


def unpack_snapshot(packed: bytes) -> EvaluationSnapshot:
    """Return the snapshot in a frame. Raises: msgspec.MsgspecError."""
    return msgspec.msgpack.decode(packed, type=EvaluationSnapshot)


def dump_callback(callback: CallbackRecord) -> CallbackSnapshot:
    """Return the snapshot of a callback."""
    return CallbackSnapshot(
        callback.url,
        callback.state.value,
        callback.attempt_count,
        callback.last_error,
        callback.webhook_id,
    )


def load_callback(stored: CallbackSnapshot, caller: str) -> CallbackRecord:
    """Return the callback of a snapshot."""
    state = CallbackState(stored.state)
    return CallbackRecord(
        stored.url, caller, state, stored.attempt_count, stored.last_error, stored.webhook_id
    )


def dump_limits(limits: LimitSettings) -> dict[str, Any]:
    """Return limits as a map, without the maximum that a request may choose."""
    found: dict[str, Any] = msgspec.to_builtins(limits)
    del found["maximum"]
    return found


def load_limits(stored: dict[str, Any]) -> LimitSettings:
    """Return the limits of `dump_limits`."""
    return LimitSettings(**_filter(stored, LimitSettings.__struct_fields__))


def dump_environment(environment: Environment) -> dict[str, Any]:
    """Return an environment as a map."""
    return {
        "name": environment.name,
        "root": str(environment.root),
        "variables": dict(environment.variables),
    }


def load_environment(stored: dict[str, Any]) -> Environment:
    """Return the environment of `dump_environment`."""
    return Environment(stored["name"], Path(stored["root"]), stored["variables"])


def load_commit(stored: dict[str, Any]) -> Commit:
    """Return a commit of `attrs.asdict`."""
    modules = tuple(_load(Submodule, each) for each in stored["submodules"])
    return _load(Commit, {**stored, "submodules": modules})


def load_failure(stored: dict[str, Any] | None) -> EvaluationFailure | None:
    """Return the failure of `attrs.asdict`, or None."""
    return None if stored is None else _load(EvaluationFailure, stored)


def load_run_result(stored: dict[str, Any]) -> RunResult:
    """Return the result of a run, of `attrs.asdict`."""
    end = stored["exit_status"]
    return _load(
        RunResult,
        {
            **stored,
            "exit_status": None if end is None else _load(EvaluatorExit, end),
            "usage": _load(ResourceUsage, stored["usage"]),
        },
    )


def load_runner_status(stored: dict[str, Any] | None) -> RunnerStatus | None:
    """Return the runner's status of `RunnerStatus.build_json_object`, or None."""
    if stored is None:
        return None
    renamed = {"job_id": stored.get("job"), "retry_count": stored.get("retries", 0)}
    return _load(RunnerStatus, {**stored, **renamed})


def _load(kind: type[T], found: dict[str, Any]) -> T:
    """Return an instance of an attrs class; names that it does not have are ignored."""
    names = [field.name for field in attrs.fields(kind)]  # type: ignore[arg-type]
    return kind(**_filter(found, names))


def _filter(found: dict[str, Any], names: Any) -> dict[str, Any]:
    return {name: found[name] for name in names if name in found}
