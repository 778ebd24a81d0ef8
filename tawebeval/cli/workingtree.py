"""A working directory in the place of a commit: copied, and never changed."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import attrs

from tawebeval.core.checkout import Checkout, Commit
from tawebeval.core.form import Repository
from tawebeval.deferreds import Threads
from tawebeval.errors import EvaluationError
from tawebeval.git.commits import TreeLimits

NO_COMMIT = "0" * 40
"""What stands for the commit that there is not."""


@attrs.frozen
class WorkingTree:
    """The directory `root`, as evaluations fetch it, once.

    What is below `without`, where the copy lies then, is left out.
    """

    root: Path
    without: Path
    _limits: TreeLimits
    _threads: Threads

    def needs_network(self, repository: Repository, oid: str, caller: str) -> bool:
        """Tell that no network is needed."""
        return False

    async def check_out(
        self, repository: Repository, oid: str, caller: str, *, again: bool = False
    ) -> Checkout:
        """Return a copy of all of it, but git's own directory. Raises EvaluationError."""
        tree = self.without / "checkout"
        files, size = await self._threads.run(self._copy, tree)
        return Checkout(Commit(oid, NO_COMMIT, files, size), tree, lambda: None)

    def _copy(self, target: Path) -> tuple[int, int]:
        files = size = 0
        try:
            target.mkdir(parents=True)
            for folder, directories, names in os.walk(self.root, onerror=_refuse):
                place = Path(folder)
                directories[:] = [name for name in directories if not self._hidden(place / name)]
                for name in (*directories, *names):
                    source = place / name
                    files += 1
                    size += self._copy_one(source, target / source.relative_to(self.root))
                    self._limits.check(files, size)
        except OSError as error:
            raise EvaluationError(
                "repository", f"{error.filename} cannot be copied: {error.strerror}"
            ) from None
        return files, size

    def _hidden(self, path: Path) -> bool:
        return path in (self.root / ".git", self.without)

    def _copy_one(self, source: Path, target: Path) -> int:
        """Copy a file, a link or an empty directory; return how many bytes a file has."""
        status = source.lstat()
        if stat.S_ISLNK(status.st_mode):
            target.symlink_to(os.readlink(source))
        elif stat.S_ISDIR(status.st_mode):
            target.mkdir()
        elif stat.S_ISREG(status.st_mode):
            shutil.copy2(source, target)
            return status.st_size
        # Sockets and the like are nothing that a commit could have.
        return 0


def _refuse(error: OSError) -> None:
    raise error
