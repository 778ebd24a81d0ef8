"""A fake sandbox, whose cells do as the test says and have no process, group or disk."""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from tawebeval.cgroups import Cgroups
from tawebeval.checkouts import Checkout
from tawebeval.config import Limits
from tawebeval.errors import EvaluationError
from tawebeval.groups import Usage
from tawebeval.privileges import User
from tawebeval.sandbox import Exit, Launch
from tawebeval.workspace import View, Workspace
from tawebeval.writable import WritableTree
from tests.gates import Gate

NO_CGROUPS = Cgroups([], {}, {})
"""A machine on which there is nothing to limit a tree with."""


@attrs.define(eq=False)
class FakeCell:
    """A cell. `orphans` shut, what the first process leaves resists its end.

    `over` is what `exceeded` answers, `unstarted` what `exit` raises, `used` the usage.
    """

    limits: Limits
    view: View
    orphans: Gate = attrs.field(factory=Gate)
    over: EvaluationError | None = None
    unstarted: EvaluationError | None = None
    used: Usage = attrs.field(factory=lambda: Usage(None, None))
    opened: int = 0
    closed: int = 0
    looks: list[bool] = attrs.field(factory=list)
    child: Any = None

    def open(self) -> None:
        """Count."""
        self.opened += 1

    def launch(self, command: str, environment: Mapping[str, str], directory: Path) -> Launch:
        """Return the shell's command as it is."""
        return Launch(["/bin/sh", "-c", command], environment, str(directory), (9,))

    def started(self, child: Any) -> None:
        """Note the child."""
        self.child = child

    def signal(self, child: Any, number: int) -> None:
        """Pass on a signal."""
        child.signalProcess(number)

    def exceeded(self, final: bool = False) -> EvaluationError | None:
        """Answer, and note the question."""
        self.looks.append(final)
        return self.over

    async def end(self) -> None:
        """Return when the gate is open."""
        self.child.signal_group(signals.SIGKILL)
        await self.orphans.wait()

    def exit(self, status: int | None, number: int | None) -> Exit:
        """Return what was given."""
        if self.unstarted is not None:
            raise self.unstarted
        return Exit(status, number)

    def usage(self) -> Usage:
        """Return what the test says."""
        return self.used

    def close(self) -> None:
        """Count."""
        self.closed += 1


@attrs.define
class FakeTrees:
    """Makes `tree` for everybody and copies nothing; `made` are the checkouts it was made of.

    `problem` is why there are no overlays, from the start or since somebody gave them up.
    """

    tree: WritableTree = attrs.field(factory=WritableTree)
    problem: str | None = None
    made: list[Path] = attrs.field(factory=list)
    opened: list[User | None] = attrs.field(factory=list)
    closed: int = 0

    def open(self, user: User | None = None) -> None:
        """Note the user."""
        self.opened.append(user)

    def give_up(self, problem: str) -> None:
        """Take the problem."""
        self.problem = problem

    def make(self, checkout: Path, workspace: Workspace) -> WritableTree:
        """Return the tree."""
        self.made.append(checkout)
        return self.tree

    def close(self) -> None:
        """Count."""
        self.closed += 1


class FakeSandbox:
    """Makes fake cells, which all share a gate for their orphans."""

    def __init__(self, limits: Limits) -> None:
        self.cells: list[FakeCell] = []
        self.orphans = Gate()
        self._limits = limits

    def cell(self, workspace: Workspace, checkout: Checkout) -> Any:
        """Return a new cell."""
        self.cells.append(FakeCell(self._limits, workspace.as_it_is(), self.orphans))
        return self.cells[-1]

    @property
    def last(self) -> FakeCell:
        """The cell that was made last."""
        return self.cells[-1]
