"""The page that stays open after the demo, and the commands to run next."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from demonstration.daemon import Daemon
from demonstration.problems import EXAMPLES, PROBLEMS
from demonstration.show import say
from demonstration.unprivileged import user_options

EVALUATOR = ("-d", "word_count", "--evaluator", "bash evaluator.sh")
SOLUTION = Path("word_count", "solutions", "wrong_order.awk")

Command = tuple[str, list[list[str]]]
"""What a command does, and its words by lines."""


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
    """Print the page's address and what to do next, and wait until Ctrl-C.

    ``drawing`` is the identifier of an evaluation with a drawing. Raises:
    DemonstrationError (the daemon has ended).
    """
    say("\nOpen this page in a browser on this machine; it lists the evaluations above:")
    say(f"    {daemon.base_url}/#evaluations")
    if drawing is not None:
        say("This is the one with the drawing of a knight's tour:")
        say(f"    {daemon.base_url}/#evaluation/{drawing}")
    say("\nThings to do next, in another terminal:")
    show_commands(commands(daemon, repository, commit_oid))
    say("The page stays open until you press Ctrl-C here.")
    try:
        daemon.wait()
    except KeyboardInterrupt:
        say()


def show_next_steps(daemon: Daemon, repository: Path, commit_oid: str) -> None:
    """Print the commands that work without the daemon and its directory."""
    keep = ("See these evaluations in a page that stays open", [["make", "demo", "KEEP=1"]])
    _, judge = commands(daemon, repository, commit_oid)
    say("\nThings to do next:")
    show_commands([keep, judge] if daemon.without_sandbox is None else [keep])


def show_commands(commands: Sequence[Command]) -> None:
    """Print commands with their numbers, and the guides for teachers and operators."""
    for number, (about, lines) in enumerate(commands, start=1):
        command = " \\\n        ".join(shlex.join(line) for line in lines)
        say(f"\n{number}. {about}:\n\n    {command}")
    docs, number = EXAMPLES.parent / "docs", len(commands)
    say(f"\n{number + 1}. Write an evaluator of your own: read {shown(docs / 'evaluators.md')}")
    say(f"\n{number + 2}. Run a server: read {shown(docs / 'install.md')}")


def commands(daemon: Daemon, repository: Path, commit_oid: str) -> list[Command]:
    """Return two commands; the second needs no running daemon."""
    tawebeval = shown(Path(sys.executable).with_name("tawebeval"))
    settings = user_options()
    if daemon.without_sandbox is not None:
        settings = ["--config", str(daemon.configuration)]
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
                [tawebeval, "try", shown(PROBLEMS), *settings],
                [*EVALUATOR, shown(PROBLEMS / SOLUTION)],
            ],
        ),
    ]


def shown(path: Path) -> str:
    """Return a path as people type it: relative to the working directory, if it is below."""
    here = Path(os.getcwd())
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
