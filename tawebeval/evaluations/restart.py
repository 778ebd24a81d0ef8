"""What an earlier process of the daemon has left with the keeper.

`recover_evaluations` reads all journals before the daemon removes anything. What no journal names
is removed: processes, cgroups and directories of evaluations that had not begun, or had ended.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import attrs
import msgspec
from twisted.logger import Logger

from tawebeval.core.states import EvaluationState
from tawebeval.errors import ConfigurationError
from tawebeval.evaluations.handover_journal import JOURNAL_SUFFIX
from tawebeval.evaluations.journal import (
    EvaluationJournal,
    JournalContent,
    JournalError,
    UnknownJournalVersion,
)
from tawebeval.evaluations.run_keeper import (
    BROKER,
    CALLBACK,
    HEARTBEAT_BUNDLE_NAME,
    RUN,
    RunDescriptors,
    RunKeeper,
)
from tawebeval.evaluations.snapshot import (
    EvaluationSnapshot,
    RunSnapshot,
    UndeliveredCallback,
    unpack_snapshot,
    unpack_undelivered_callback,
)
from tawebeval.linux import keeper_owned_process
from tawebeval.linux.keeper_client import DescriptorBundle
from tawebeval.linux.launcher_client import is_launcher
from tawebeval.linux.reaper import list_children, list_descendants, send_signal
from tawebeval.sandbox.workspace import derive_directory_name

_UNREADABLE = (JournalError, msgspec.MsgspecError, LookupError, ValueError, OSError, struct.error)

log = Logger()


@attrs.frozen
class RecoveredEvaluation:
    """An evaluation of an earlier process of the daemon.

    `run_descriptors` and `broker_descriptors` are the descriptors of a run that goes on, None for
    others.
    """

    log_name: str
    journal: EvaluationJournal
    journal_content: JournalContent
    snapshot: EvaluationSnapshot
    run_descriptors: RunDescriptors | None = None
    broker_descriptors: RunDescriptors | None = None

    @property
    def state(self) -> EvaluationState:
        """The state in which it goes on."""
        state = EvaluationState(self.snapshot.state)
        if state.has_ended or self.run_descriptors is not None:
            return state
        return EvaluationState.QUEUED

    @property
    def has_no_evaluator(self) -> bool:
        """Whether it has neither ended nor an evaluator that goes on."""
        return self.state is EvaluationState.QUEUED

    @property
    def has_lost_evaluator(self) -> bool:
        """Whether clients may have seen events of an evaluator that is gone."""
        ran = self.snapshot.state == EvaluationState.RUNNING.value  # the form is not whole any more
        return self.has_no_evaluator and bool(
            ran or self.journal_content.batches or self.journal_content.begin_cursor
        )


@attrs.frozen
class RecoveredEvaluations:
    """All evaluations of an earlier process, in the order of their acceptance.

    `last_heartbeat` is the last time at which it was alive, in seconds of the monotonic clock.
    `undelivered_callbacks` are those that it had begun to deliver, by the names of their
    evaluations.
    """

    evaluations: Collection[RecoveredEvaluation] = ()
    last_heartbeat: float | None = None
    undelivered_callbacks: Mapping[str, UndeliveredCallback] = attrs.field(factory=dict)

    @property
    def last_sequence_number(self) -> int:
        """The greatest sequence number among them, at most that of all accepted so far."""
        return max((one.snapshot.sequence_number for one in self.evaluations), default=0)

    @property
    def directory_names(self) -> set[str]:
        """The names of directories of evaluations that are still needed."""
        return {derive_directory_name(one.snapshot.identifier) for one in self.evaluations}

    @property
    def upload_directory_names(self) -> set[str]:
        """The names of directories of uploaded files that are still needed."""
        return {
            one.snapshot.upload_directory
            for one in self.evaluations
            if one.snapshot.upload_directory
        }

    @property
    def cgroup_names(self) -> set[str]:
        """The names of cgroups in which an evaluator runs."""
        return {run.sandbox_description["group"] for run in self._runs}

    @property
    def quota_directories(self) -> set[Path]:
        """The quota directories of evaluators that run."""
        return {Path(run.quota_directory) for run in self._runs if run.quota_directory}

    @property
    def runner_kinds(self) -> set[str]:
        """The kinds of runner that have begun evaluators, also of those that do not go on."""
        return {one.snapshot.run.runner_kind for one in self.evaluations if one.snapshot.run}

    @property
    def _runs(self) -> list[RunSnapshot]:
        return [
            one.snapshot.run for one in self.evaluations if one.run_descriptors and one.snapshot.run
        ]


def recover_evaluations(keeper: RunKeeper, runner_kind: str = "local") -> RecoveredEvaluations:
    """Read what the keeper holds, and have it drop what is of no use. Blocks.

    `runner_kind` is `runner.kind`: evaluators of the other kind, under the limits of another
    machine, end. Raises: ConfigurationError, for a journal of an unknown version.
    """
    bundles = keeper.bundles
    found = []
    callbacks = dict[str, UndeliveredCallback]()
    for name, bundle in bundles.items():
        if name.endswith(CALLBACK):
            with suppress(msgspec.MsgspecError, IndexError):
                descriptor = bundle.descriptors[0]
                packed = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
                callbacks[name.removesuffix(CALLBACK)] = unpack_undelivered_callback(packed)
        if name.endswith(JOURNAL_SUFFIX):
            evaluation = _read_journal(
                name.removesuffix(JOURNAL_SUFFIX), bundle, bundles, runner_kind
            )
            if evaluation is not None:
                found.append(evaluation)
    _kill_unclaimed(keeper.address.pid, {bundle.pid for bundle in bundles.values()})
    used = {HEARTBEAT_BUNDLE_NAME, *keeper.address.launcher_bundles}
    for each in found:
        used.add(each.log_name + JOURNAL_SUFFIX)
        used.update(
            each.log_name + end for end in (RUN, BROKER) if each.run_descriptors is not None
        )
    for name, bundle in bundles.items():
        if name not in used:
            if name.removesuffix(CALLBACK) not in callbacks:
                keeper.client.drop_bundle(name)
            for descriptor in bundle.descriptors:
                os.close(descriptor)
    in_order = sorted(found, key=lambda each: each.snapshot.sequence_number)
    return RecoveredEvaluations(
        in_order, keeper.take_over_heartbeat(bundles.get(HEARTBEAT_BUNDLE_NAME)), callbacks
    )


def _kill_unclaimed(keeper: int, claimed: Collection[int]) -> None:
    """Kill evaluators that a daemon has started, and did not live to give to the keeper.

    `keeper` is the keeper's process. Where `ProtectProc=invisible` hides it, there are cgroups,
    which tell of these evaluators.
    """
    for pid in list_children(keeper):
        if pid not in claimed and not is_launcher(pid):
            log.warn("killed process {pid}, left by an earlier daemon", pid=pid)
            for one in (*list_descendants(pid), pid):
                send_signal(one, signal.SIGKILL)


def _read_journal(
    name: str, bundle: DescriptorBundle, bundles: Mapping[str, DescriptorBundle], kind: str
) -> RecoveredEvaluation | None:
    """Return the evaluation of a journal; None if the journal is damaged."""
    try:
        journal, content = EvaluationJournal.load(bundle.descriptors[0])
        snapshot = unpack_snapshot(content.snapshot)
    except UnknownJournalVersion as error:
        raise ConfigurationError(
            f"the journal of the evaluation {name} cannot be read: {error}",
            "install the release of tawebeval that ran before; or end all evaluations by"
            " `systemctl restart tawebeval-keeper`, which loses them",
        ) from None
    except _UNREADABLE as error:
        words = "{evaluation}: lost: the journal cannot be read: {error}"
        log.error(words, evaluation=name, error=error)  # noqa: TRY400
        return None
    run = bundles.get(name + RUN)
    if snapshot.state != EvaluationState.RUNNING.value or run is None:
        return RecoveredEvaluation(name, journal, content, snapshot)
    before = kind if snapshot.run is None else snapshot.run.runner_kind
    if before != kind:
        words = "{evaluation}: the evaluator ends: runner.kind was {before}, and is {now}"
        log.warn(words, evaluation=name, before=before, now=kind)
        return RecoveredEvaluation(name, journal, content, snapshot)
    broker = bundles.get(name + BROKER)
    try:
        kept = _unpack(run, content)
        kept_broker = None if broker is None else _unpack(broker)
    except _UNREADABLE as error:
        words = "{evaluation}: the evaluator is lost: the descriptors are not as expected: {error}"
        log.error(words, evaluation=name, error=error)  # noqa: TRY400
        return RecoveredEvaluation(name, journal, content, snapshot)
    return RecoveredEvaluation(name, journal, content, snapshot, kept, kept_broker)


def _unpack(bundle: DescriptorBundle, content: JournalContent | None = None) -> RunDescriptors:
    pidfd, stdout, stderr, output, errors, *others = bundle.descriptors
    process = keeper_owned_process.KeeperOwnedDescriptors(
        *(bundle.pid, pidfd, stdout, stderr, output, errors),
        stdout_offset=0
        if content is None or not content.batches
        else content.batches[-1].checkpoint.stdout_offset,
        stderr_offset=max(
            0, os.fstat(errors).st_size - keeper_owned_process.REPLAYABLE_STDERR_BYTES
        ),
    )
    return RunDescriptors(process, others)
