"""The files that evaluators send, saved in one directory and nowhere else."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

import attrs

from tawebeval.client import File
from tawebeval.core.filenames import base_name


@attrs.frozen
class Folder:
    """A directory for the files of one evaluation, by strangers."""

    path: Path
    _taken: set[str] = attrs.field(factory=set, init=False, repr=False, eq=False)

    def save(self, file: File) -> Path:
        """Save a file under its own base name; return its path. Blocks.

        Where the evaluation has sent one of that name already it gets a number: `a-2.txt`. An
        older file is replaced, and so is a symbolic link: nothing is written to where it leads.
        Raises ValueError for a name that is none, OSError.
        """
        name = self._free(base_name(file.filename))
        target = self.path / name
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=self.path, prefix=".tawebeval-")
        try:
            with open(descriptor, "wb") as stream:
                stream.write(file.content)
                umask = os.umask(0)
                os.umask(umask)
                os.fchmod(stream.fileno(), 0o666 & ~umask)
            os.replace(unfinished, target)
        except BaseException:
            os.unlink(unfinished)
            raise
        self._taken.add(name)
        return target

    def _free(self, name: str) -> str:
        stem, suffix = os.path.splitext(name)
        numbered = (f"{stem}-{number}{suffix}" for number in itertools.count(2))
        return next(one for one in itertools.chain([name], numbered) if one not in self._taken)
