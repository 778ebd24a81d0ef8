"""The demo: all steps, one after the other, with a daemon of their own."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.error import ConnectError
from twisted.internet.task import react
from twisted.web.client import ResponseFailed

from demonstration.client import SubmittedFile, follow, submit
from demonstration.daemon import Daemon, DemonstrationError
from demonstration.page import keep_page, show_next_steps, shown, wants_page
from demonstration.problems import Problem, load_problems, make_repository
from demonstration.show import Viewer, say
from demonstration.steps import STEPS, Step, difference
from demonstration.unprivileged import USER, give, is_root

EVALUATION_SECONDS = 120
SEED = "2018"


class Demonstration:
    """One run through all steps."""

    def __init__(self, daemon: Daemon, repository_url: str, commit_oid: str) -> None:
        """Prepare a run with a daemon that may fetch the repository."""
        self.daemon = daemon
        self.repository_url = repository_url
        self.commit_oid = commit_oid
        self.problems = load_problems()
        self.evaluations = 0
        self.skipped = 0
        self.surprises: list[str] = []
        self.drawing: str | None = None
        """The identifier of the first evaluation with a drawing."""
        self.finished = False

    async def run(self, reactor: Any) -> None:
        """Go through the steps; on failure, print why and leave ``finished`` False."""
        try:
            await self.daemon.answering()
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
        """Send one submission, and print the events and whether they are as expected."""
        problem = self.problems[step.problem]
        heading = f"{number}/{len(STEPS)}  {problem.title}: {step.about}"
        say(f"\n{heading}\n{'-' * len(heading)}")
        missing = find_missing_program(problem, step)
        if step.cheats and self.daemon.without_sandbox is not None:
            missing = "sandbox that works"
        if missing is not None:
            say(f"    (skipped: this machine has no {missing})")
            self.skipped += 1
            return

        begun = time.monotonic()
        viewer = Viewer()
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
        what = "the text of " if step.typed else ""
        say(f"    submitting {what}{shown(problem.solution(step.solution))}")
        submitted = SubmittedFile(problem.field, content, name)
        evaluation_id = await submit(self.daemon.base_url, submitted, fields)
        await follow(self.daemon.base_url, evaluation_id, viewer.show)
        viewer.close()
        if viewer.files and self.drawing is None:
            self.drawing = evaluation_id

    def summary(self, seconds: float) -> str:
        """Return the result of all steps as one line."""
        if not self.finished:
            return f"The demo ended early, after {self.evaluations} evaluations."
        expected = self.evaluations - len(self.surprises)
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return (
            f"{self.evaluations} evaluations, {expected} of them as expected{skipped},"
            f" in {seconds:.1f} s."
        )


def find_missing_program(problem: Problem, step: Step) -> str | None:
    """Return a program that a step needs and this machine lacks, None without one."""
    return None if step.error else problem.missing_program(step.solution)


def demonstrate(folder: Path, keep: bool) -> bool:
    """Run the demo in a directory, and return whether all results are as expected.

    Afterwards the page stays open until Ctrl-C, if ``keep`` or the user says so; otherwise the
    commands to run next are printed.
    """
    begun = time.monotonic()
    repository = folder / "problems"
    commit_oid = make_repository(repository)
    give(folder, repository, repository / ".git")
    loaded = load_problems()
    missing = {step: find_missing_program(loaded[step.problem], step) for step in STEPS}
    possible = [step for step, program in missing.items() if program is None]
    problems = {step.problem for step in possible}
    say(f"This demo starts tawebeval on this machine, submits {len(possible)} solutions of")
    say(f"{len(problems)} problems, and shows what the evaluators print: text behind │, data")
    say("behind ▸. It takes about a minute.")
    for step, program in missing.items():
        if program is not None:
            say(f"Without {program} this is skipped: {loaded[step.problem].title}: {step.about}.")
    with Daemon(folder) as daemon:
        if daemon.without_sandbox is None:
            say("Evaluators run in a sandbox, without network access.")
            if is_root():
                say(f"As you are root, the daemon and its evaluators run as the user {USER}.")
        else:
            say("The sandbox does not work on this machine, so evaluators run without it. That is")
            say(
                f"good enough for this demo, but not for a server. Reason: {daemon.without_sandbox}"
            )
        demonstration = Demonstration(daemon, repository.as_uri(), commit_oid)
        with contextlib.suppress(SystemExit):  # react() ends so
            react(demonstration.run)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)  # the reactor's are of no use now
        say(f"\n{demonstration.summary(time.monotonic() - begun)}")
        kept = demonstration.finished and (keep or wants_page())
        if kept:
            keep_page(daemon, repository, commit_oid, demonstration.drawing)
        say("Stopping the daemon ... ", end="")
    say("stopped.")
    if demonstration.finished and not kept:
        show_next_steps(daemon, repository, commit_oid)
    return demonstration.finished and not demonstration.surprises
