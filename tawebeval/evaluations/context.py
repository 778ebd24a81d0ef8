"""Dependencies of evaluations, handed in by `daemon.assembly` and `tawebeval try`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import attrs
from twisted.internet.defer import Deferred, DeferredQueue

from tawebeval.config import Configuration
from tawebeval.core.budget import Budget
from tawebeval.core.checkout import Checkout
from tawebeval.core.form import Repository
from tawebeval.core.tally import EvaluationTally
from tawebeval.deferreds import UNBOUNDED, FairQueue, RetryQueue, WorkerThreads
from tawebeval.linux.child import Spawner
from tawebeval.sandbox.base import Sandbox
from tawebeval.sandbox.monitor import LimitMonitor


class RunSlots(Protocol):
    """Queue for run slots; `name` is the identifier of an evaluation."""

    def reserve(self, name: str, caller: str) -> None:
        """Reserve the turn of an evaluation that is not ready to run."""

    def acquire(self, name: str, caller: str) -> Deferred[None]:
        """Return a Deferred that fires with a slot; cancel it to leave the queue."""

    def release(self, name: str) -> None:
        """Give back a slot or a reserved turn."""


class CheckoutSource(Protocol):
    """Source of checked-out commits, which is the cache of `git.checkouts`."""

    def needs_network(self, repository: Repository, oid: str, caller: str) -> bool:
        """Return whether `check_out` would fetch over a network. Raises: EvaluationFailure."""

    async def check_out(
        self, repository: Repository, oid: str, caller: str, *, again: bool = False
    ) -> Checkout:
        """Return a commit and its tree, which the evaluation releases. Raises: EvaluationFailure.

        `again` is true for the second request of the same evaluation.
        """


@attrs.define(eq=False)
class EvaluationContext:
    """Dependencies that all evaluations share; a reload replaces `configuration`.

    `random(n)` returns n random bytes, as `os.urandom`; `time()` is in seconds since the epoch.
    `fetch_slots` bounds fetches over a network, beside the run slots. `cleanups` repeats
    removals that have failed.
    """

    configuration: Configuration
    clock: Any
    random: Callable[[int], bytes]
    threads: WorkerThreads
    spawn: Spawner
    repositories: CheckoutSource
    sandbox: Sandbox
    monitor: LimitMonitor
    budget: Budget
    fetch_slots: FairQueue = attrs.field(factory=lambda: FairQueue(1, UNBOUNDED))
    time: Callable[[], float] = time.time
    quota_directories: DeferredQueue[Path] | None = None  # the free ones; None without quotas
    tally: EvaluationTally = attrs.field(factory=EvaluationTally)
    cleanups: RetryQueue = attrs.field(
        default=attrs.Factory(lambda self: RetryQueue(self.threads), takes_self=True)
    )
