"""`evaluations.snapshot`: the keys that journals have, whatever the attributes are called."""

from __future__ import annotations

from typing import Any

import msgspec
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.evaluations.run import RunProgress
from tawebeval.evaluations.snapshot import (
    CallbackSnapshot,
    EvaluationSnapshot,
    RunSnapshot,
    UndeliveredCallback,
    load_runner_status,
)
from tawebeval.sandbox.base import RunnerStatus

KEYS: dict[type[msgspec.Struct], str] = {
    CallbackSnapshot: "url state attempts last_error event",
    UndeliveredCallback: "url caller event document",
    RunProgress: "time_left paused owed is_paused output_bytes stderr_bytes is_suspended",
    RunSnapshot: "pid checkout markers sandbox progress moment quota_directory",
    EvaluationSnapshot: "identifier request seed state number caller upload upload_size share"
    " keeps_submission is_submission_kept is_cleaned_up is_forgotten key form_digest times callback"
    " commit limits environment run result results failure newest last_event runner",
}


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
