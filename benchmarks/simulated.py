"""A daemon and its nodes on a simulated clock: what `benchmarks.simulate` drives.

The registry, the queue, the budgets, the rings and the runs are the daemon's own. Simulated are
time, the threads, the processes and the disk: an evaluator holds a node for some seconds, prints a
little and exits.
"""

from __future__ import annotations

import heapq
import random
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from math import inf
from pathlib import Path
from resource import struct_rusage
from typing import Any

import attrs
from twisted.internet.base import DelayedCall
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock, LoopingCall
from twisted.python.failure import Failure

from tawebeval.config import Configuration, LimitSettings
from tawebeval.core.evaluations import SECRET_KEY_BYTES, Checkout, Commit, IdentifierIssuer
from tawebeval.core.events import EventMemory
from tawebeval.core.form import EvaluationRequest, Repository, SubmissionFile
from tawebeval.errors import EvaluationFailure, ServerBusy
from tawebeval.evaluations.context import EvaluationContext, make_unread_events_budget
from tawebeval.evaluations.eventlog import RecordedStdout
from tawebeval.evaluations.service import EvaluationRegistry, ReceivedForm
from tawebeval.evaluations.starting import make_run, open_recorded_stdout
from tawebeval.linux.cgroups import CgroupManager, ResourceUsage
from tawebeval.linux.starter import LaunchSpec
from tawebeval.sandbox.base import (
    Environment,
    EvaluatorExit,
    ResumableProcess,
    RunLimits,
    Sandbox,
    SandboxedRun,
)
from tawebeval.sandbox.workspace import Workspace, WorkspaceLauncher
from tests.fakes.files import MemoryEventFiles

OUTPUT = b"".join(b"case %d: accepted\n" % number for number in range(20))
"""What each evaluator prints."""

_EPOCH = 1_700_000_000.0  # time of day at the start of each simulation
_RETRY_AFTER = 5  # seconds, of `web.server.channel`


