"""What can be read again while the daemon runs, and what has come of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import attrs

Content = TypeVar("Content")


def _nothing(_: object) -> Sequence[Any]:
    return ()


@attrs.frozen
class Reloadable(Generic[Content]):
    """Files that are read again, and what has their content count from then on.

    `name` is the setting that they belong to, or says what they are. `read` changes nothing,
    blocks, and raises ConfigurationError; `take` cannot fail. `notes` returns what the operator
    should know of such a content, in sentences without a full stop.
    """

    name: str
    paths: Sequence[Path]
    read: Callable[[], Content]
    apply: Callable[[Content], None]
    notes: Callable[[Content], Sequence[str]] = _nothing


class ReloadableSource(Protocol):
    """Whoever has what can be read again."""

    def reloadables(self) -> Iterable[Reloadable[Any]]:
        """Return what reads it."""


@attrs.frozen
class ReloadResult:
    """What has come of a reload.

    With `problems` nothing has changed. `notes` are what is to be known of one without any.
    """

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
