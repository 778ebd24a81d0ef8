"""The page that stays open after the demo, and the commands to try next."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from demonstration.daemon import Daemon
from demonstration.problems import EXAMPLES, PROBLEMS
from demonstration.show import say
from demonstration.unprivileged import is_root

EVALUATOR = ("-d", "word_count", "--evaluator", "bash evaluator.sh")
SOLUTION = Path("word_count", "solutions", "wrong_order.awk")


def wants_page() -> bool:
    """Ask on a terminal whether to keep the page open; without a terminal return False."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        answer = input("\nKeep the page with these evaluations open? [Y/n] ")
    except EOFError:
        return False
    return answer.strip().lower() in ("", "y", "yes")


def keep_page(daemon: Daemon, repository: Path, commit_oid: str, drawing: str | None) -> None:
    """Print the page's address and three commands, and wait until Ctrl-C.

    ``drawing`` is the identifier of an evaluation with a drawing. Raises:
    DemonstrationError (the daemon has ended).
    """
    say("\nOpen this page in a browser on this machine; it lists the evaluations above:")
    say(f"    {daemon.base_url}/#evaluations")
    if drawing is not None:
        say("This is the one with the drawing of a knight's tour:")
        say(f"    {daemon.base_url}/#evaluation/{drawing}")
    say("\nThree things to do next, in another terminal:")
    for number, (about, lines) in enumerate(commands(daemon, repository, commit_oid), start=1):
        command = " \\\n        ".join(shlex.join(line) for line in lines)
        say(f"\n{number}. {about}:\n\n    {command}")
    guide = shown(EXAMPLES.parent / "docs" / "evaluators.md")
    say(f"\nTo write an evaluator of your own, read {guide}.")
    say("The page stays open until you press Ctrl-C here.")
    try:
        daemon.wait()
    except KeyboardInterrupt:
        say()


def commands(
    daemon: Daemon, repository: Path, commit_oid: str
) -> list[tuple[str, list[list[str]]]]:
    """Return three commands, each with what it does and its words by lines."""
    tawebeval = shown(Path(sys.executable).with_name("tawebeval"))
    is_usual = not is_root() and daemon.without_sandbox is None
    settings = [] if is_usual else ["--config", str(daemon.configuration)]
    # The user that root's `try` becomes may have no access to the checkout.
    problems = repository if is_root() else PROBLEMS
    return [
        (
            "Submit a solution to this daemon; the evaluation appears in the page",
            [
                [tawebeval, "evaluate", "--detach", "--server", daemon.base_url],
                ["--repository", repository.as_uri(), "--commit", commit_oid],
                [*EVALUATOR, shown(PROBLEMS / SOLUTION)],
            ],
        ),
        (
            "Judge the solution without a daemon; correct it, and judge it again",
            [
                [tawebeval, "try", shown(problems), *settings],
                [*EVALUATOR, shown(problems / SOLUTION)],
            ],
        ),
        (
            "Check whether this machine can run a server; docs/install.md has the next steps",
            [[tawebeval, "doctor"]],
        ),
    ]


def shown(path: Path) -> str:
    """Return a path as people type it: relative to the working directory, if it is below."""
    here = Path(os.getcwd())
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
