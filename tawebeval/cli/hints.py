"""Hints for authors: the probable cause of a failed `try`, and the option that mends it.

The error message names the cause; the hint says how to mend it. `describe_usage` says what the
evaluation used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from tawebeval.client import EvaluationError
from tawebeval.config import Configuration
from tawebeval.core.limits import ChosenLimits
from tawebeval.errors import format_size
from tawebeval.evaluations.exit_messages import find_denied_files, guess_setting_at_fault
from tawebeval.linux.cgroups import ResourceUsage
from tawebeval.sandbox.base import EvaluatorExit


@attrs.frozen
class HintFinder:
    """Hints for an evaluation by the tree `root` whose command runs in `directory`.

    `copy` is a copy of the tree that can be read. `chosen` are the limits of --limit.
    """

    _configuration: Configuration
    _root: Path
    _copy: Path
    _directory: str
    _chosen: ChosenLimits = attrs.field(factory=dict)

    def find_hints(self, error: EvaluationError | None, stderr: str) -> Iterator[str]:
        """Yield the hints for an evaluation; `error` is its last event if it has failed."""
        if error is None:
            return
        setting = str(error.members.get("limit", ""))
        if error.reason == "exit":
            end = EvaluatorExit(error.members.get("status"), error.members.get("signal"))
            sandbox = self._configuration.sandbox
            has_network = sandbox.kind == "none" or sandbox.network
            setting = guess_setting_at_fault(end, stderr, has_network=has_network)
            for path in find_denied_files(end, stderr):
                file = self._root / self._directory / path
                is_file = os.path.isfile(self._copy / self._directory / path)
                if not path.startswith("/") and is_file:
                    yield f"{path} is not executable; run `chmod +x {file}`, and commit the change"
        section, _, name = setting.partition(".")
        if setting == "sandbox.network":
            yield describe_setting("to allow a network", section, name, "true")
        elif section == "limits" and name in self._chosen:
            yield f"to raise {setting}, give another value by --limit {name}=VALUE"
        elif section == "limits" and name != "free_disk":  # a larger reserve would not help
            value = 2 * getattr(self._configuration.limits, name)
            yield describe_setting(f"to raise {setting}", section, name, value)
        if error.reason == "directory":
            yield self._list_directories()

    def _list_directories(self) -> str:
        parent = (self._copy / self._directory).parent
        found = parent if parent.is_dir() and self._copy in parent.parents else self._copy
        names = sorted(
            path.name for path in found.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
        above = self._root / found.relative_to(self._copy)
        if not names:
            return f"{above} has no directories"
        return f"the directories in {above} are: {', '.join(names)}"


def describe_usage(usage: ResourceUsage, wall_seconds: float, memory_limit: int) -> str:
    """Return the time and peak memory of a `try`; `memory_limit` is limits.memory in bytes.

    A machine without cgroups measures neither processor time nor memory.
    """
    used = f"used {wall_seconds:.2f} s"
    if usage.cpu_seconds is not None:
        used += f", {usage.cpu_seconds:.2f} s of processor time"
    if usage.peak_memory_bytes is not None:
        return f"{used}, {format_size(usage.peak_memory_bytes)} of memory"
    return (
        f"{used}; limits.memory ({format_size(memory_limit)}) held for each process alone, but most"
        " servers count all processes together"
    )


def describe_setting(purpose: str, section: str, name: str, value: Any) -> str:
    """Return how to set a value in the file of --config."""
    return f"{purpose}, in the file of --config write [{section}] and below it {name} = {value}"
