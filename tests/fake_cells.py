"""A fake sandbox, whose cells do as the test says and have no process, group or disk."""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from math import inf
from pathlib import Path
from resource import struct_rusage
from typing import Any

import attrs

from tawebeval.config import Limits
from tawebeval.core.checkout import Checkout
from tawebeval.errors import EvaluationError
from tawebeval.linux.cgroups.group import Cgroups
from tawebeval.linux.cgroups.groups import Usage
from tawebeval.linux.launcher_client import Launch, Launching
from tawebeval.linux.privileges import User
from tawebeval.linux.reports import Overlay
from tawebeval.linux.starting import Started
from tawebeval.sandbox.base import Exit
from tawebeval.sandbox.disk import TooMuchWork
from tawebeval.sandbox.workspace import View, Workspace
from tests.fake_children import NO_PROCESS
from tests.gates import Gate

NO_CGROUPS = Cgroups([], {}, {})
"""A machine on which there is nothing to limit a tree with."""


@attrs.define(eq=False)
class FakeCell:
    """A cell. `orphans` shut, what the first process leaves resists its end.

    `unable`, if set, is raised instead of a start; `over` is what `exceeded` answers, `unstarted`
    what `exit` raises, `used` the usage, `needed` how many looks at the disk it takes to answer.
    So many bytes are `written`, and so many `free`.
    """

    limits: Limits
    view: View
    orphans: Gate = attrs.field(factory=Gate)
    over: EvaluationError | None = None
    unstarted: EvaluationError | None = None
    used: Usage = attrs.field(factory=lambda: Usage(None, None))
    unable: OSError | None = None
    started_as: list[Launch] = attrs.field(factory=list)
    closed: int = 0
    looks: list[bool] = attrs.field(factory=list)
    needed: float = 0
    written: int = 0
    free: float = inf
    child: Any = None

    def start(self, command: str, environment: Mapping[str, str], directory: Path) -> Launch:
        """Start nothing, and return what would be, for a fake spawner to adopt."""
        if self.unable is not None:
            raise self.unable
        self.started_as.append(Launch(["/bin/sh", "-c", command], environment, str(directory)))
        return self.started_as[-1]

    def started(self, child: Any) -> None:
        """Note the child."""
        self.child = child

    def signal(self, child: Any, number: int) -> None:
        """Pass on a signal."""
        child.signalProcess(number)

    def exceeded(self, final: bool = False, work: float = inf) -> EvaluationError | None:
        """Answer, and note the question."""
        self.looks.append(final)
        if self.needed > work:
            raise TooMuchWork
        return self.over

    @property
    def short(self) -> bool:
        """Whether too little is free."""
        return self.free < self.limits.free_disk

    def nearly_full(self) -> EvaluationError:
        """Return the error of one that is stopped for it."""
        return EvaluationError("disk", "nearly full")

    async def end(self) -> None:
        """Return when the gate is open."""
        self.child.signal_group(signals.SIGKILL)
        await self.orphans.wait()

    def exit(self, status: int | None, number: int | None) -> Exit:
        """Return what was given."""
        if self.unstarted is not None:
            raise self.unstarted
        return Exit(status, number)

    def usage(self, waited: struct_rusage | None) -> Usage:
        """Return what the test says."""
        return self.used

    def close(self) -> None:
        """Count."""
        self.closed += 1


@attrs.define
class FakeTrees:
    """Makes no trees; `made` are the checkouts that trees were wanted of.

    What is started is a child that is none, if `launching` does not start it. `overlay` is
    everybody's, `launched` what was to be started, `error` raised instead.
    `problem` is why there are no overlays, from the start or since somebody wanted copies; `asked`
    are the users who were to make trees.
    """

    launching: Launching | None = None
    overlay: Overlay | None = None
    problem: str | None = None
    error: OSError | None = None
    made: list[Path] = attrs.field(factory=list)
    launched: list[Launch] = attrs.field(factory=list)
    asked: list[User | None] = attrs.field(factory=list)
    closed: int = 0

    def mount(self, user: User | None = None) -> None:
        """Note the user."""
        self.asked.append(user)
        if self.error is not None:
            raise self.error

    def copy(self, problem: str, user: User | None = None) -> None:
        """Note the user, and take the problem."""
        self.mount(user)
        self.problem = problem

    def start(
        self, checkout: Path, workspace: Workspace, launch: Launch
    ) -> tuple[Started, Overlay | None]:
        """Return a child."""
        self.made.append(checkout)
        self.launched.append(launch)
        if self.error is not None:
            raise self.error
        if self.launching is not None:
            return self.launching.start(launch)[0], self.overlay
        return Started(NO_PROCESS, -1, -1, -1), self.overlay

    def close(self) -> None:
        """Count."""
        self.closed += 1


class FakeSandbox:
    """Makes fake cells, which all share a gate for their orphans."""

    def __init__(self, limits: Limits) -> None:
        self.cells: list[FakeCell] = []
        self.orphans = Gate()
        self.unable: OSError | None = None  # of cells that are made from now on
        self.limits = limits

    def cell(self, workspace: Workspace, checkout: Checkout) -> Any:
        """Return a new cell."""
        cell = FakeCell(self.limits, workspace.as_it_is(), self.orphans, unable=self.unable)
        self.cells.append(cell)
        return self.cells[-1]

    @property
    def last(self) -> FakeCell:
        """The cell that was made last."""
        return self.cells[-1]
