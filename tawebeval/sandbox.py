"""The one place that turns an evaluator's command into the argv that runs it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from tawebeval.workspace import Workspace


@attrs.frozen
class NoSandbox:
    """Runs the command as it is, with the rights of the daemon.

    `contains` tells whether nothing of a run can outlive its first process.
    """

    contains: bool = False

    def argv(self, command: str, workspace: Workspace) -> Sequence[str]:
        """Return what to execute so that `command` runs in `workspace`."""
        return ("/bin/sh", "-c", command)
