"""One evaluation: its life from being queued to its end, and what can be known of it."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from tawebeval.budget import Share
from tawebeval.callback import Callback
from tawebeval.callers import ANYBODY
from tawebeval.checkouts import Checkout
from tawebeval.chronicle import tell_beginning, tell_stderr, tell_step
from tawebeval.commits import Commit
from tawebeval.errors import EvaluationError
from tawebeval.events import encode_error
from tawebeval.fileblock import WantedFile
from tawebeval.form import EvaluationRequest
from tawebeval.intake import Intake
from tawebeval.life import State, step
from tawebeval.markers import Markers
from tawebeval.removal import remove
from tawebeval.ring import Ring
from tawebeval.run import Run
from tawebeval.sandbox import Cell
from tawebeval.segi import Parser
from tawebeval.signals import Latch, Signal
from tawebeval.starting import Started
from tawebeval.surroundings import Places, Surroundings
from tawebeval.variables import variables
from tawebeval.workspace import Workspace, log_name

log = Logger()


@attrs.define(eq=False)
class Evaluation:
    """One run of an evaluator on one submission.

    `seed` is the one given or drawn, `caller` who began it. Times are in seconds since the epoch.
    `upload` is where its files are until the workspace has them. `over` is set, to itself, when
    nothing is left of it but its events.

    Most of their lives evaluations just run, a thousand at once. So a coroutine brings one to
    that, and another one from there to its end; meanwhile none waits.
    """

    identifier: str
    request: EvaluationRequest
    seed: int
    upload: Path | None
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
    _since: float = 0.0  # when its state began, by the clock that only goes on
    changed: Signal[None] = attrs.field(factory=Signal)
    over: Latch[Evaluation] = attrs.field(factory=Latch)
    _intake: Intake | None = None
    _checkout: Checkout | None = None
    _cell: Cell | None = None
    _stopped: EvaluationError | None = None
    _places: Places | None = None
    _coming: Deferred[None] | None = None
    _launching: bool = False

    def __attrs_post_init__(self) -> None:
        self.share = self._surroundings.budget.enter(self.caller)

    @property
    def name(self) -> str:
        """What the log calls it."""
        return log_name(self.identifier)

    def begin(self, places: Places) -> None:
        """Come to life, and run as soon as there is a place."""
        self.times["created"] = self._surroundings.time()
        self._since = self._surroundings.clock.seconds()
        self._surroundings.tally.begin()
        tell_beginning(self)
        self._coming = self._in_background(self._come_to_run(places))

    def _in_background(self, coroutine: Coroutine[Deferred[Any], Any, None]) -> Deferred[None]:
        return Deferred.fromCoroutine(coroutine).addErrback(
            lambda failure: log.failure("{evaluation}: a defect", failure, evaluation=self.name)
        )

    def stop(self, reason: EvaluationError) -> None:
        """End it for that reason, which becomes its final event. One that has ended stays so."""
        if self._stopped is None and not self.state.ended:
            self._stopped = reason
            if self.run is not None:
                self.run.stop(reason)
            elif self._coming is not None and not self._launching:
                self._coming.cancel()

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

    async def _come_to_run(self, places: Places) -> None:
        """Wait for a place, fetch and start; or come to a bad end."""
        try:
            await places.enter(self.identifier, self.caller)
        except CancelledError:
            await self._conclude(self._stopped)
            return
        self._places = places
        try:
            self._enter(State.FETCHING)
            checkout = self._checkout = await self._surroundings.repositories.check_out(
                self.request.repository, self.request.commit_oid, self.caller
            )
            self.commit = checkout.commit
            cell = self._cell = self._surroundings.sandbox.cell(self.workspace, checkout)
            run = self._prepare(cell)
            self._launching = True  # from here on it is not cancelled: the child would be lost
            started = await self._surroundings.threads.run(self._launch, cell, checkout)
            self._run(run, started)
        except EvaluationError as error:
            await self._conclude(error)
        except CancelledError:
            await self._conclude(self._stopped)
        except OSError as error:
            # The machine's own, a path for one, stays in the log. It is no defect: no traceback.
            words = "{evaluation}: could not be evaluated: {error}"
            log.error(words, evaluation=self.name, error=error)  # noqa: TRY400
            await self._conclude(_not_run(error.strerror))
        except Exception as error:  # noqa: BLE001  (a client learns of every end)
            log.failure("{evaluation}: could not be evaluated", evaluation=self.name)
            await self._conclude(_not_run(type(error).__name__))

    def _prepare(self, cell: Cell) -> Run:
        """Return what is to watch over the evaluator."""
        surroundings, clock = self._surroundings, self._surroundings.clock
        settings, limits = surroundings.configuration.evaluations, surroundings.configuration.limits
        markers = self.markers = Markers.fresh(surroundings.random)
        parser = Parser(markers, max_value=limits.data_value, max_file=limits.file)
        intake = self._intake = Intake(clock, parser, self.ring, self.share, self)
        return Run(clock, intake, settings.grace, cell, surroundings.threads)

    def _launch(self, cell: Cell, checkout: Checkout) -> Started:
        """Start the evaluator. Blocks. Raises EvaluationError, OSError.

        All that blocks is done here, in one thread: each change of threads costs time.
        """
        assert self.upload is not None, "nobody else takes it"
        self.workspace.create(self.upload, cell.view)
        self.upload = None
        directory = self.workspace.working_directory(self.request.directory, checkout.path)
        return self._launch_in(directory, cell)

    def _launch_in(self, directory: Path, cell: Cell) -> Started:
        if self._stopped is not None:
            raise self._stopped
        assert self.markers is not None, "it is prepared"
        configured = self._surroundings.configuration.evaluations.environment
        environment = variables(
            self.request, self.seed, self.workspace, cell.view, self.markers, configured
        )
        return cell.start(self.request.evaluator_cmd, environment, directory)

    def _run(self, run: Run, started: Started) -> None:
        """Take over the evaluator, which runs; and end it if it was stopped meanwhile."""
        self._surroundings.spawn.adopt(run, started)
        self.run = run
        self._coming = None
        self._enter(State.RUNNING)
        assert self._cell is not None, "it runs there"
        self._surroundings.watch.begin(self._cell, run.stop)
        run.ended.tell(self._ran)
        if self._stopped is not None:
            run.stop(self._stopped)
            run.kill()  # nobody has seen it run: there is nothing to bring to an end

    def _ran(self, run: Run) -> None:
        assert self._cell is not None, "it has run there"
        self._surroundings.watch.end(self._cell)
        if run.stderr:
            tell_stderr(self, run.stderr)
        self._in_background(self._conclude(run.failure))

    # What the intake tells and asks

    def printed(self) -> None:
        """Wake those who wait for events."""
        self.changed.fire(None)

    def hold(self, held: bool) -> None:
        """Stop the clock while nobody takes what is printed."""
        assert self.run is not None, "it is the run that prints"
        self.run.hold(held)

    async def read_file(self, wanted: WantedFile) -> bytes:
        """Return the content of a file that the evaluator names. Raises FileRefused."""
        return await self._surroundings.threads.run(self._read_file, wanted.path)

    def _read_file(self, path: str) -> bytes:
        assert self._cell is not None, "it runs there"
        assert self._checkout is not None, "with that as its tree"
        return self.workspace.read_file(
            path,
            self.workspace.working_directory(self.request.directory, self._checkout.path),
            self._surroundings.configuration.limits.file,
            self._cell.view,
        )

    def _enter(self, state: State) -> None:
        before, self.state = self.state, step(self.state, state)
        self.times[state.value] = self._surroundings.time()
        now = self._surroundings.clock.seconds()
        after, self._since = now - self._since, now
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

    async def _conclude(self, failure: EvaluationError | None) -> None:
        """Come to the end, and leave nothing."""
        try:
            self._end(failure)
        finally:
            if self._places is not None:
                self._places.leave(self.identifier)
            await self._clean_up()
            self.over.set(self)

    async def _clean_up(self) -> None:
        def remove_all() -> None:
            try:
                if self._cell is not None:
                    self._cell.close()
            finally:  # who was killed, and has not gone, is in nobody's way but the group's
                self.workspace.remove()
                if self.upload is not None:
                    remove(self.upload)

        try:
            await self._surroundings.arrears.attempt(
                f"{self.name}: the removal of what it has left", remove_all
            )
        except Exception:  # noqa: BLE001  (the evaluation is over all the same)
            log.failure("{evaluation}: what it has left could not be removed", evaluation=self.name)
        if self._checkout is not None:
            self._checkout.release()


def _not_run(why: str | None) -> EvaluationError:
    return EvaluationError("lost", f"the daemon could not run the evaluator: {why}")