class EventClock(Clock):
    """A `Clock` that goes from one call to the next; a heap holds the calls."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[float, int, DelayedCall]] = []
        self._numbers = count()

    def callLater(self, delay: float, call: Callable[..., object], *args: Any, **kw: Any) -> Any:
        """Call later; calls of one time in the order of these requests."""
        time = self.seconds() + delay
        delayed = DelayedCall(time, call, args, kw, lambda _: None, self._push, self.seconds)
        self._push(delayed)
        return delayed

    def _push(self, delayed: DelayedCall) -> None:
        heapq.heappush(self._heap, (delayed.getTime(), next(self._numbers), delayed))

    def run_until(self, is_done: Callable[[], bool], most: float = inf) -> None:
        """Make calls until `is_done()`, or until the clock is at `most` seconds."""
        while self._heap and self._heap[0][0] <= most and not is_done():
            time, _, delayed = heapq.heappop(self._heap)
            if not delayed.active():
                continue
            if delayed.getTime() > time:  # it was delayed meanwhile
                self._push(delayed)
                continue
            self.rightNow = time
            delayed.called = True
            delayed.func(*delayed.args, **delayed.kw)

    async def sleep(self, seconds: float) -> None:
        """Return after this time."""
        waiting: Deferred[None] = Deferred()
        self.callLater(seconds, waiting.callback, None)
        await waiting


@attrs.define(eq=False)
class SimulatedProcess:
    """The process of an evaluator that waits for a node, computes and exits."""

    pid: int
    protocol: ProcessProtocol
    seconds: float
    on_started: Callable[[], object]
    on_ended: Callable[[SimulatedProcess], object]
    start_time_ticks: int = 0
    on_slow_reads: Callable[[], object] = lambda: None
    on_broker_error: Callable[[str], object] = lambda reason: None
    resource_usage: struct_rusage | None = None
    is_running: bool = True
    lost_reason: str | None = None

    @property
    def has_exited(self) -> bool:
        """Whether it has ended: the run is told at once."""
        return not self.is_running

    def end(self, number: int | None = None) -> None:
        """Print and exit; or die of a signal."""
        if not self.is_running:
            return
        self.on_ended(self)
        if number is None:
            self.protocol.childDataReceived(1, OUTPUT)
        for name in (1, 2):
            self.protocol.childConnectionLost(name)
        self.is_running = False
        reason = Failure(ProcessDone(0) if number is None else ProcessTerminated(None, number))
        self.protocol.processExited(reason)
        self.protocol.processEnded(reason)

    def signal_group(self, number: int) -> None:
        """Die of it."""
        self.end(number)

    def pauseProducing(self) -> None:
        """Do nothing: what is printed is less than a ring."""

    def resumeProducing(self) -> None:
        """Do nothing."""

    def read_remaining_output(self) -> None:
        """Do nothing: the output is read before the exit."""


@attrs.define(eq=False)
class Cluster:
    """Nodes that each run one process; a process without a node waits for the next free one."""

    clock: EventClock
    free: int
    _waiting: deque[SimulatedProcess] = attrs.field(factory=deque)
    _computing: dict[SimulatedProcess, Any] = attrs.field(factory=dict)

    def start(self, process: SimulatedProcess) -> None:
        """Compute as soon as a node is free."""
        self._waiting.append(process)
        self._dispatch()

    def _dispatch(self) -> None:
        while self.free > 0 and self._waiting:
            process = self._waiting.popleft()
            self.free -= 1
            process.on_started()
            self._computing[process] = self.clock.callLater(process.seconds, process.end)

    def release(self, process: SimulatedProcess) -> None:
        """Free the node of a process that ends."""
        delayed = self._computing.pop(process, None)
        if delayed is None:
            self._waiting.remove(process)
            return
        if delayed.active():
            delayed.cancel()
        self.free += 1
        self.clock.callLater(0, self._dispatch)

    def lose_node(self, chance: float, seconds: float) -> None:
        """Lose a node, and the process on it, for some time; `chance` from 0 to 1 chooses it."""
        self.free -= 1
        if self._computing:
            process = list(self._computing)[int(chance * len(self._computing))]
            process.lost_reason = "its node was lost"
            process.end(signal.SIGKILL)
        self.clock.callLater(seconds, self._repair)

    def _repair(self) -> None:
        self.free += 1
        self._dispatch()


class SimulatedRunLimits(RunLimits):
    """Limits of a run that keeps all of them."""

    cgroup = first_process = None
    disk_bytes = inspected_entry_count = 0
    free_disk_bytes = inf

    def __init__(self, settings: LimitSettings) -> None:
        self.settings = settings

    def find_limit_failure(
        self, final: bool = False, counts: bool = True
    ) -> EvaluationFailure | None:
        """Return None."""
        return None

    def read_usage(self, rusage: struct_rusage | None) -> ResourceUsage:
        """Return that nothing is known."""
        return ResourceUsage(None, None)


class SimulatedRun(SandboxedRun):
    """A run whose process is simulated: no cgroup, no disk.

    `adopt(protocol, number)` simulates the process with this number.
    """

    def __init__(
        self,
        adopt: Callable[[ProcessProtocol, int], Any],
        workspace: Workspace,
        limits: LimitSettings,
    ) -> None:
        self.workspace, self.run_limits = workspace, SimulatedRunLimits(limits)
        self.adopt = adopt

    def make_launch_spec(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> LaunchSpec:
        """Raise: no program is started."""
        raise NotImplementedError

    def start_evaluator(self, command: str, environment: Mapping[str, str], directory: Path) -> int:
        """Return the number of the process, which is the command."""
        return int(command)

    def connect_process(self, run: ProcessProtocol, started: int) -> Any:
        """Simulate the process."""
        return self.adopt(run, started)

    def make_resume_data(self) -> dict[str, Any]:
        """Return nothing: no simulated daemon goes on with the run of another one."""
        return {}

    def resume_process(self, run: ProcessProtocol, left: ResumableProcess) -> Any:
        """Raise: see `make_resume_data`."""
        raise NotImplementedError

    def send_signal(self, child: Any, number: int) -> None:
        """Send it to the simulated process."""
        child.signal_group(number)

    async def kill_remaining_processes(self) -> None:
        """Do nothing: there are none."""

    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the process's exit."""
        return EvaluatorExit(status, number)

    def close(self) -> None:
        """Do nothing."""


