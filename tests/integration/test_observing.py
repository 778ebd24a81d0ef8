"""What an operator sees: the log of a real daemon, its figures, whether it is ready."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from twisted.internet import reactor
from twisted.internet.task import deferLater

from tawebeval.sandbox.workspace import derive_log_pseudonym
from tawebeval.web.context import MAX_METRICS_AGE
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until


class ObservingTests(DaemonTestCase):
    configuration = CONFIGURATION + '[log]\nformat = "json"\naccess = true\n'

    def logged(self) -> list[dict[str, Any]]:
        """Return all that was logged: every line is an object."""
        return [json.loads(line) for line in self.daemon.lines]

    async def figures(self) -> dict[str, float]:
        """Return the figures as Prometheus would read them, by name and values of labels."""
        await deferLater(reactor, MAX_METRICS_AGE)
        answer = await self.client.get("/metrics")
        assert answer.code == 200, answer
        return {
            " ".join((sample.name, *sample.labels.values())): sample.value
            for family in text_string_to_metric_families(answer.body.decode())
            for sample in family.samples
        }

    async def test_log_tells_the_story_without_identifiers(self) -> None:
        identifier = await self.begin("echo one; echo '{state} %s' >&2; exit 3")
        name = derive_log_pseudonym(identifier)
        await self.client.follow(identifier)

        def drained() -> list[dict[str, Any]]:
            story = [line for line in self.logged() if line.get("evaluation") == name]
            return story if story and story[-1]["state"] == "drained" else []

        story = await until(drained, "the story ends")
        states = [line["state"] for line in story if "stderr" not in line]
        self.assertEqual(states, ["queued", "fetching", "running", "failed", "drained"])
        for line in story:
            self.assertEqual((line["commit"], line["caller"]), (self.commit, ""))
            self.assertTrue(line["message"].startswith(f"{name}: "))
        (failed,) = (line for line in story if line["state"] == "failed")
        self.assertEqual((failed["reason"], failed["events"]), ("exit", 3))
        (stderr,) = (line["stderr"] for line in story if "stderr" in line)
        self.assertEqual(stderr, "{state} %s\n")
        paths = [line["path"] for line in self.logged() if "path" in line and "client" in line]
        self.assertIn(f"/evaluation/{name}/events", paths)
        self.assertIn("/evaluate", paths)
        self.assertNotIn(identifier, self.daemon.log)

    async def test_metrics_count_what_was_done(self) -> None:
        before = await self.figures()
        events = await self.run_command("exit 3")
        self.assertEqual(events[-1]["payload"]["reason"], "exit")
        after = await self.figures()
        for name in (
            "tawebeval_evaluations_accepted_total",
            "tawebeval_evaluations_ended_total exit failed",
            "tawebeval_stage_seconds_count running",
            "tawebeval_requests_total POST /evaluate 200",
            "tawebeval_fetches_total fetched",
        ):
            self.assertEqual(after[name], before.get(name, 0) + 1, name)
        self.assertGreater(after["process_open_fds"], 5)
        self.assertGreater(after["process_resident_memory_bytes"], 10e6)
