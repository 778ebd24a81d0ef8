"""What stands in for the world in tests: threads, children, git, time.

Nothing here starts a process, opens a socket or waits for real time. A `World` has
everything that evaluations want handed in; tests drive its parts and a `Clock`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from tawebeval.config import Configuration
from tawebeval.core.budgets import Budget
from tawebeval.core.evaluations import Checkout, Commit, GitCacheCounters, TreeBuilder
from tawebeval.core.events import (
    EventMemory,
    EventPage,
)
from tawebeval.core.form import EvaluationRequest, Repository, SubmissionFile
from tawebeval.daemon.reload import SystemdNotifier
from tawebeval.deferreds import (
    FairQueue,
    convert_deferred_to_event,
    wait_despite_cancellation,
)
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations import eventlog
from tawebeval.evaluations.context import EvaluationContext, make_unread_events_budget
from tawebeval.evaluations.eventlog import EventFiles, RecordedStdout
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.service import EvaluationRegistry
from tawebeval.evaluations.starting import make_run, open_recorded_stdout
from tawebeval.evaluations.store import EvaluationDetails
from tawebeval.linux.privileges import ReloadableFilesOwner
from tawebeval.sandbox.base import LimitMonitor, check_run_limits
from tests.fakes.children import FakeChild, FakeSpawner
from tests.fakes.files import FakeStore, MemoryEventFiles
from tests.fakes.gates import Gate
from tests.fakes.sandbox import FakeRunLimits, FakeSandbox, FakeSandboxedRun

T = TypeVar("T")

OID = "c" * 40
TREE = "7" * 40
EPOCH = 1_700_000_000.0
"""What the time of day is when a test's Clock is at 0."""


def straw(seed: int = 0) -> Callable[[int], bytes]:
    """Return what draws bytes as `os.urandom` does, the same ones in each test."""
    return random.Random(seed).randbytes


def make_request(**changes: Any) -> EvaluationRequest:
    """Return a request such as most tests need, with these changes."""
    request = EvaluationRequest(
        repository=Repository("https://example.org/problem.git"),
        commit_oid=OID,
        directory="",
        evaluator_cmd="./evaluate",
        seed=7,
        submission=(SubmissionFile("source", "solution.py"),),
    )
    return attrs.evolve(request, **changes)


class TurnClock(Clock):
    """A Clock that has turns as a reactor: a call that is due at once waits for the next one."""

    def callLater(self, delay: float, *call: Any, **arguments: Any) -> Any:
        """Call in a later turn, never in this one."""
        return super().callLater(max(delay, 0.001), *call, **arguments)

    def turn(self, times: int = 1) -> None:
        self.pump([0.001] * times)


async def answer(
    registry: EvaluationRegistry, identifier: str, after: str | None, wait: int, caller: str = ""
) -> EventPage:
    """Return the page that a poll is answered with, at once or later."""
    return await registry.events.read_page(identifier, after, caller, wait_seconds=wait)


