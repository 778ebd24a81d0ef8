"""Commits and checkouts as plain values, so that sandbox and evaluations do not import git."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs


@attrs.frozen
class Submodule:
    """A commit of another repository that belongs at `path` in a tree.

    `url` is as in `.gitmodules`: it may be relative.
    """

    path: str
    oid: str
    url: str = ""


@attrs.frozen
class Commit:
    """A commit and its tree, by their OIDs.

    The tree has `file_count` files of `size` bytes together. `has_gitattributes`: it has a file
    `.gitattributes`.
    """

    oid: str
    tree_oid: str
    file_count: int = 0
    size: int = 0
    submodules: tuple[Submodule, ...] = ()
    has_gitattributes: bool = attrs.field(default=False, eq=False)


@attrs.frozen
class Checkout:
    """A commit and the read-only directory `path` of its tree, which exists until `release()`."""

    commit: Commit
    path: Path
    release: Callable[[], None] = attrs.field(eq=False)
