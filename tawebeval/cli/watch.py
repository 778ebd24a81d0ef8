"""`tawebeval evaluate --watch`: evaluates again when a file of the submission changes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from tawebeval.cli.runtime import CommandContext, report_failure
from tawebeval.client import ClientError

_INTERVAL = 0.3  # seconds between two looks

FileVersions: TypeAlias = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of change of each file; None for a file that does not exist."""


def repeat_on_change(
    context: CommandContext, paths: Sequence[Path], evaluate: Callable[[], int]
) -> int:
    """Evaluate now and after each change of a file, and return the status after a signal.

    An error of one evaluation is shown, and the next change evaluates again. Raises Interrupted
    for a signal between two evaluations.
    """
    while True:
        seen = read_versions(paths)
        try:
            status = evaluate()
        except (ClientError, OSError) as error:
            status = report_failure(error, context.screen)
        if context.interrupt_handler.received_signals:
            return status
        names = ", ".join(map(str, paths))
        context.screen.show_message(f"waiting for a change of {names}; Ctrl-C ends", "cyan")
        wait_for_change(paths, seen)


def read_versions(paths: Sequence[Path]) -> FileVersions:
    """Return the version of each file."""
    return tuple(map(_read_version, paths))


def _read_version(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:  # an editor may replace the file just now
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def wait_for_change(
    paths: Sequence[Path], seen: FileVersions, sleep: Callable[[float], object] = time.sleep
) -> None:
    """Return when all files exist, and one has another version than `seen` and stays so. Blocks."""
    before = seen
    while True:
        sleep(_INTERVAL)
        now = read_versions(paths)
        if now == before and now != seen and None not in now:
            return
        before = now
