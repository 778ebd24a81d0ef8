"""What an operator sees: the log of a real daemon, its figures, whether it is ready."""

from __future__ import annotations

import json
from typing import Any

from tawebeval.sandbox.workspace import derive_log_pseudonym
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until


class ObservingTests(DaemonTestCase):
    configuration = CONFIGURATION + '[log]\nformat = "json"\naccess = true\n'

    def logged(self) -> list[dict[str, Any]]:
        """Return all that was logged: every line is an object."""
        return [json.loads(line) for line in self.daemon.lines]

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