class InlineThreads:
    """Makes calls at once, in the thread of the test."""

    async def run_in_thread(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return `call(*args, **kwargs)`."""
        return call(*args, **kwargs)


class IdleThreads:
    """Makes no calls but those of a cell, and reads of events: for tests that want no disk."""

    async def run_in_thread(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return None, or what a fake cell says."""
        owner = getattr(call, "__self__", None)
        is_read = call.__module__ == eventlog.__name__
        if is_read or isinstance(owner, FakeRunLimits | FakeSandboxedRun | RecordedStdout):
            return call(*args, **kwargs)
        if call.__name__ == "launch":
            return self._launch(owner._evaluation, *args)
        return [] if call is check_run_limits else None

    def _launch(
        self, evaluation: Evaluation, sandboxed: FakeSandboxedRun, checkout: Checkout, markers: Any
    ) -> Any:
        """Start the evaluator without a workspace."""
        evaluation.details.upload_directory = None
        open_recorded_stdout(evaluation, markers)
        run = make_run(evaluation, checkout, sandboxed)
        if evaluation.stop_reason is not None:
            raise evaluation.stop_reason
        directory = evaluation.workspace.tree_directory / evaluation.details.request.directory
        return run, run.start_process(directory)


class UntidyThreads(IdleThreads):
    """Those that do not tidy up after evaluations while `tidied` is shut."""

    def __init__(self) -> None:
        self.tidied = Gate()

    async def run_in_thread(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Do as told, maybe later."""
        if call.__name__ == "remove_all":
            await self.tidied.wait()
        return await super().run_in_thread(call, *args, **kwargs)


class SlowThreads:
    """Makes calls when the test says so; as real threads do, it cannot be stopped."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    async def run_in_thread(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return `call(*args, **kwargs)` after `step`."""
        begun: Deferred[None] = Deferred()
        ended = convert_deferred_to_event(begun.addCallback(lambda _: call(*args, **kwargs)))
        self.waiting.append(lambda: begun.callback(None))
        return (await wait_despite_cancellation(ended))()

    def step(self) -> None:
        """Make the call that has waited longest."""
        self.waiting.pop(0)()

    def finish(self) -> None:
        """Make all calls, also those that follow from them."""
        while self.waiting:
            self.step()


@attrs.frozen
class FakeNotifier(SystemdNotifier):
    """Keeps what is sent to systemd."""

    sent: list[str] = attrs.field(factory=list)

    def send_notices(self, *notices: str) -> None:
        self.sent.append(" ".join(notices))


class FakeRepositories:
    """Has every commit; `gate` holds fetches back or makes them fail.

    `branches` are the newest commits by branch; `question` is the gate of requests for them;
    `builds` are the keys of stored builds.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Repository, str]] = []
        self.callers: list[str] = []
        self.gate = Gate()
        self.branches: dict[str | None, str] = {}
        self.question = Gate()
        self.tree = Path("/")  # which is there
        self.users = 0
        self.remote = False
        self.builds: set[str] = set()
        self.counters = GitCacheCounters()
        self.disk_bytes_by_kind = {"repositories": 0, "checkouts": 0}

    def checkout_needs_network(self, repository: Repository, oid: str, caller: str) -> bool:
        """Tell what the test wants."""
        return self.remote

    async def resolve_branch(self, repository: Repository, caller: str) -> str:
        self.callers.append(caller)
        await self.question.wait()
        return self.branches[repository.branch]

    async def check_out_commit(self, repository: Repository, oid: str, caller: str) -> Checkout:
        """Return the commit and `tree`, with what the test has put there; count its users."""
        self.callers.append(caller)
        self.asked.append((repository, oid))
        await self.gate.wait()
        self.users += 1
        return Checkout(Commit(oid, TREE), self.tree, self._release)

    def find_build(self, checkout: Checkout, key: str) -> Checkout | None:
        """Return the checkout itself for a stored build; count its users."""
        if key not in self.builds:
            return None
        self.users += 1
        return attrs.evolve(checkout, release=self._release)

    async def store_build(self, checkout: Checkout, key: str, build: TreeBuilder) -> Checkout:
        """Let `build` run, and store its key."""
        await build(lambda tree: (0, 0))
        self.builds.add(key)
        built = self.find_build(checkout, key)
        assert built is not None, "just stored"
        return built

    def _release(self) -> None:
        self.users -= 1

    def fail(self, reason: str, message: str, **members: str) -> None:
        self.gate.error = EvaluationFailure(reason, message, members)

    def load_from_disk(self) -> None:
        """Do nothing."""


@attrs.define
class World:
    """All that evaluations need, fake: `context()` hands it in.

    `files` are the directories of events, which are in memory unless the world `has_event_files`;
    `store` has the rows.
    """

    configuration: Configuration = attrs.field(factory=Configuration)
    clock: Clock = attrs.field(factory=Clock)
    threads: Any = attrs.field(factory=InlineThreads)
    spawn: FakeSpawner = attrs.field(
        default=attrs.Factory(lambda self: FakeSpawner(self.clock), takes_self=True)
    )
    repositories: FakeRepositories = attrs.field(factory=FakeRepositories)
    sandbox: FakeSandbox = attrs.field(
        default=attrs.Factory(
            lambda self: FakeSandbox(self.configuration.limits, self.spawn), takes_self=True
        )
    )
    random: Callable[[int], bytes] = attrs.field(factory=straw)
    fetches: FairQueue = attrs.field(factory=lambda: FairQueue(4))
    archive: Any = None
    store: FakeStore = attrs.field(factory=FakeStore)
    has_event_files: bool = False
    memory: EventMemory = attrs.field(init=False)
    disk: Budget = attrs.field(init=False)
    files: dict[Path, MemoryEventFiles] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        buffers = self.configuration.buffers
        self.memory = EventMemory(buffers.total)
        self.disk = make_unread_events_budget(buffers.disk)

    def open_files(self, directory: Path) -> Any:
        """Return the files of a directory, or files in memory, the same ones for a directory."""
        if self.has_event_files:
            return EventFiles(directory)
        return self.files.setdefault(directory, MemoryEventFiles())

    def context(self) -> EvaluationContext:
        return EvaluationContext(
            configuration=self.configuration,
            clock=self.clock,
            generate_random_bytes=self.random,
            worker_threads=self.threads,
            checkout_source=self.repositories,
            sandbox=self.sandbox,
            limit_monitor=LimitMonitor(self.clock, self.threads, self.threads),
            event_memory=self.memory,
            unread_events_budget=self.disk,
            store=self.store,
            open_event_files=self.open_files,
            fetch_slots=self.fetches,
            read_wall_clock=lambda: EPOCH + self.clock.seconds(),
            read_boot_clock=self.clock.seconds,
            archive=self.archive,
        )

    def kill_daemon(self) -> list[EvaluationDetails]:
        """Forget all but the rows and the files; return the rows for the next process."""
        for call in list(self.clock.getDelayedCalls()):
            call.cancel()
        self.spawn.children.clear()
        self.store = FakeStore(dict(self.store.rows))
        self.__attrs_post_init__()
        self.repositories.users = 0
        gate, self.repositories.gate = self.repositories.gate, Gate()
        self.repositories.gate.shut = gate.shut
        self.fetches = FairQueue(4)
        return self.store.load_live_rows()

    @property
    def child(self) -> FakeChild:
        """The child that was started last."""
        return self.spawn.child

    def turn(self) -> None:
        """Let happen what is due now, and what follows from it."""
        self.clock.pump([0] * 4)

    def end(self) -> None:
        """Let all come to its end: nothing is held back any more, and children exit."""
        self.sandbox.orphans.open()
        self.repositories.gate.open()
        for child in self.spawn.children:
            child.paused = False
            if child.is_running:
                child.end()
        self.turn()


def read_again(source: ReloadableFilesOwner) -> None:
    """Have files read again, and count. Raises ConfigurationError."""
    for each in source.list_reloadable_files():
        each.apply_content(each.read_files())
