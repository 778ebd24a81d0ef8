"""Inspection of a commit: whether git has it, its tree, and the size of the tree.

A tree of a few kilobytes in a repository can be billions of files when it is checked out. So git
lists the tree before anything of it is written, and is killed as soon as the list is over a limit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

from tawebeval.core.checkout import Commit, Submodule
from tawebeval.errors import EvaluationFailure, format_size

_LINE_KEPT = 1024  # bytes of a line that does not end
_FOUND = re.compile(rb"([0-9a-f]{40}) ([0-9a-f]{40})\n")
_SUBMODULE = b"160000"  # the mode of its entry, whose object is a commit
_PATH_MAX = 4096  # bytes: PATH_MAX of Linux


@attrs.frozen
class TreeLimits:
    """The size that a tree may have, with its submodules.

    `max_files` counts directories and links, too.
    """

    max_files: int
    max_bytes: int
    max_submodules: int = 0

    def check_submodules(self, path: str, count: int) -> None:
        """Raise EvaluationError if a tree with `count` submodules is over the limit.

        `path` is that of the last one.
        """
        if count > self.max_submodules:
            allowed = f"over {self.max_submodules} submodules" if self.max_submodules else "one"
            raise EvaluationFailure(
                "repository",
                f"the commit has a submodule at {path!r}; {allowed} in all is not allowed",
                {"path": path},
            )

    def check_tree(self, files: int, size: int) -> None:
        """Raise EvaluationError if a tree with these many `files` and bytes is over a limit."""
        if files > self.max_files:
            raise EvaluationFailure(
                "repository",
                f"the commit has over {self.max_files} files and directories",
            )
        if size > self.max_bytes:
            raise EvaluationFailure(
                "repository",
                f"the commit's files are over {format_size(self.max_bytes)} "
                "(repositories.tree_bytes)",
                {"limit": "repositories.tree_bytes", "value": self.max_bytes},
            )


@attrs.define
class TreeSizeMeter:
    """Sum of the output of `git ls-tree -r -t -l -z`, read in chunks.

    Of the output only the beginning of one entry is kept.
    """

    _limits: TreeLimits
    file_count: int = 0
    total_bytes: int = 0
    has_gitattributes: bool = False
    submodules: list[Submodule] = attrs.field(factory=list)
    _rest: bytes = b""

    def feed(self, chunk: bytes) -> None:
        """Add a chunk. Raises EvaluationError as soon as the tree is over a limit."""
        *entries, self._rest = (self._rest + chunk).split(b"\0")
        for entry in entries:
            head, _, path = entry.partition(b"\t")
            self._check_path(path)
            self.file_count += 1
            self.has_gitattributes |= path.rpartition(b"/")[2] == b".gitattributes"
            mode, _, oid, size = head.split()
            if mode == _SUBMODULE:
                self.submodules.append(
                    Submodule(path.decode("utf-8", "surrogateescape"), oid.decode())
                )
                self._limits.check_submodules(self.submodules[-1].path, len(self.submodules))
            self.total_bytes += int(size) if size.isdigit() else 0
            self._limits.check_tree(self.file_count, self.total_bytes)
        self._check_path(self._rest.partition(b"\t")[2])

    def _check_path(self, path: bytes) -> None:
        if len(path) > _PATH_MAX:
            raise EvaluationFailure(
                "repository", f"the commit has a path of over {format_size(_PATH_MAX)}"
            )


def build_commit_inspection_commands(oid: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return the two git commands whose output `CommitInspectionParser` reads."""
    return (
        ("log", "--no-walk", "--no-show-signature", "--format=%H %T", oid, "--"),
        ("ls-tree", "-r", "-t", "-l", "-z", oid),
    )


class CommitInspectionParser:
    """Parser of the output of `build_commit_inspection_commands`, read in chunks.

    `before`: number of commands, without output of interest, that run before them in the same
    sandbox. A NUL ends the output of each command but the last, if the command exited with 0.
    """

    def __init__(self, limits: TreeLimits, *, before: int = 0) -> None:
        self._before = before
        self._meter = TreeSizeMeter(limits)
        self._printed = [b""]

    def has_begun(self) -> bool:
        """Tell whether the commands before the inspection have exited with 0."""
        return len(self._printed) > self._before

    def feed(self, chunk: bytes) -> None:
        """Parse a chunk. Raises EvaluationError as soon as the tree is over a limit."""
        while not self._is_listing():
            printed, nul, chunk = chunk.partition(b"\0")
            self._printed[-1] = (self._printed[-1] + printed)[-_LINE_KEPT:]
            if not nul:
                return
            self._printed.append(b"")
        self._meter.feed(chunk)

    def _is_listing(self) -> bool:
        return len(self._printed) > self._before + 1

    def is_other_object(self) -> bool:
        """Tell whether git has the object, which is neither a commit nor a tag of one."""
        return self._is_listing() and not self._printed[self._before]

    @property
    def commit(self) -> Commit | None:
        """The commit, with as much of its tree as was listed; None if git does not have it.

        Of an annotated tag it is the commit that the tag names.
        """
        found = _FOUND.fullmatch(self._printed[self._before]) if self._is_listing() else None
        if found is None:
            return None
        meter = self._meter
        return Commit(
            found[1].decode(),
            found[2].decode(),
            meter.file_count,
            meter.total_bytes,
            tuple(meter.submodules),
            meter.has_gitattributes,
        )
