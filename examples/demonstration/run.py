"""The run through all steps, against a daemon that is started for it."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.error import ConnectError
from twisted.internet.task import react
from twisted.web.client import ResponseFailed

from demonstration.client import SubmittedFile, events_of, submit
from demonstration.daemon import Daemon, DemonstrationError
from demonstration.problems import EXAMPLES, Problem, load_problems, make_repository
from demonstration.show import Viewer, say
from demonstration.steps import STEPS, Step, difference
from demonstration.unprivileged import give

EVALUATION_SECONDS = 120
SEED = "2018"


class Demonstration:
    """One run through all steps."""

    def __init__(self, folder: Path, daemon: Daemon, repository_url: str, commit_oid: str) -> None:
        """Take what the steps share."""
        self.folder = folder
        self.daemon = daemon
        self.repository_url = repository_url
        self.commit_oid = commit_oid
        self.problems = load_problems()
        self.evaluations = 0
        self.skipped = 0
        self.surprises: list[str] = []
        self.finished = False

    async def run(self, reactor: Any) -> None:
        """Go through the steps; never raises, but leaves ``finished`` false."""
        try:
            await self.daemon.answering()
            say(f"The daemon answers at {self.daemon.base_url}")
            for number, step in enumerate(STEPS, start=1):
                await self.show_step(reactor, number, step)
            self.finished = True
        except DemonstrationError as error:
            say(f"\n{error}")
        except DeferredTimeout:
            say(f"\nThe evaluation took more than {EVALUATION_SECONDS} s.")
        except (ConnectError, ResponseFailed) as error:
            say(f"\nThe connection to the daemon is lost: {error}\n{self.daemon.log_tail()}")

    async def show_step(self, reactor: Any, number: int, step: Step) -> None:
        """Send one submission and show what comes of it."""
        problem = self.problems[step.problem]
        heading = f"{number}/{len(STEPS)}  {problem.title}: {step.about}"
        say(f"\n{heading}\n{'-' * len(heading)}")
        missing = None if step.error else problem.missing_program(step.solution)
        if missing is not None:
            say(f"    (skipped: this machine has no {missing})")
            self.skipped += 1
            return

        begun = time.monotonic()
        viewer = Viewer(self.folder / "files" / str(number))
        watching = Deferred.fromCoroutine(self.evaluate(problem, step, viewer))
        await watching.addTimeout(EVALUATION_SECONDS, reactor)
        self.evaluations += 1
        surprise = difference(step, problem, viewer.goals, viewer.files, viewer.error)
        if surprise is None:
            say(f"    as expected, in {time.monotonic() - begun:.1f} s")
        else:
            say(f"    NOT as expected: {surprise}")
            self.surprises.append(heading)

    async def evaluate(self, problem: Problem, step: Step, viewer: Viewer) -> None:
        """Start the evaluation of a step and follow its events."""
        content = problem.solution(step.solution).read_bytes()
        fields = {
            "repository[url]": self.repository_url,
            "commit_oid": step.commit_oid or self.commit_oid,
            "directory": problem.name,
            "evaluator_cmd": step.evaluator_cmd or problem.evaluator_cmd,
            "seed": SEED,
        }
        name = None if step.typed else step.solution
        if self.evaluations == 0:
            self.show_curl(problem, step, fields)
        what = "the text of " if step.typed else ""
        say(f"    sending {what}{problem.name}/solutions/{step.solution}")
        submitted = SubmittedFile(problem.field, content, name)
        evaluation_id = await submit(self.daemon.base_url, submitted, fields)
        if self.evaluations == 0:
            events_url = f"{self.daemon.base_url}/evaluation/{evaluation_id}/events"
            say("    and then again and again, each time after the `end` of the page before,")
            say(f"      curl '{events_url}?after=...'\n")
        async for event in events_of(self.daemon.base_url, evaluation_id):
            viewer.show(event)
        viewer.close()

    def show_curl(self, problem: Problem, step: Step, fields: dict[str, str]) -> None:
        """Show how the same is done from a shell."""
        parts = [
            f"submission[{problem.field}]=@{problem.solution(step.solution)}",
            *(f"{name}={value}" for name, value in fields.items()),
        ]
        say("    From a shell, the same is")
        for begin, part in zip(["curl", *[" " * 4] * len(parts)], parts, strict=False):
            say(f"      {begin} -F {shlex.quote(part)} \\")
        say(f"           {self.daemon.base_url}/evaluate")

    def summary(self, seconds: float) -> str:
        """Sum it all up in a line."""
        if not self.finished:
            return f"The demonstration ended early, after {self.evaluations} evaluations."
        expected = self.evaluations - len(self.surprises)
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return (
            f"{self.evaluations} evaluations, {expected} of them as expected{skipped},"
            f" in {seconds:.1f} s."
        )


def demonstrate(folder: Path) -> bool:
    """Run the demonstration in a folder, and say whether all went well."""
    begun = time.monotonic()
    repository = folder / "problems"
    commit_oid = make_repository(repository)
    give(folder, repository, repository / ".git")
    say(f"A git repository of {EXAMPLES.name}/problems is made: {repository.as_uri()}")
    say(f"Its commit is {commit_oid}")
    if shutil.which("g++") is None:
        say("This machine has no C++ compiler (g++): what needs one is skipped.")
    with Daemon(folder) as daemon:
        if daemon.without_sandbox is None:
            say("Evaluators run in a sandbox of bubblewrap, without a network.")
        else:
            say("The sandbox does not work here, so evaluators run without one, with all rights of")
            say("the daemon's user. For a demonstration that will do; do not serve strangers so.")
            say(f"The reason: {daemon.without_sandbox}")
        say(f"The daemon starts: {daemon.command_line}")
        demonstration = Demonstration(folder, daemon, repository.as_uri(), commit_oid)
        with contextlib.suppress(SystemExit):  # this is how react() returns
            react(demonstration.run)
        say("\nStopping the daemon ... ", end="")
    say("stopped.")
    say(demonstration.summary(time.monotonic() - begun))
    return demonstration.finished and not demonstration.surprises
