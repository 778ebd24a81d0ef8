"""What evaluations need from the world, and are given."""

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
    """Where evaluations run, and wait for that, each under its identifier."""

    def reserve(self, name: str, caller: str) -> None:
        """Keep the turn of one that cannot run yet."""

    def acquire(self, name: str, caller: str) -> Deferred[None]:
        """Return what fires when there is a place; cancelling that gives up waiting."""

    def release(self, name: str) -> None:
        """Give back a place, or a turn."""


class CheckoutSource(Protocol):
    """Where commits come from."""

    def needs_network(self, repository: Repository, oid: str, caller: str) -> bool:
        """Tell whether `check_out` would fetch over a network. Raises EvaluationError."""

    async def check_out(
        self, repository: Repository, oid: str, caller: str, *, again: bool = False
    ) -> Checkout:
        """Return the commit and its tree, to be released. Raises EvaluationError.

        `again` is for the second time that an evaluation asks.
        """


@attrs.define(eq=False)
class EvaluationContext:
    """What evaluations need from the world, handed in; a reload changes the configuration.

    `fetches` are places to fetch over a network, beside those to run.
    """

    configuration: Configuration
    clock: Any
    random: Callable[[int], bytes]
    threads: WorkerThreads
    spawn: Spawner
    repositories: CheckoutSource
    sandbox: Sandbox
    watch: LimitMonitor
    budget: Budget
    fetches: FairQueue = attrs.field(factory=lambda: FairQueue(1, UNBOUNDED))
    time: Callable[[], float] = time.time
    quota_directories: DeferredQueue[Path] | None = None  # that are free; None without quotas
    tally: EvaluationTally = attrs.field(factory=EvaluationTally)
    arrears: RetryQueue = attrs.field(
        default=attrs.Factory(lambda self: RetryQueue(self.threads), takes_self=True)
    )
