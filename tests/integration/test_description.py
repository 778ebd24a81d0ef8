"""The description of the API, as schemathesis reads it, held against the real daemon."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from twisted.internet import reactor
from twisted.internet.utils import getProcessOutputAndValue

from tests.cases.described import operations
from tests.integration.harness import CONFIGURATION, DaemonTestCase

SETTINGS = Path(__file__).with_name("schemathesis.toml")
SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
ROOT = Path(__file__).resolve().parent.parent.parent

REACHED = {"200", "404", "415", "422"}
"""Of the statuses that are described, those to which made-up requests lead for certain."""

OTHERWISE_CONFIGURED = {"GET /metrics 404"}
"""What is among these, but only where the operator lets nobody have the metrics."""

UNREACHED = {"evaluateProblem", "makeLink", "readProblem", "readSubmission", "rerun"}
"""Operations on what made-up requests do not name: a problem, an evaluation with its files.

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
            if operation["operationId"] in UNREACHED:
                continue
            for status in REACHED & set(operation["responses"]):
                answer = f"{method} {path} {status}"
                if answer not in OTHERWISE_CONFIGURED:
                    self.assertIn(answer, answers)
        for more in ("POST /evaluate 400", "GET /evaluation/{id}/events 400"):
            self.assertIn(more, answers)