@attrs.define
class SimulatedSandbox(Sandbox):
    """A sandbox whose runs are simulated."""

    adopt: Callable[[ProcessProtocol, int], Any]

    def make_run(
        self,
        workspace: Workspace,
        checkout: Checkout,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> SandboxedRun:
        """Return a run that is not started yet."""
        return SimulatedRun(self.adopt, workspace, limits)


@attrs.frozen
class Costs:
    """The time that a start takes: of the daemon's processor, and until the evaluator computes."""

    processor: float  # seconds; the daemon has one processor
    start: float  # seconds


@attrs.define
class SimulatedThreads:
    """Threads that start evaluators, one after the other, and touch no disk."""

    clock: EventClock
    costs: Costs
    _free_at: float = 0.0

    async def run_in_thread(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call of a run; the start of an evaluator takes time."""
        owner = getattr(call, "__self__", None)
        if isinstance(owner, SimulatedRun | RecordedStdout):
            return call(*args, **kwargs)
        if call.__name__ == "launch":
            evaluation, (sandboxed, checkout, markers) = owner._evaluation, args
            now = self.clock.seconds()
            self._free_at = max(now, self._free_at) + self.costs.processor
            await self.clock.sleep(self._free_at - now + self.costs.start)
            if evaluation.stop_reason is not None:
                raise evaluation.stop_reason
            open_recorded_stdout(evaluation, markers)
            run = make_run(evaluation, checkout, sandboxed)
            return run, run.start_process(checkout.path)
        return None


class _Unwatched:
    """In place of `LimitMonitor`: no limits are exceeded."""

    def add_run(self, run: RunLimits, stop: object) -> None:
        """Do nothing."""

    def remove_run(self, run: RunLimits) -> None:
        """Do nothing."""


class _Cached:
    """A `CheckoutSource` that has each commit."""

    def checkout_needs_network(self, repository: Repository, oid: str, caller: str) -> bool:
        """Return that it does not."""
        return False

    async def resolve_branch(self, repository: Repository, caller: str) -> str:
        """Raise: forms have commits."""
        raise NotImplementedError

    async def check_out_commit(
        self, repository: Repository, oid: str, caller: str, *, is_retry: bool = False
    ) -> Checkout:
        """Return a tree that is not looked at."""
        return Checkout(Commit(oid, "7" * 40), Path("/"), lambda: None)


@attrs.define(eq=False)
class SimulatedDaemon:
    """One daemon with its nodes; a restart gives it another registry.

    `begun(number)` is called when the process of the form `number` computes; `seconds` has how
    long each does.
    """

    clock: EventClock
    configuration: Configuration
    slots: int
    costs: Costs
    random: random.Random
    seconds: Mapping[int, float]
    begun: Callable[[int], object] = lambda number: None
    open_connections: int = 0
    most_connections: int = 0
    is_away: bool = False
    cluster: Cluster = attrs.field(init=False)
    registry: EvaluationRegistry = attrs.field(init=False)
    _housekeeping: LoopingCall | None = None

    def __attrs_post_init__(self) -> None:
        self.cluster = Cluster(self.clock, self.slots)
        self.registry = self._make_registry()

    def _make_registry(self) -> EvaluationRegistry:
        configuration, clock = self.configuration, self.clock
        threads: Any = SimulatedThreads(clock, self.costs)
        context = EvaluationContext(
            configuration=configuration,
            clock=clock,
            generate_random_bytes=self.random.randbytes,
            worker_threads=threads,
            checkout_source=_Cached(),
            sandbox=SimulatedSandbox(
                configuration.limits,
                CgroupManager({}),
                WorkspaceLauncher(Path("/nonexistent")),
                self.adopt,
            ),
            limit_monitor=_Unwatched(),  # type: ignore[arg-type]
            event_memory=EventMemory(configuration.buffers.total),
            unread_events_budget=make_unread_events_budget(configuration.buffers.disk),
            open_event_files=lambda _: MemoryEventFiles(),  # type: ignore[arg-type,return-value]
            read_wall_clock=lambda: _EPOCH + clock.seconds(),
        )
        callers = configuration.callers
        registry = EvaluationRegistry(
            context,
            IdentifierIssuer(self.random.randbytes(SECRET_KEY_BYTES), self.random.randbytes),
            (
                self.slots,
                configuration.evaluations.queued,
                callers.running,
                callers.queued,
            ),
            Path("/nonexistent"),
            None,  # type: ignore[arg-type]  # no form has a callback
        )
        self._housekeeping = LoopingCall(registry.expire_evaluations)
        self._housekeeping.clock = clock
        self._housekeeping.start(1, now=False)
        return registry

    def adopt(self, protocol: ProcessProtocol, number: int) -> Any:
        """Connect a process that was started; it computes on a node."""
        process = SimulatedProcess(
            number,
            protocol,
            self.seconds[number],
            lambda: self.begun(number),
            self.cluster.release,
        )
        protocol.makeConnection(process)
        self.cluster.start(process)
        return process

    @contextmanager
    def connect(self) -> Iterator[None]:
        """Hold a connection. Raises: ServerBusy; ConnectionRefusedError while it is away."""
        if self.is_away:
            raise ConnectionRefusedError
        if self.open_connections >= self.configuration.http.connections:
            raise ServerBusy("too many connections (http.connections)", _RETRY_AFTER)
        self.open_connections += 1
        self.most_connections = max(self.most_connections, self.open_connections)
        try:
            yield
        finally:
            self.open_connections -= 1

    def accept(self, number: int, caller: str) -> str:
        """Accept the form `number`. Raises: ServerBusy, ConnectionRefusedError."""
        with self.connect():
            return self.registry.accept_form(ReceivedForm(make_form(number), Path("/form")), caller)

    async def restart(self, away: float, *, keeps: bool) -> None:
        """Restart: nobody is answered for some seconds; without a starter evaluations end."""
        if keeps:
            self.is_away = True
        else:
            registry = self.registry
            await registry.drain_and_close()
            self.stop()
            self.is_away = True
            self.registry = self._make_registry()
        await self.clock.sleep(away)
        self.is_away = False

    def stop(self) -> None:
        """End the housekeeping."""
        if self._housekeeping is not None and self._housekeeping.running:
            self._housekeeping.stop()


def make_form(number: int) -> EvaluationRequest:
    """Return the form of a simulated evaluation."""
    return EvaluationRequest(
        repository=Repository("https://git.example.org/problems.git"),
        commit_oid="c" * 40,
        directory="sum",
        evaluator_cmd=str(number),
        seed=number,
        submission=(SubmissionFile("source", "solution.py"),),
    )
