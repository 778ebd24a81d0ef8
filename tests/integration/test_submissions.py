"""Runs of submissions by `tawebeval-run`, in a sandbox beside the evaluator's."""

from __future__ import annotations

import json

from tests.integration.client import text
from tests.integration.harness import DaemonTestCase


class SubmissionRuns(DaemonTestCase):
    """What an evaluator gets of a run."""

    async def test_first(self) -> None:
        """The program gets stdin, prints, and ends with a status, which the report has."""
        events = await self.run_command(
            "echo hello | tawebeval-run --time 5 --wall 10 --memory 64M --report ~/r -- /bin/sh -c"
            " 'cat; pwd; ls -l /proc/self/fd >&2; id -u; ls /; ls /evaluation; env; exit 3' ; echo status $?; cat ~/r"
        )
        print(text(events), events[-1])
