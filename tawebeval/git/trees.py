"""How large a commit's tree is, known before anything of it is written.

A tree of a few kilobytes in a repository can be billions of files when it is checked out. So
git lists it, and is stopped as soon as the list is too long.
"""

from __future__ import annotations

import attrs

from tawebeval.errors import EvaluationError

_LONGEST_PATH = 4096  # bytes: PATH_MAX of Linux


@attrs.frozen
class TreeLimits:
    """What a tree may have: `files` counts directories and links, too; `size` is in bytes."""

    files: int
    size: int

    def check(self, files: int, size: int) -> None:
        """Raise EvaluationError where that is too much."""
        if files > self.files:
            raise EvaluationError(
                "repository",
                f"the commit has more than {self.files} files and directories",
                {"limit": "repositories.tree_files", "value": self.files},
            )
        if size > self.size:
            raise EvaluationError(
                "repository",
                f"the commit's files have more than {self.size} bytes",
                {"limit": "repositories.tree_bytes", "value": self.size},
            )


@attrs.define
class TreeMeter:
    """Adds up what `git ls-tree -r -t -l -z` prints, until it is over a limit.

    It keeps no more than the beginning of one entry.
    """

    _limits: TreeLimits
    files: int = 0
    size: int = 0
    _rest: bytes = b""

    def feed(self, chunk: bytes) -> None:
        """Take more of the list. Raises EvaluationError as soon as it is too much."""
        *entries, self._rest = (self._rest + chunk).split(b"\0")
        for entry in entries:
            head, _, path = entry.partition(b"\t")
            self._check_path(path)
            self.files += 1
            size = head.split()[-1]
            self.size += int(size) if size.isdigit() else 0
            self._limits.check(self.files, self.size)
        self._check_path(self._rest.partition(b"\t")[2])

    def _check_path(self, path: bytes) -> None:
        if len(path) > _LONGEST_PATH:
            raise EvaluationError(
                "repository", f"the commit has a path of more than {_LONGEST_PATH} bytes"
            )
