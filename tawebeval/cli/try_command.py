"""`tawebeval try`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import click

from tawebeval.admission import Queue
from tawebeval.cli.evaluate import DIRECTORY, EVALUATOR, FIELDS, FILES, LINES, SEED
from tawebeval.cli.fields import Submission
from tawebeval.cli.follow import show
from tawebeval.cli.interrupting import hold_out, interrupted, unwinding
from tawebeval.cli.operate import CONFIG
from tawebeval.cli.output import Screen
from tawebeval.cli.raw import OverhearingSpawner
from tawebeval.cli.runtime import WRONG, make_screen, run_reactor
from tawebeval.cli.saving import Folder
from tawebeval.cli.scratch import scratch
from tawebeval.cli.streams import OutputLost
from tawebeval.cli.try_evaluation import Attempt, Bench, pages
from tawebeval.client.events import EvaluationError as ErrorEvent
from tawebeval.client.events import Event
from tawebeval.core.form import draw_seed
from tawebeval.daemon.preload import preload
from tawebeval.daemon.reconfiguring import read_configuration
from tawebeval.daemon.startup import check_readable
from tawebeval.deferreds import completed
from tawebeval.errors import ConfigurationError, EvaluationError
from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.linux.cgroups.group import open_cgroups
from tawebeval.linux.child import Spawner
from tawebeval.linux.kernel import Process
from tawebeval.linux.privileges import Privileges, find_privileges


@click.command("try")
@click.argument(
    "root",
    metavar="DIRECTORY",
    type=click.Path(exists=True, file_okay=False, path_type=Path, resolve_path=True),
)
@FIELDS
@EVALUATOR
@DIRECTORY
@SEED
@CONFIG
@click.option("--user", help="For root: whom to become, instead of service.user.")
@click.option("--raw", is_flag=True, help="Show what is printed, with the blocks marked.")
@FILES
@LINES
def try_(
    root: Path,
    fields: Submission,
    evaluator: str,
    directory: str | None,
    seed: int | None,
    config: Path | None,
    user: str | None,
    raw: bool,
    folder: Folder | None,
    lines: bool,
) -> None:
    """Evaluate by a working directory on this machine, with no server and no commit.

    DIRECTORY stands for the repository: a copy of it is what the evaluator sees, so that it never
    changes. The sandbox, the limits and the reading of what is printed are those of the daemon,
    with the settings of --config. FIELDs, --files, --events and the exit status are those of
    `tawebeval evaluate`. Neither git nor a commit is needed.

    \b
      tawebeval try . --evaluator 'python3 evaluator.py' solutions/right.py
      tawebeval try problems -d word_count --evaluator 'bash evaluator.sh' solution.awk
    What does the evaluator really print?
      tawebeval try . --raw --evaluator ./evaluate solution.py

    Root has to become somebody else, whom --user or the configuration names, and who can read
    DIRECTORY and the files.
    """  # noqa: D301
    if raw and lines:
        raise click.UsageError("--raw and --events are two ways to show the same: choose one")
    screen = make_screen(lines=lines)
    seed = draw_seed(os.urandom) if seed is None else seed
    attempt = Attempt(root, directory or "", evaluator, seed, fields)
    # Imported late: it installs the reactor.
    from twisted.internet import reactor

    with _refusals():
        configuration = read_configuration(config)
        privileges = _privileges(user or configuration.service.user)
        check_readable(configuration, config, privileges.environment(os.environ))
        if privileges.user is not None:
            preload()
    with unwinding(), ExitStack() as made:
        cgroups = open_cgroups(f"try-{os.getpid()}", _owner(privileges))
        made.callback(cgroups.close)
        cgroups.remove_left(_is_left)
        with privileges.acting():
            place = made.enter_context(scratch())
        made.callback(hold_out)  # until all of it is removed
        with _refusals():
            spawn = OverhearingSpawner(reactor, screen) if raw else Spawner(reactor)
            bench = Bench.open(configuration, root, place, cgroups, spawn, reactor)
            privileges.step_down()
            privileges.renounce()
        if configuration.sandbox.kind == "none":
            screen.note("warning: there is no sandbox (sandbox.kind)", "yellow")
        trial = Trial(attempt, bench, screen, folder, raw)
        # Somebody in a hurry has to wait until everything is removed, which is not long.
        run_reactor(screen, trial.run, again=lambda: None)


@attrs.frozen
class Trial:
    """An attempt that is made and shown; `raw` as it was printed."""

    _attempt: Attempt
    _bench: Bench
    _screen: Screen
    _folder: Folder | None
    _raw: bool

    async def run(self, reactor: Any) -> int:
        """Make it; return the exit status."""
        try:
            with self._bench.running():
                return await self._attend(self._bench.prepare(self._attempt), reactor)
        except SystemExit as error:  # the sandbox does not work
            self._screen.note(str(error).removeprefix("tawebeval: "), "red")
            return WRONG

    async def _attend(self, evaluation: Evaluation, reactor: Any) -> int:
        """Let it happen, and show it."""

        def stop() -> None:
            evaluation.stop(EvaluationError("cancelled", "the evaluation was cancelled"))

        def kill() -> None:
            stop()
            if evaluation.run is not None:
                evaluation.run.kill()

        unread: OutputLost | None = None
        told = False  # by the last event, what was on stderr

        def see(event: Event) -> None:
            nonlocal told
            told = isinstance(event, ErrorEvent) and "stderr" in event.members
            self._show(event)

        def nobody_reads(why: OutputLost) -> None:
            nonlocal unread
            unread = why
            stop()

        spawn = self._bench.surroundings.spawn
        if isinstance(spawn, OverhearingSpawner):
            spawn.markers, spawn.unread = lambda: evaluation.markers, nobody_reads
        with interrupted(stop, reactor, again=kill):
            evaluation.begin(Queue(running=1, queued=0))
            try:
                status = await show(pages(evaluation), self._screen, see, self._folder)
            finally:
                stop()  # if it goes on although nobody reads what is shown
                await completed(evaluation.over)
        if unread is not None:
            raise unread
        result = evaluation.result
        if result is not None and result.stderr and not told:
            lines = result.stderr.removesuffix("\n").split("\n")
            self._screen.note("\n".join(("stderr:", *(f"  {line}" for line in lines))))
        return status

    def _show(self, event: Event) -> None:
        if not self._raw or isinstance(event, ErrorEvent):
            self._screen.show(event)


def _privileges(user: str) -> Privileges:
    try:
        return find_privileges(user, Process())
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} (here also --user)") from None


def _is_left(name: str) -> bool:
    """Tell whether a place for groups is that of a trial that has been killed."""
    found = re.fullmatch(r"tawebeval-try-(\d+)", name)
    return found is not None and not Path("/proc", found[1]).exists()


def _owner(privileges: Privileges) -> tuple[int, int] | None:
    user = privileges.user
    return (user.uid, user.gid) if user is not None else None


@contextmanager
def _refusals() -> Iterator[None]:
    """Let what the daemon would not start with be a wrong command."""
    try:
        yield
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None
    except SystemExit as error:
        raise click.UsageError(str(error).removeprefix("tawebeval: ")) from None
