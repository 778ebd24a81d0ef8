"""Whether the daemon would take work, and if not, why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import attrs

from tawebeval.errors import Busy
from tawebeval.registry import Registry
from tawebeval.tally import EvaluationTally


@attrs.define(on_setattr=attrs.setters.frozen)
class Readiness:
    """Looks at what a new evaluation needs first.

    On each of the file systems of `directories`, which have names for people, `free` bytes have to
    be left.
    """

    _registry: Registry
    _tally: EvaluationTally
    _directories: Sequence[tuple[str, Path]]
    free: int = attrs.field(on_setattr=attrs.setters.NO_OP)

    def obstacles(self) -> list[str]:
        """Return sentences that say why no work would be taken; none where it would.

        Strangers may read them: there are no paths in them, nor anybody's names.
        """
        found = []
        try:
            self._registry.check_admission()
        except Busy as error:
            found.append(error.detail)
        for name, path in self._directories:
            fault = self._fault(path)
            if fault is not None:
                found.append(f"the file system of the {name} {fault}")
        if self._tally.fault is not None:
            _, what = self._tally.fault
            found.append(f"the last evaluation was lost here: {what}")
        return found

    def _fault(self, path: Path) -> str | None:
        """Return what is wrong with a directory, in words for after its name."""
        try:
            status = os.statvfs(path)
        except OSError as error:
            return f"cannot be used: {error.strerror}"
        if not os.access(path, os.W_OK | os.X_OK):
            return "cannot be written to"
        # Some file systems have no fixed number of inodes, and say 0 of 0.
        out_of_inodes = status.f_files > 0 and status.f_favail == 0
        if out_of_inodes or status.f_bavail * status.f_frsize < self.free:
            return "is full, or nearly so"
        return None
