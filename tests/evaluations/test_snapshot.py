"""`evaluations.snapshot`: the keys that journals have, whatever the attributes are called."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec
from tawebeval.evaluations.snapshot import (
    CallbackSnapshot,
    EvaluationSnapshot,
    RunSnapshot,
    UndeliveredCallback,
    dump_limits,
    load_limits,
    load_runner_status,
)
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import LimitSettings
from tawebeval.core.checkout import Commit, Submodule
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.run import RunProgress, RunResult
from tawebeval.linux.cgroups.manager import ResourceUsage
from tawebeval.sandbox.base import EvaluatorExit, RunnerStatus

KEYS: dict[type[msgspec.Struct], str] = {
    CallbackSnapshot: "url state attempts last_error event",
    UndeliveredCallback: "url caller event document",
    RunProgress: "time_left paused owed is_paused output_bytes stderr_bytes is_suspended",
    RunSnapshot: "pid checkout markers sandbox progress moment quota_directory",
    EvaluationSnapshot: "identifier request seed state number caller upload upload_size share"
    " keeps_submission is_submission_kept is_cleaned_up is_forgotten key form_digest times callback"
    " commit limits environment run result results failure newest last_event runner"
    " clock_offset",
}
ATTRIBUTES: dict[type[attrs.AttrsInstance], str] = {
    Commit: "oid tree_oid file_count size submodules has_gitattributes",
    Submodule: "path oid url",
    EvaluationFailure: "reason message extra_members is_daemon_fault",
    RunResult: "exit_status usage paused_seconds stderr_tail stray_marker_advice",
    EvaluatorExit: "status signal",
    ResourceUsage: "cpu_seconds peak_memory_bytes",
}
LIMITS = (
    "request_body uploads fields field wall_clock cpu memory processes open_files file_size disk"
    " disk_files free_disk output stderr data_value file"
)


class KeyTests(SynchronousTestCase):
    """A daemon reads the journals of the release before it."""

    def test_keys(self) -> None:
        """Each structure is stored under the keys of all releases, in their order."""
        for kind, keys in KEYS.items():
            fields: Any = msgspec.structs.fields(kind)
            self.assertEqual(" ".join(field.encode_name for field in fields), keys)

    def test_runner_status(self) -> None:
        """The status of a runner is stored under the names of the API, and read again."""
        status = RunnerStatus("slurm", "5", "one", "Resources", 2)
        stored = {
            "kind": "slurm",
            "job": "5",
            "node": "one",
            "queue_reason": "Resources",
            "retries": 2,
        }
        self.assertEqual(status.build_json_object(), stored)
        self.assertEqual(load_runner_status(stored), status)
        self.assertEqual(load_runner_status({"kind": "slurm"}), RunnerStatus("slurm"))
        self.assertIsNone(load_runner_status(None))

    def test_attributes(self) -> None:
        """What other packages define is stored under the names of its attributes."""
        for kind, names in ATTRIBUTES.items():
            self.assertEqual(" ".join(field.name for field in attrs.fields(kind)), names)

    def test_limits(self) -> None:
        """Limits are stored under the keys of the configuration, and read again."""
        limits = LimitSettings(wall_clock=7, cpu=5, memory=2**30, data_value=1000)
        stored = dump_limits(limits)
        self.assertEqual(" ".join(stored), LIMITS)
        self.assertEqual(load_limits(stored), limits)
