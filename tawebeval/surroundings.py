"""What evaluations need from the world, and are given."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import attrs

from tawebeval.arrears import Arrears
from tawebeval.budget import Budget
from tawebeval.checkouts import Checkout
from tawebeval.config import Configuration
from tawebeval.form import Repository
from tawebeval.process import Spawner
from tawebeval.sandbox import Sandbox
from tawebeval.signals import Threads
from tawebeval.tally import EvaluationTally
from tawebeval.watch import Watch


class Places(Protocol):
    """Where evaluations run, and wait for that, each under its identifier."""

    def enter(self, name: str, caller: str) -> Awaitable[None]:
        """Return what is to be awaited for a place; cancelling that gives up waiting."""

    def leave(self, name: str) -> None:
        """Give a place back."""


class Source(Protocol):
    """Where commits come from."""

    async def check_out(self, repository: Repository, oid: str, caller: str) -> Checkout:
        """Return the commit and its tree, for the caller to release. Raises EvaluationError."""


@attrs.define(eq=False, on_setattr=attrs.setters.frozen)
class Surroundings:
    """What evaluations need from the world, handed in; a reload changes the configuration."""

    configuration: Configuration = attrs.field(on_setattr=attrs.setters.NO_OP)
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
    arrears: Arrears = attrs.field(
        default=attrs.Factory(lambda self: Arrears(self.threads), takes_self=True)
    )
