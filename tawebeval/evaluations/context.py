"""Dependencies of evaluations, handed in by `daemon.assembly` and `tawebeval try`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from tawebeval.config import Configuration
from tawebeval.core.budgets import Budget, SharedResource
from tawebeval.core.evaluations import Checkout, EvaluationCounters, TreeBuilder
from tawebeval.core.events import EventMemory
from tawebeval.core.form import Repository
from tawebeval.deferreds import (
    Condition,
    FairQueue,
    OneShotEvent,
    RetryQueue,
    WorkerThreads,
)
from tawebeval.errors import EvaluationFailure, StoreError
from tawebeval.evaluations.eventlog import EventFiles, make_segment_load_slots
from tawebeval.evaluations.store import EvaluationStore
from tawebeval.evaluations.traces import EvaluationTracer
from tawebeval.linux.filetree import check_and_copy_tree, remove_tree
from tawebeval.sandbox.base import LimitMonitor, Sandbox

if TYPE_CHECKING:
    from tawebeval.archive.archive import EvaluationArchive  # zstandard is large for `try`


def make_unread_events_budget(max_bytes: int) -> Budget:
    """Return the budget of bytes of unread events on the disk (`buffers.disk`).

    It counts the stdout of evaluations, with the files that it has named, from the moment when it
    is printed until it is acknowledged or its evaluation is removed. Beyond it no evaluation is
    accepted, and of a caller beyond its part none is started. Those that run go on: each is bounded
    by its `limits.output`.
    """
    return Budget(
        SharedResource.UNREAD_EVENTS,
        max_bytes,
        max_bytes // 2,
        "your unread events use up your part of the disk (buffers.disk); read them, or"
        " discard those of finished evaluations by GET /evaluation/ID/events?after=end",
        "the unread events of all evaluations use up the disk (buffers.disk); try again later",
    )


class CheckoutSource(Protocol):
    """Source of checked-out commits, which is the cache of `git.cache`."""

    def checkout_needs_network(self, repository: Repository, oid: str, caller: str) -> bool:
        """Return whether `check_out_commit` would fetch over a network.

        `oid` is "" for a branch that is not resolved yet. Raises: EvaluationFailure.
        """

    async def resolve_branch(self, repository: Repository, caller: str) -> str:
        """Return the OID of the newest commit of the repository's branch, asked for now.

        Raises: EvaluationFailure.
        """

    async def check_out_commit(self, repository: Repository, oid: str, caller: str) -> Checkout:
        """Return a commit and its tree, to release after use. Raises: EvaluationFailure."""

    def find_build(self, checkout: Checkout, key: str) -> Checkout | None:
        """Return the build of a checkout with this key, to release after use; None without one."""

    async def store_build(self, checkout: Checkout, key: str, build: TreeBuilder) -> Checkout:
        """Return a new build of a checkout, to release after use. Raises: what `build` raises."""


@attrs.define
class FixedCheckoutSource:
    """One checkout and its builds, in place of repositories.

    Builds are stored in directories of names that begin as that of the checkout. `check_tree(files,
    size)` raises EvaluationFailure for a built tree that is too large.
    """

    _checkout: Checkout
    _check_tree: Callable[[int, int], object] = lambda files, size: None
    _builds: dict[str, Checkout] = attrs.field(factory=dict)

    def checkout_needs_network(self, repository: Repository, oid: str, caller: str) -> bool:
        """Return False."""
        return False

    async def resolve_branch(self, repository: Repository, caller: str) -> str:
        """Return the OID of the checkout."""
        return self._checkout.commit.oid

    async def check_out_commit(self, repository: Repository, oid: str, caller: str) -> Checkout:
        """Return the checkout."""
        return self._checkout

    def find_build(self, checkout: Checkout, key: str) -> Checkout | None:
        """Return the build with this key."""
        return self._builds.get(key)

    async def store_build(self, checkout: Checkout, key: str, build: TreeBuilder) -> Checkout:
        """Copy a built tree. Blocks, if an earlier copy has failed."""
        path = checkout.path.with_name(f"{checkout.path.name}-{key}")
        remove_tree(path)
        path.mkdir()
        files, size = await build(partial(check_and_copy_tree, target=path, check=self._check_tree))
        commit = attrs.evolve(checkout.commit, file_count=files, size=size)
        made = self._builds[key] = attrs.evolve(checkout, commit=commit, path=path)
        return made


@attrs.define(eq=False)
class EvaluationContext:
    """Dependencies that all evaluations share; a reload replaces `configuration`.

    `generate_random_bytes(n)` returns n random bytes, as `os.urandom`; `read_wall_clock()` is in
    seconds since the epoch, `read_boot_clock()` in seconds since the boot. `fetch_slots` bounds
    fetches over a network, beside the run slots; `segment_load_slots` bounds events
    that are parsed again. `cleanup_queue` repeats removals that have failed.
    `running_builds` are the builds that are running, by key; each ends with a failure, or None.
    `event_room_condition` is notified when a caller no longer uses up its part of
    `unread_events_budget` or of the memory for newest events.
    """

    configuration: Configuration
    clock: Any
    generate_random_bytes: Callable[[int], bytes]
    worker_threads: WorkerThreads
    checkout_source: CheckoutSource
    sandbox: Sandbox
    limit_monitor: LimitMonitor
    event_memory: EventMemory
    unread_events_budget: Budget
    store: EvaluationStore | None = None  # None for `tawebeval try`
    open_event_files: Callable[[Path], EventFiles] = EventFiles
    segment_load_slots: FairQueue = attrs.field(factory=make_segment_load_slots)
    fetch_slots: FairQueue = attrs.field(factory=lambda: FairQueue(1))
    read_wall_clock: Callable[[], float] = time.time
    read_boot_clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    counters: EvaluationCounters = attrs.field(factory=EvaluationCounters)
    archive: EvaluationArchive | None = None
    tracer: EvaluationTracer | None = None
    running_builds: dict[str, OneShotEvent[EvaluationFailure | None]] = attrs.field(factory=dict)
    event_room_condition: Condition = attrs.field(factory=Condition)
    cleanup_queue: RetryQueue = attrs.field(
        default=attrs.Factory(lambda self: RetryQueue(self.worker_threads), takes_self=True)
    )

    async def wait_for_store_flush(self, *, starts_now: bool = True) -> None:
        """Return once all rows until now are committed, or cannot be: the disk is full.

        Where no client waits, the transaction need not start now.
        """
        if self.store is not None:
            with suppress(StoreError):
                await (self.store.flush() if starts_now else self.store.flush_soon())
