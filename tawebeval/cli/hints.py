"""Hints for authors: the probable cause of a failed `try`, and the option that mends it.

The cause is a limit that the failure names, or it is read from the evaluator's stderr.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from tawebeval.client import EvaluationError
from tawebeval.config import Configuration
from tawebeval.errors import format_size

_CANNOT_EXECUTE = 126  # the shell's exit status for a file that it may not execute
_DENIED = re.compile(r"([^\s:'\"]+): Permission denied")
_NO_NETWORK = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Could not resolve host"
    r"|Network is unreachable|getaddrinfo|EAI_AGAIN"
)
_LIMITS = {
    "memory": r"MemoryError|Cannot allocate memory|bad_alloc|OutOfMemoryError|[Oo]ut of memory",
    "processes": r"Resource temporarily unavailable|can't start new thread|[Cc]annot fork",
    "open_files": r"Too many open files",
    "file_size": r"File too large|File size limit exceeded",
    "disk": r"No space left on device|Disk quota exceeded",
}
_IN_BYTES = ("memory", "file_size", "disk", "output", "stderr")
_IN_SECONDS = ("wall_clock", "cpu")


@attrs.frozen
class Hints:
    """Hints for an evaluation by the tree `root` whose command runs in `directory`."""

    _configuration: Configuration
    _root: Path
    _directory: str

    def find(self, error: EvaluationError | None, stderr: str) -> list[str]:
        """Return the hints for an evaluation; `error` is its last event if it has failed."""
        found = [*self._explain(error), *self._read(stderr)] if error else [*self._read(stderr)]
        return list(dict.fromkeys(found))

    def _explain(self, error: EvaluationError) -> Iterator[str]:
        """Yield hints for the reason of a failure."""
        section, _, name = str(error.members.get("limit", "")).partition(".")
        if section == "limits" and name in _LIMITS.keys() | {*_IN_BYTES, *_IN_SECONDS}:
            yield self._raise_limit(name)
        if error.reason == "directory":
            yield self._list_directories()
        if error.members.get("status") == _CANNOT_EXECUTE:
            for path in _DENIED.findall(str(error.members.get("stderr", ""))):
                file = self._root / self._directory / path
                if not path.startswith("/") and os.path.isfile(file):
                    yield f"{path} is not executable; run `chmod +x {file}`, and commit the change"

    def _read(self, stderr: str) -> Iterator[str]:
        """Yield hints for what stderr shows."""
        sandbox = self._configuration.sandbox
        if sandbox.kind != "none" and not sandbox.network and _NO_NETWORK.search(stderr):
            yield (
                "the sandbox has no network; to allow it, set sandbox.network = true in the file of"
                " --config"
            )
        for name, pattern in _LIMITS.items():
            if re.search(pattern, stderr):
                yield self._raise_limit(name)

    def _raise_limit(self, name: str) -> str:
        value: Any = getattr(self._configuration.limits, name)
        shown = f"{value:g}"
        if name in _IN_BYTES:
            shown = format_size(value)
        elif name in _IN_SECONDS:
            shown += " seconds"
        return (
            f"limits.{name} is {shown}; to raise it, set limits.{name} = {2 * value} in the file of"
            " --config"
        )

    def _list_directories(self) -> str:
        parent = (self._root / self._directory).parent
        above = parent if parent.is_dir() and self._root in parent.parents else self._root
        names = sorted(
            path.name for path in above.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
        if not names:
            return f"{above} has no directories"
        return f"the directories in {above} are: {', '.join(names)}"
