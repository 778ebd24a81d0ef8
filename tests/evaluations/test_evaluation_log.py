"""`evaluations.lifecycle`: lines in the log."""

from __future__ import annotations

import json
from typing import Any

from twisted.logger import LogEvent, capturedLogs, formatEvent

from tawebeval.core.evaluations import EvaluationState
from tawebeval.daemon.logging import format_json
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.reading import build_status
from tawebeval.evaluations.starting import load_details, make_row
from tawebeval.linux.cgroups import ResourceUsage
from tests.cases.evaluations import CANCELLED, EvaluationTestCase
from tests.fakes.world import EPOCH, OID


class StoryTests(EvaluationTestCase):
    def setUp(self) -> None:
        super().setUp()
        logs = capturedLogs()
        self.events: list[LogEvent] = logs.__enter__()
        self.addCleanup(logs.__exit__, None, None, None)

    def story(self) -> list[str]:
        """Return its lines, without the name, which each begins with and has as a field."""
        name = self.evaluation.details.log_name
        lines = []
        for event in self.events:
            line = formatEvent(event)
            self.assertTrue(line.startswith(f"{name}: "), line)
            self.assertEqual(event["evaluation"], name)
            self.assertEqual((event["caller"], event["commit"]), ("", OID))
            lines.append(line.removeprefix(f"{name}: "))
        return lines

    def test_each_step_has_its_line(self) -> None:
        self.slot.shut = self.world.repositories.gate.shut = True
        self.begin()
        self.world.clock.advance(1)
        self.slot.open()
        self.world.clock.advance(2)
        self.world.repositories.gate.open()
        self.world.child.print(b"one\n")
        self.world.clock.advance(3)
        self.world.child.end()
        self.world.turn()
        self.evaluation.enter(EvaluationState.DRAINED)
        story = self.story()
        self.assertEqual(story[0], f"queued; caller '', commit {OID}")
        self.assertEqual(story[1], "fetching after 1.000 s")
        self.assertTrue(story[2].startswith("running after 2.000 s; limits: 10 s, 300 s of"))
        self.assertTrue(story[3].startswith("finished after 3.000 s; 2 events"))
        self.assertEqual(story[4:], ["drained after 0.000 s"])
        states = [event["state"] for event in self.events]
        self.assertEqual(states, ["queued", "fetching", "running", "finished", "drained"])
        self.assertEqual([event.get("after") for event in self.events], [None, 1, 2, 3, 0])

    def test_bad_end_has_its_reason(self) -> None:
        self.begin()
        self.world.child.complain(b"{evaluation} %s {nothing}\n\x1b[2J")
        self.world.child.end(3)
        self.world.turn()
        stderr, failed = self.story()[-2:]
        self.assertEqual(stderr, r"end of stderr: '{evaluation} %s {nothing}\n\x1b[2J'")
        self.assertIn(": exit: the evaluator exited with status 3; 1 events", failed)
        self.assertEqual(self.events[-1]["reason"], "exit")

    def test_stray_marker(self) -> None:
        self.begin()
        begin = self.world.child.environment["EVALUATION_DATA_BEGIN"].encode()
        self.world.child.print(b"x" + begin + b"\n1\n")
        self.world.child.end()
        self.world.turn()
        self.assertIn("; EVALUATION_DATA_BEGIN is not at the start of a line", self.story()[-1])

    def test_value_that_does_not_count(self) -> None:
        self.begin()
        environment = self.world.child.environment
        value = '{"type": "goal_result", "goal": "x", "result": "{yes}"}'
        lines = environment["EVALUATION_DATA_BEGIN"], value, environment["EVALUATION_DATA_END"], ""
        self.world.child.print("\n".join(lines).encode())
        self.world.child.end()
        self.world.turn()
        words = '"goal_result" does not count as a result: "result" is "{yes}"; write true or false'
        self.assertTrue(self.story()[-1].endswith(words), self.story()[-1])

    def test_evaluation_that_never_ran_used_nothing(self) -> None:
        self.slot.shut = True
        self.begin()
        self.evaluation.stop(CANCELLED)
        self.assertEqual(
            self.story()[-1], "cancelled after 0.000 s: cancelled: the evaluation was cancelled"
        )

    def test_what_is_not_measured(self) -> None:
        for number, (usage, told) in enumerate(
            (
                (ResourceUsage(None, None), "; 0 events"),
                (ResourceUsage(1.5, None), "; 0 events, 1.500 s of processor time"),
                (ResourceUsage(None, 7 * 2**20), "; 0 events, 7 MiB of memory"),
            )
        ):
            self.root = self.root.with_name(f"evaluation{number}")
            self.evaluation = self.make()
            self.begin()
            self.world.sandbox.last.run_limits.used = usage
            self.world.child.exit()
            self.world.child.resource_usage = None
            self.world.child.close()
            self.world.turn()
            self.assertEqual(
                self.story()[-1],
                f"finished after 0.000 s{told}; the evaluator printed nothing",
            )
            fields = {
                "cpu_seconds": usage.cpu_seconds,
                "peak_memory_bytes": usage.peak_memory_bytes,
            }
            for field, value in fields.items():
                self.assertEqual(self.events[-1].get(field), value)
                self.assertEqual(field in self.events[-1], value is not None)
            self.events.clear()

    def test_times_and_durations_do_not_follow_the_clock(self) -> None:
        times = iter((50.0, 1e9, 60.0))
        object.__setattr__(self.evaluation.context, "read_wall_clock", lambda: next(times))
        self.begin()
        self.world.clock.advance(10)
        found, first = load_details(make_row(self.evaluation), None), self.evaluation
        later = Evaluation(found, first.workspace, first.context, first.events)
        self.assertEqual(later.read_clock(), EPOCH + 10)
        self.world.end()
        self.assertEqual([event.get("after") for event in self.events], [None, 0, 0, 10])
        self.assertEqual(
            [
                self.evaluation.details.state_times[name]
                for name in ("created", "fetching", "running", "ended")
            ],
            [EPOCH, EPOCH, EPOCH, EPOCH + 10],
        )

    def test_log_has_no_identifier(self) -> None:
        self.evaluation.details.identifier = "z" * 40
        self.begin()
        self.world.child.complain(b"oops")
        self.evaluation.stop(EvaluationFailure("lost", "nobody asked for the events"))
        self.world.end()
        self.assertNotIn("z" * 40, "".join(map(format_json, self.events)))
        document: dict[str, Any] = build_status(self.evaluation, None)
        named = {json.loads(format_json(event))["evaluation"] for event in self.events}
        self.assertEqual(named, {document["log_name"]})
