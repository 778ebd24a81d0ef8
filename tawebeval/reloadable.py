"""Interface of the reload: files that can be read again while the daemon runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import attrs

Content = TypeVar("Content")


def _no_notes(_: object) -> Sequence[Any]:
    return ()


@attrs.frozen
class ReloadableFiles(Generic[Content]):
    """Files that a reload reads again, with the callbacks to read and to apply their content.

    `name` is the setting that names the files, or a description. `read_files` blocks, changes
    nothing and raises ConfigurationError. `apply_content` must not fail. `make_operator_notes`
    returns remarks for the operator on a content, such as settings that need a restart: sentences
    without a full stop.
    """

    name: str
    paths: Sequence[Path]
    read_files: Callable[[], Content]
    apply_content: Callable[[Content], None]
    make_operator_notes: Callable[[Content], Sequence[str]] = _no_notes


class ReloadableFilesOwner(Protocol):
    """Object that has reloadable files."""

    def list_reloadable_files(self) -> Iterable[ReloadableFiles[Any]]:
        """Return the reloadable files."""


@attrs.frozen
class ReloadResult:
    """Result of a reload.

    With `error_messages` nothing has changed. `operator_notes` are the remarks on a reload without
    problems.
    """

    error_messages: tuple[str, ...] = ()
    operator_notes: tuple[str, ...] = ()
