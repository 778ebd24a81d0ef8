"""One evaluation: its life from being queued to its end, and what can be known of it.

The log has a line for each step. The line begins with the evaluation's name in the log; its fields
are the caller, the commit, the state, and how long the state before has lasted.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from tawebeval.core.budget import Share
from tawebeval.core.checkout import Checkout, Commit
from tawebeval.core.events import base64_size, encode_error
from tawebeval.core.fileblock import WantedFile
from tawebeval.core.form import EvaluationRequest, Repository, pack, unpack
from tawebeval.core.ring import Ring
from tawebeval.core.segi import Markers, Parser
from tawebeval.core.states import State, transition
from tawebeval.core.tokens import ANONYMOUS
from tawebeval.core.variables import build_environment
from tawebeval.deferreds import Condition, OneShot, in_background
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.context import EvaluationContext, RunSlots
from tawebeval.evaluations.run import Run, RunResult, StdoutPump
from tawebeval.linux.child import StartedProcess
from tawebeval.linux.filetree import remove
from tawebeval.sandbox.base import SandboxedRun
from tawebeval.sandbox.workspace import FileRefused, Workspace, log_name
from tawebeval.webhooks.callback import Callback

_UNCOUNTED = 1024  # bytes of a form and of stderr that are a part of what any evaluation takes

# Parts of log lines.
_STEP = "{evaluation}: {state} after {after:.3f} s"
_LIMITS = "; it may take {wall_clock:g} s, {cpu} s of processor, {memory} bytes of memory"
_PRINTED = "; {events} events"
_PROCESSOR = ", {cpu_seconds:.3f} s of processor"
_MEMORY = ", {peak_memory_bytes} bytes of memory"

log = Logger()


@attrs.define(eq=False)
class Evaluation:
    """One run of an evaluator on one submission.

    `seed` is the one given or drawn, `caller` who began it. Times are in seconds since the epoch.
    `upload` is where its files are until the workspace has them. `run` is there while the evaluator
    runs, `result` after that. `over` is set, to itself, when nothing is left of it but its events.
    `on_full(evaluation)` is called when the ring becomes full, and may make room.

    Many are remembered, and what a stranger has sent or printed is kept in bytes, since a `str` may
    take four times as much. The form loses what only a start needs when that is done.

    Most of their lives evaluations just run, a thousand at once. So a coroutine brings one to
    that, and another one from there to its end; meanwhile none waits.
    """

    identifier: str
    _request: bytes = attrs.field(converter=pack, on_setattr=attrs.setters.NO_OP, repr=False)
    seed: int
    upload: Path | None
    workspace: Workspace
    _surroundings: EvaluationContext
    caller: str = ANONYMOUS
    _on_full: Callable[[Evaluation], object] = lambda evaluation: None
    ring: Ring = attrs.field(factory=Ring)
    share: Share = attrs.field(init=False)
    state: State = State.QUEUED
    failure: EvaluationFailure | None = None
    callback: Callback | None = None
    commit: Commit | None = None
    run: Run | None = None
    result: RunResult | None = None
    markers: Markers | None = None
    times: dict[str, float] = attrs.field(factory=dict)
    _since: float = 0.0  # when its state began, by the clock that only goes on
    changed: Condition[None] = attrs.field(factory=Condition)
    over: OneShot[Evaluation] = attrs.field(factory=OneShot)
    _intake: StdoutPump | None = None
    _checkout: Checkout | None = None
    _sandboxed: SandboxedRun | None = None
    _stopped: EvaluationFailure | None = None
    _places: RunSlots | None = None
    _coming: Deferred[None] | None = None
    _launching: bool = False

    def __attrs_post_init__(self) -> None:
        self.share = self._surroundings.budget.add_share(
            self.caller, partial(self._on_full, self), self._on_room
        )

    @property
    def name(self) -> str:
        """What the log calls it."""
        return log_name(self.identifier)

    @property
    def request(self) -> EvaluationRequest:
        """What the form asks for, after the start without what only that needs."""
        return unpack(self._request)

    def begin(self, places: RunSlots) -> None:
        """Come to life, and run as soon as there is a place."""
        self.times["created"] = self._surroundings.time()
        self._since = self._surroundings.clock.seconds()
        self._surroundings.tally.begin()
        log.info("{evaluation}: {state}; caller {caller!r}, commit {commit}", **self._log_fields())
        self._coming = self._in_background(self._come_to_run(places))

    def _in_background(self, coroutine: Coroutine[Deferred[Any], Any, None]) -> Deferred[None]:
        return in_background(coroutine, log, "{evaluation}: a defect", evaluation=self.name)

    def stop(self, reason: EvaluationFailure) -> None:
        """End it for that reason, which becomes its final event. One that has ended stays so."""
        if self._stopped is None and not self.state.ended:
            self._stopped = reason
            if self.run is not None:
                self.run.stop(reason)
            elif self._coming is not None and not self._launching:
                self._coming.cancel()

    def abandon(self) -> None:
        """Stop it, since nobody asks for its events, and log that."""
        log.info("{evaluation}: nobody asks for it any more", **self._log_fields())
        self.stop(EvaluationFailure("lost", "nobody asked for the events"))

    def acknowledged(self) -> None:
        """Events were discarded from the ring: more may be read from stdout."""
        if self._intake is not None:
            self._intake.acknowledged()
        else:
            self.share.resize(self.ring.size)

    def check_readers(self, cursor: int, *, wanted: bool) -> None:
        """Stop it if its readers, who have read up to a cursor, let it wait for too long.

        `wanted` is whether another evaluation waits for its place.
        """
        if self.run is not None:
            limit = self._surroundings.configuration.evaluations.paused
            self.run.check_readers(limit, self.ring.size_before(cursor), wanted=wanted)

    def forget(self, fate: State) -> None:
        """Let nothing be left of one that is over but its fate, DRAINED or EXPIRED."""
        self._enter(fate)
        self.ring.acknowledge(self.ring.newest)
        self.share.release()

    async def _come_to_run(self, places: RunSlots) -> None:
        """Fetch, wait for a place to run and start; or come to a bad end."""
        repositories = self._surroundings.repositories
        try:
            if fetched := repositories.needs_network(*self._wanted()):
                self._places = places
                places.reserve(self.identifier, self.caller)
                await self._fetch()
            await self._wait(places)
            checkout = self._checkout = await repositories.check_out(*self._wanted(), again=fetched)
            self.commit = checkout.commit
            if self._surroundings.quota_directories is not None:
                directory = await self._surroundings.quota_directories.get()
                self.workspace = attrs.evolve(self.workspace, quota_directory=directory)
            sandboxed = self._sandboxed = self._surroundings.sandbox.make_run(
                self.workspace, checkout
            )
            run = self._prepare(sandboxed)
            self._launching = True  # from here on it is not cancelled: the child would be lost
            started = await self._surroundings.threads.run(self._launch, sandboxed, checkout)
            self._run(run, started)
        except EvaluationFailure as error:
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

    def _wanted(self) -> tuple[Repository, str, str]:
        """Return what to ask the cache for; nothing of the request is kept in the queue."""
        request = self.request
        return request.repository, request.commit_oid, self.caller

    async def _fetch(self) -> None:
        """Have the commit fetched into the cache, without a place to run.

        Until there is one, this counts against the caller's share of fetches.
        """
        fetches = self._surroundings.fetches
        await fetches.acquire(self.identifier, self.caller)
        self._enter(State.FETCHING)
        try:
            checkout = await self._surroundings.repositories.check_out(*self._wanted())
            self.commit = checkout.commit
            checkout.release()  # what waits to run keeps nothing in the cache
        finally:
            fetches.suspend(self.identifier)

    async def _wait(self, places: RunSlots) -> None:
        """Wait for a place to run."""
        place = places.acquire(self.identifier, self.caller)
        if self.state is State.FETCHING and not place.called:
            self._enter(State.QUEUED)
        await place
        self._places = places
        self._surroundings.fetches.release(self.identifier)
        if self.state is State.QUEUED:
            self._enter(State.FETCHING)

    def _prepare(self, sandboxed: SandboxedRun) -> Run:
        """Return what is to watch over the evaluator."""
        surroundings, clock = self._surroundings, self._surroundings.clock
        settings, limits = surroundings.configuration.evaluations, surroundings.configuration.limits
        markers = self.markers = Markers.fresh(surroundings.random)
        parser = Parser(markers, max_value=limits.data_value, max_file=limits.file)
        intake = self._intake = StdoutPump(clock, parser, self.ring, self.share, self)
        return Run(clock, intake, settings.grace, sandboxed, surroundings.threads)

    def _launch(self, sandboxed: SandboxedRun, checkout: Checkout) -> StartedProcess:
        """Start the evaluator. Blocks. Raises EvaluationError, OSError.

        All that blocks is done here, in one thread: each change of threads costs time.
        """
        assert self.upload is not None, "nobody else takes it"
        self.workspace.create(self.upload, sandboxed.view)
        self.upload = None
        directory = self.workspace.working_directory(self.request.directory, checkout.path)
        return self._launch_in(directory, sandboxed)

    def _launch_in(self, directory: Path, sandboxed: SandboxedRun) -> StartedProcess:
        if self._stopped is not None:
            raise self._stopped
        assert self.markers is not None, "it is prepared"
        request, workspace, view = self.request, self.workspace, sandboxed.view
        environment = build_environment(
            self._surroundings.configuration.evaluations.environment,
            home=str(view.translate(workspace.home)),
            temporary=str(view.translate(workspace.temporary)),
            seed=self.seed,
            submission={
                file.field: str(view.translate(workspace.submission_path(file)))
                for file in request.submission
            },
            markers=self.markers,
        )
        return sandboxed.start(request.evaluator_cmd, environment, directory)

    def _run(self, run: Run, started: StartedProcess) -> None:
        """Take over the evaluator, which runs; and end it if it was stopped meanwhile."""
        self._surroundings.spawn.adopt(run, started)
        self._drop_start_fields()
        self.run = run
        self._coming = None
        self._enter(State.RUNNING)
        assert self._sandboxed is not None, "it runs there"
        self._surroundings.watch.add_run(self._sandboxed, run.stop)
        run.ended.add_callback(self._ran)
        if self._stopped is not None:
            run.stop(self._stopped)
            run.kill()  # nobody has seen it run: there is nothing to bring to an end

    def _ran(self, run: Run) -> None:
        assert self._sandboxed is not None, "it has run there"
        self._surroundings.watch.remove_run(self._sandboxed)
        if run.stderr:
            words = "{evaluation}: stderr ends in {stderr!r}"
            log.info(words, **self._log_fields(), stderr=run.stderr)
        # The run keeps its parser, and that up to a whole block of data, or a file.
        self.result, self.run, self._intake = run.result, None, None
        self._in_background(self._conclude(run.failure))

    def _drop_start_fields(self) -> None:
        self._request = pack(self.request.drop_start_fields())

    def _on_room(self) -> None:
        """Take that the ring is not full any more: more may be read from stdout."""
        if self._intake is not None:
            self._intake.on_room()

    # What the intake tells and asks

    def printed(self) -> None:
        """Wake those who wait for events."""
        self.changed.notify(None)

    def hold(self, held: bool) -> None:
        """Stop the clock while nobody takes what is printed."""
        assert self.run is not None, "it is the run that prints"
        self.run.hold(held)

    async def read_file(self, wanted: WantedFile) -> bytes:
        """Return the content of a file that the evaluator names. Raises FileRefused."""
        assert self.run is not None, "it is the run that names it"
        content = await self._surroundings.threads.run(self._read_file, wanted.path)
        size = base64_size(len(content))
        if self.run.count_output(size) < size:
            raise FileRefused(f"{wanted.path!r} is more than is left of limits.output")
        return content

    def lose_output(self) -> None:
        """End the run, whose events are not complete any more."""
        assert self.run is not None, "it is the run that prints"
        self.run.lose_output()

    def _read_file(self, path: str) -> bytes:
        assert self._sandboxed is not None, "it runs there"
        assert self._checkout is not None, "with that as its tree"
        return self.workspace.read_file(
            path,
            self.workspace.working_directory(self.request.directory, self._checkout.path),
            self._surroundings.configuration.limits.file,
            self._sandboxed.view,
        )

    def _enter(self, state: State) -> None:
        before, self.state = self.state, transition(self.state, state)
        self.times.setdefault(state.value, self._surroundings.time())
        now = self._surroundings.clock.seconds()
        after, self._since = now - self._since, now
        reason = self.failure.reason if self.failure else ""
        self._surroundings.tally.step(before, state, after, reason)
        self._log_step(after)

    def _log_step(self, after: float) -> None:
        """Log the state that it has reached, `after` so many seconds in the one before."""
        fields: dict[str, Any] = {**self._log_fields(), "after": after}
        words = _STEP
        if self.state is State.RUNNING:
            limits = self._surroundings.configuration.limits
            words += _LIMITS
            fields.update(wall_clock=limits.wall_clock, cpu=limits.cpu, memory=limits.memory)
        elif self.state in (State.FINISHED, State.FAILED, State.CANCELLED):
            if self.failure is not None:
                words += ": {reason}: {failure}"
                fields.update(reason=self.failure.reason, failure=self.failure.message)
            if self.result is not None:
                usage = self.result.usage
                words += _PRINTED
                fields["events"] = self.ring.newest
                if usage.cpu_seconds is not None:
                    words += _PROCESSOR
                    fields["cpu_seconds"] = usage.cpu_seconds
                if usage.peak_memory is not None:
                    words += _MEMORY
                    fields["peak_memory_bytes"] = usage.peak_memory
        log.info(words, **fields)

    def _log_fields(self) -> dict[str, Any]:
        """Return the fields of each log line."""
        return {
            "evaluation": self.name,
            "caller": self.caller,
            "commit": self.request.commit_oid,
            "state": self.state.value,
        }

    def _end(self, failure: EvaluationFailure | None) -> None:
        """Close the stream of events, with the final one of a bad end."""
        # Without where it was raised, and without what only the event has to say.
        self.failure = failure and EvaluationFailure(failure.reason, failure.message)
        lost = failure if failure is not None and failure.reason == "lost" else None
        if self._stopped is None and (lost is None or lost.is_alarming):
            fault = None if lost is None else lost.message
            self._surroundings.tally.judge(fault, self._surroundings.clock.seconds())
        if failure is None:
            self._enter(State.FINISHED)
        else:
            self.ring.append(encode_error(failure.reason, failure.message, failure.members))
            cancelled = failure.reason == "cancelled"
            self._enter(State.CANCELLED if cancelled else State.FAILED)
        self.times["ended"] = self._surroundings.time()
        self.ring.close()
        self._drop_start_fields()
        self.share.unbind()
        self.share.keep(max(0, self._kept_bytes - _UNCOUNTED))
        self.share.resize(self.ring.size)
        self._stopped = None
        self.changed.notify(None)

    @property
    def _kept_bytes(self) -> int:
        """The bytes besides events that a stranger has it keep after its end."""
        stderr = self.result.stderr_tail if self.result is not None else b""
        url = self.callback.url if self.callback is not None else ""
        return len(self._request) + len(stderr) + len(url)

    async def _conclude(self, failure: EvaluationFailure | None) -> None:
        """Come to the end, and leave nothing."""
        try:
            self._end(failure)
        finally:
            if self._places is not None:
                self._places.release(self.identifier)
            self._surroundings.fetches.release(self.identifier)
            await self._clean_up()
            self.over.set(self)

    async def _clean_up(self) -> None:
        sandboxed, workspace, upload, checkout = (
            self._sandboxed,
            self.workspace,
            self.upload,
            self._checkout,
        )
        self._sandboxed = self._checkout = None

        def remove_all() -> None:
            try:
                if sandboxed is not None:
                    sandboxed.close()
            finally:  # who was killed, and has not gone, is in nobody's way but the group's
                workspace.remove()
                if upload is not None:
                    remove(upload)

        try:
            await self._surroundings.arrears.attempt(
                f"{self.name}: the removal of what it has left",
                remove_all,
                made=self._return_quota_directory,
            )
        except Exception:  # noqa: BLE001  (the evaluation is over all the same)
            log.failure("{evaluation}: what it has left could not be removed", evaluation=self.name)
        if checkout is not None:
            checkout.release()

    def _return_quota_directory(self) -> None:
        free, directory = self._surroundings.quota_directories, self.workspace.quota_directory
        if free is not None and directory is not None:
            free.put(directory)


def _not_run(why: str | None) -> EvaluationFailure:
    return EvaluationFailure("lost", f"the daemon could not run the evaluator: {why}")
