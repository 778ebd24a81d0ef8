"""The description of the API, as schemathesis reads it, held against the real daemon."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.utils import getProcessOutputAndValue

from tawebeval.web.events import OFFERED_MEDIA_TYPES
from tests.cases.described import check, merged, operations
from tests.fakes.clients import Answer
from tests.integration.harness import CONFIGURATION, DaemonTestCase

SETTINGS = Path(__file__).with_name("schemathesis.toml")
SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
ROOT = Path(__file__).resolve().parent.parent.parent

REACHED = {"200", "404", "415", "422"}
"""Of the statuses that are described, those to which made-up requests lead for certain."""

OTHERWISE_CONFIGURED = {"GET /metrics 404", "HEAD /metrics 404"}
"""What is among these, but only where the operator lets nobody have the metrics."""

UNREACHED = {"evaluateProblem", "makeLink", "readProblem", "rerun"}
"""Operations on what made-up requests do not name: a problem, an evaluation that has ended.

And `makeLink`, to which no link of the description leads: more links would be followed less often.
"""


class DescriptionTests(DaemonTestCase):
    """One daemon, without a sandbox: no evaluator here does any harm."""

    configuration = (
        CONFIGURATION.replace("running = 4", "running = 4\nqueued = 1000")
        + '[sandbox]\nkind = "none"\n[polls]\nwait = 1\n'
    )

    async def test_answers_to_generated_requests_match_the_description(self) -> None:
        answers = self.folder / "answers"
        settings = {
            "url": self.daemon.url,
            "evaluator": {
                "repository[url]": self.repository.url,
                "commit_oid": self.commit,
                "evaluator_cmd": "echo ready",
                "callback_url": "",
            },
            "answers": str(answers),
        }
        output, errors, status = await getProcessOutputAndValue(
            str(SCHEMATHESIS),
            ["--config-file", str(SETTINGS), "run", f"{self.daemon.url}/openapi.json"],
            env={
                **os.environ,
                "SCHEMATHESIS_HOOKS": "tests.integration.schemathesis_hooks",
                "TAWEBEVAL_SCHEMATHESIS": json.dumps(settings),
                "PYTHONPATH": str(ROOT),
                "NO_PROXY": "127.0.0.1",
            },
            path=str(self.folder),
            reactor=reactor,
        )
        self.assertEqual(status, 0, (output + errors).decode(errors="replace"))
        self.check_reach(set(answers.read_text().splitlines()))

    def check_reach(self, answers: set[str]) -> None:
        """Hold that each operation was brought to its answers, as far as it can be in this way."""
        for method, path, operation in operations():
            if operation["operationId"].removesuffix("Head") in UNREACHED:
                continue
            # What has an identifier is followed to HEAD by no link.
            reached = REACHED - ({"200"} if method == "HEAD" and "{id}" in path else set())
            for status in reached & set(operation["responses"]):
                answer = f"{method} {path} {status}"
                if answer not in OTHERWISE_CONFIGURED:
                    self.assertIn(answer, answers)
        for more in ("POST /evaluate 400", "GET /evaluation/{id}/events 400"):
            self.assertIn(more, answers)

    async def test_each_way_of_following_matches_the_description(self) -> None:
        identifier = await self.begin("echo one; echo two")
        await self.client.ended(identifier)
        path = f"/evaluation/{identifier}/events"
        for media_type in OFFERED_MEDIA_TYPES:
            await self.ask(200, path, media_type)
        await self.ask(406, path, "text/html")
        await self.ask(200, f"{path}?after=2", "application/json")
        await self.ask(410, f"{path}?after=1", "application/json")
        await self.ask(204, f"{path}?after=end", "text/event-stream")
        await self.ask(200, f"{path}?after=end", "application/json")
        await self.ask(410, f"{path}?after=2", "text/event-stream")
        await self.ask(410, f"/evaluation/{identifier}", "*/*")

    async def test_reruns_match_the_description(self) -> None:
        running = await self.begin("exec sleep 300")
        ended = await self.begin("echo one")
        await self.client.ended(ended)
        for identifier, status in ((running, 409), (ended, 200), ("x" * 40, 404)):
            await self.rerun(identifier, status)
        await self.rerun(ended, 415, {"Content-Type": "text/plain"}, b"x")
        await self.ask(200, f"/evaluation/{ended}/events?after=end", "application/json")
        await self.rerun(ended, 410)
        await self.client.cancel_all()

    async def rerun(self, identifier: str, status: int, *more: Any) -> None:
        """Hold that a rerun is answered with this status, and as it is described."""
        path = f"/evaluation/{identifier}/rerun"
        headers, data = more or ({}, b"")
        answer = await self.client.request("POST", path, headers=headers, data=data)
        self.assertEqual(answer.code, status, answer.body)
        check("POST", path, Answer(answer.code, merged(answer.headers), answer.body))

    async def ask(self, status: int, path: str, accept: str) -> None:
        """Hold that a GET is answered with this status, and as it is described."""
        answer = await self.client.get(path, headers={"Accept": accept})
        self.assertEqual(answer.code, status)
        check("GET", path, Answer(answer.code, merged(answer.headers), answer.body))
