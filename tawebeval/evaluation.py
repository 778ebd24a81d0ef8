"""One evaluation: its life from being queued to its end, and what can be known of it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from tawebeval.budget import Budget, Share
from tawebeval.callback import Callback
from tawebeval.callers import ANYBODY
from tawebeval.checkouts import Checkout
from tawebeval.chronicle import tell_beginning, tell_stderr, tell_step
from tawebeval.commits import Commit
from tawebeval.config import Configuration
from tawebeval.errors import EvaluationError
from tawebeval.events import encode_error
from tawebeval.fileblock import WantedFile
from tawebeval.form import EvaluationRequest, Repository
from tawebeval.intake import Intake
from tawebeval.life import State, step
from tawebeval.markers import Markers
from tawebeval.process import Spawner
from tawebeval.removal import remove
from tawebeval.ring import Ring
from tawebeval.run import Run
from tawebeval.sandbox import Cell, Sandbox
from tawebeval.segi import Parser
from tawebeval.signals import Latch, Signal, Threads, completed
from tawebeval.tally import EvaluationTally
from tawebeval.watch import Watch
from tawebeval.workspace import View, Workspace, log_name

log = Logger()


class Source(Protocol):
    """Where commits come from."""

    async def check_out(self, repository: Repository, oid: str, caller: str) -> Checkout:
        """Return the commit and its tree, for the caller to release. Raises EvaluationError."""


@attrs.frozen
class Surroundings:
    """What evaluations need from the world, handed in."""

    configuration: Configuration
    clock: Any
    random: Callable[[int], bytes]
    threads: Threads
    spawn: Spawner
    repositories: Source
    sandbox: Sandbox
    watch: Watch
    budget: Budget
    time: Callable[[], float] = time.time
    tally: EvaluationTally = attrs.field(factory=EvaluationTally)


@attrs.define(eq=False)
class Evaluation:
    """One run of an evaluator on one submission.

    `slot` is awaited before anything is done, and `release` called when the slot is free
    again. `seed` is the one given or drawn, `caller` who began it. Times are in seconds since
    the epoch.
    """

    identifier: str
    request: EvaluationRequest
    seed: int
    upload: Path
    workspace: Workspace
    _surroundings: Surroundings
    caller: str = ANYBODY
    ring: Ring = attrs.field(factory=Ring)
    share: Share = attrs.field(init=False)
    state: State = State.QUEUED
    failure: EvaluationError | None = None
    callback: Callback | None = None
    commit: Commit | None = None
    run: Run | None = None
    markers: Markers | None = None
    times: dict[str, float] = attrs.field(factory=dict)
    _since: float = 0.0  # of its state
    changed: Signal[None] = attrs.field(factory=Signal)
    over: Latch[None] = attrs.field(factory=Latch)
    _intake: Intake | None = None
    _checkout: Checkout | None = None
    _cell: Cell | None = None
    _stopped: EvaluationError | None = None
    _life: Deferred[None] | None = None

    def __attrs_post_init__(self) -> None:
        self.share = self._surroundings.budget.enter(self.caller)

    @property
    def name(self) -> str:
        """What the log calls it."""
        return log_name(self.identifier)

    def begin(self, slot: Callable[[], Awaitable[None]], release: Callable[[], None]) -> None:
        """Come to life. `over` is set when nothing is left of it but its events."""
        self._since = self.times["created"] = self._surroundings.time()
        self._surroundings.tally.begin()
        tell_beginning(self)
        self._life = Deferred.fromCoroutine(self._live(slot, release)).addErrback(
            lambda failure: log.failure("{evaluation}: a defect", failure, evaluation=self.name)
        )

    def stop(self, reason: EvaluationError) -> None:
        """End it for that reason, which becomes its final event. One that has ended stays so."""
        if self._stopped is None and not self.state.ended:
            self._stopped = reason
            assert self._life is not None
            self._life.cancel()

    def acknowledged(self) -> None:
        """Events were discarded from the ring: more may be read from stdout."""
        if self._intake is not None:
            self._intake.acknowledged()
        else:
            self.share.resize(self.ring.size)

    def forget(self, fate: State) -> None:
        """Let nothing be left of one that is over but its fate, DRAINED or EXPIRED."""
        self._enter(fate)
        self.ring.acknowledge(self.ring.newest)
        self.share.leave()

    async def _live(self, slot: Callable[[], Awaitable[None]], release: Callable[[], None]) -> None:
        try:
            await slot()
        except CancelledError:
            self._end(self._stopped)
        else:
            try:
                self._end(await self._evaluate())
            finally:
                release()
        finally:
            await self._clean_up()
            self.over.set(None)

    async def _evaluate(self) -> EvaluationError | None:
        """Fetch and run; return why that came to no good end."""
        try:
            self._enter(State.FETCHING)
            checkout = self._checkout = await self._surroundings.repositories.check_out(
                self.request.repository, self.request.commit_oid, self.caller
            )
            self.commit = checkout.commit
            cell = self._cell = self._surroundings.sandbox.cell(self.workspace, checkout)
            directory = await self._surroundings.threads.run(self._open, cell, checkout)
            return await self._run(directory, cell)
        except EvaluationError as error:
            return error
        except CancelledError:
            return self._stopped
        except Exception as error:  # noqa: BLE001  (a client learns of every end)
            log.failure("{evaluation}: could not be evaluated", evaluation=self.name)
            # Of the machine's own, such as a path, the log tells.
            why = error.strerror if isinstance(error, OSError) else type(error).__name__
            return EvaluationError("lost", f"the daemon could not run the evaluator: {why}")

    def _open(self, cell: Cell, checkout: Checkout) -> Path:
        """Return where the evaluator runs, once it can. Blocks. Raises EvaluationError, OSError.

        All that blocks is done here, in one thread: each change of threads costs time.
        """
        self.workspace.create(self.upload)
        directory = self.workspace.working_directory(self.request.directory, checkout.path)
        cell.open()
        return directory

    async def _run(self, directory: Path, cell: Cell) -> EvaluationError | None:
        run = self.run = self._start(directory, cell)
        self._enter(State.RUNNING)
        with self._surroundings.watch.over(cell, run.stop), suppress(CancelledError):
            # Not raised: `run.failure` tells of it.
            await completed(run.ended, lambda: run.stop(self._reason()))
        if run.stderr:
            tell_stderr(self, run.stderr)
        return run.failure

    def _start(self, directory: Path, cell: Cell) -> Run:
        """Start the evaluator. Raises OSError."""
        configuration, surroundings = self._surroundings.configuration, self._surroundings
        limits = configuration.limits
        markers = self.markers = Markers.fresh(surroundings.random)

        async def read_file(wanted: WantedFile) -> bytes:
            return await surroundings.threads.run(
                self.workspace.read_file, wanted.path, directory, limits.file, cell.view
            )

        self._intake = Intake(
            surroundings.clock,
            Parser(markers, max_value=limits.data_value, max_file=limits.file),
            self.ring,
            self.share,
            changed=lambda: self.changed.fire(None),
            held=lambda held: run.hold(held),
            read_file=read_file,
        )
        run = Run(
            surroundings.clock,
            self._intake,
            configuration.evaluations.grace,
            cell,
            surroundings.threads,
        )
        launch = cell.launch(
            self.request.evaluator_cmd,
            self._environment(markers, configuration.evaluations.environment, cell.view),
            directory,
        )
        surroundings.spawn(
            run,
            launch.argv,
            launch.environment,
            launch.directory,
            descriptors=launch.descriptors,
            stdin=launch.stdin,
        )
        return run

    def _reason(self) -> EvaluationError:
        assert self._stopped is not None, "only `stop` cancels"
        return self._stopped

    def _environment(
        self, markers: Markers, configured: Mapping[str, str], view: View
    ) -> dict[str, str]:
        """Return the evaluator's environment (contract, section 4), nothing of the daemon's own."""
        workspace = self.workspace
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            **configured,
            "HOME": str(view.of(workspace.home)),
            "TEMPORARY_DIRECTORY": str(view.of(workspace.temporary)),
            "TURINGARENA_SEED": str(self.seed),
            **{
                f"SUBMISSION_FILE_{file.field.upper()}": str(
                    view.of(workspace.submission_path(file))
                )
                for file in self.request.submission
            },
            **markers.environment(),
        }

    def _enter(self, state: State) -> None:
        before, self.state = self.state, step(self.state, state)
        now = self.times[state.value] = self._surroundings.time()
        after = max(0.0, now - self._since)  # the time of day may be put back
        self._since = now
        reason = self.failure.reason if self.failure else ""
        self._surroundings.tally.step(before, state, after, reason)
        tell_step(self, after, self._surroundings.configuration.limits)

    def _end(self, failure: EvaluationError | None) -> None:
        """Close the stream of events, with the final one of a bad end."""
        self.failure = failure
        if self._stopped is None:
            fault = failure.message if failure and failure.reason == "lost" else None
            self._surroundings.tally.judge(fault, self._surroundings.clock.seconds())
        if failure is None:
            self._enter(State.FINISHED)
        else:
            self.ring.append(encode_error(failure.reason, failure.message, failure.members))
            cancelled = failure.reason == "cancelled"
            self._enter(State.CANCELLED if cancelled else State.FAILED)
        self.times["ended"] = self._surroundings.time()
        self.ring.close()
        self.share.unbind()
        self.share.resize(self.ring.size)
        self.changed.fire(None)

    async def _clean_up(self) -> None:
        def remove_all() -> None:
            if self._cell is not None:
                self._cell.close()
            self.workspace.remove()
            remove(self.upload)

        try:
            await self._surroundings.threads.run(remove_all)
        except Exception:  # noqa: BLE001  (the evaluation is over all the same)
            log.failure("{evaluation}: what it has left could not be removed", evaluation=self.name)
        if self._checkout is not None:
            self._checkout.release()
