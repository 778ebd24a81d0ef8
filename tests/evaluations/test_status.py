"""`evaluations.reading`: the status document."""

from __future__ import annotations

import json
from signal import SIGKILL
from typing import Any

from tawebeval.config import GIB, MIB
from tawebeval.core.form import Repository
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.reading import build_listing_entry, build_status
from tests.cases.evaluations import CANCELLED, EvaluationTestCase
from tests.fakes.world import OID, TREE


class StatusTests(EvaluationTestCase):
    def status(self, position: int | None = None) -> dict[str, Any]:
        document = build_status(self.evaluation, position)
        self.assertEqual(json.loads(json.dumps(document)), document)
        return document

    def test_queued_status_has_the_request_and_nulls(self) -> None:
        self.slot.shut = True
        self.begin()
        self.assertEqual(
            self.status(4),
            {
                "evaluation_id": "some",
                "log_name": "a6b46dd0d1ae5e86",
                "state": "queued",
                "queue_place": 4,
                "problem": None,
                "repository": "https://example.org/problem.git",
                "commit_oid": OID,
                "tree_oid": None,
                "directory": "",
                "evaluator_cmd": "./evaluate",
                "seed": 7,
                "environment": None,
                "limits": {
                    "wall_clock": 10,
                    "cpu": 300,
                    "memory": 512 * MIB,
                    "processes": 128,
                    "open_files": 256,
                    "file_size": 256 * MIB,
                    "disk": GIB,
                    "disk_files": 100_000,
                    "output": 256 * MIB,
                    "stderr": 64 * MIB,
                },
                "metadata": {},
                "created": "2023-11-14T22:13:20.000+00:00",
                "fetching": None,
                "running": None,
                "ended": None,
                "exit": None,
                "usage": None,
                "error": None,
                "results": None,
                "runner": None,
                "callback": None,
                "stderr": "",
                "events": {"buffered": 0, "discarded": 0},
                "buffered_bytes": 0,
            },
        )

    def test_running_status_has_tree_stderr_and_event_counts(self) -> None:
        self.begin()
        self.world.child.print(b"one\ntwo\nthree\n")
        self.world.child.complain(b"careful")
        self.evaluation.events.acknowledge(2)
        document = self.status()
        self.assertEqual((document["state"], document["queue_place"]), ("running", None))
        self.assertEqual((document["tree_oid"], document["stderr"]), (TREE, "careful"))
        self.assertEqual(document["events"], {"buffered": 3, "discarded": 2})
        self.assertEqual(document["buffered_bytes"], len(b"one\ntwo\nthree\n"))
        self.assertEqual((document["exit"], document["usage"]), (None, None))

    def test_status_has_the_results_so_far(self) -> None:
        self.begin()
        self.assertIsNone(self.status()["results"])
        environment = self.world.child.environment
        block = "{EVALUATION_DATA_BEGIN}\n%s\n{EVALUATION_DATA_END}\n".format(**environment)
        for value in (
            '{"type": "goal_result", "goal": "fast", "result": true}',
            '{"type": "case", "case": "1", "verdict": "partial"}',
            '{"type": "score", "score": 7.5, "maximum": 10}',
        ):
            self.world.child.print((block % value).encode())
        self.evaluation.events.acknowledge(3)
        shown = {
            "goals": {"fast": True},
            "goals_omitted": 0,
            "cases": {"partial": 1},
            "progress": None,
            "score": {"score": 7.5, "maximum": 10},
        }
        self.assertEqual(self.status()["results"], shown)
        self.world.child.end()
        self.world.turn()
        self.assertEqual(self.status()["results"], shown)
        self.assertEqual(build_listing_entry(self.evaluation.details)["results"], shown)

    def test_finished_status_has_exit_and_usage(self) -> None:
        self.begin()
        self.world.clock.advance(1.5)
        self.world.child.end()
        self.world.turn()
        document = self.status()
        self.assertEqual((document["state"], document["error"]), ("finished", None))
        self.assertEqual(document["exit"], {"status": 0, "signal": None})
        self.assertEqual(document["usage"]["wall_seconds"], 1.5)
        usage = self.world.child.resource_usage
        assert usage is not None
        used = round(usage.ru_utime + usage.ru_stime, 3)
        self.assertEqual(document["usage"]["cpu_seconds"], used)
        self.assertEqual(document["running"], "2023-11-14T22:13:20.000+00:00")
        self.assertEqual(document["ended"], "2023-11-14T22:13:21.500+00:00")

    def test_failed_status_has_the_error(self) -> None:
        self.begin()
        self.world.child.end(3)
        self.world.turn()
        document = self.status()
        self.assertEqual(document["state"], "failed")
        self.assertEqual(document["exit"], {"status": 3, "signal": None})
        self.assertEqual(
            document["error"],
            {
                "reason": "exit",
                "message": "the evaluator exited with status 3; it printed nothing",
            },
        )

    def test_evaluation_that_never_ran_has_neither_exit_nor_usage(self) -> None:
        self.slot.shut = True
        self.begin()
        self.evaluation.stop(CANCELLED)
        document = self.status()
        self.assertEqual((document["state"], document["exit"]), ("cancelled", None))
        self.assertEqual(document["error"]["reason"], "cancelled")
        self.assertEqual(document["usage"], None)

    def test_evaluation_ended_before_its_start_has_no_exit(self) -> None:
        self.begin()
        self.evaluation.stop(CANCELLED)
        self.world.sandbox.last.unstarted = EvaluationFailure("lost", "at its start")
        self.world.child.end(signal=SIGKILL)
        self.world.turn()
        document = self.status()
        self.assertEqual((document["state"], document["exit"]), ("cancelled", None))
        self.assertEqual(document["error"]["reason"], "cancelled")
        self.assertIsNot(document["usage"], None)

    def test_exit_by_a_signal_has_no_status(self) -> None:
        self.begin()
        self.world.child.end(signal=SIGKILL)
        self.world.turn()
        self.assertEqual(self.status()["exit"], {"status": None, "signal": 9})

    def test_status_tells_no_exit_while_orphans_are_ended(self) -> None:
        self.world.sandbox.orphan_reaper.shut = True
        self.begin()
        self.world.child.exit()
        self.assertEqual((self.status()["exit"], self.status()["state"]), (None, "running"))

    def test_repository_is_told_by_its_url_which_cannot_carry_credentials(self) -> None:
        (self.root / "upload").rename(self.mktemp())
        self.evaluation = self.make(repository=Repository("ssh://git@example.org/x"))
        self.begin()
        self.assertEqual(self.status()["repository"], "ssh://git@example.org/x")
