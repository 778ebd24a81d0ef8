"""The files that evaluators send, saved in one directory and nowhere else."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import attrs

from tawebeval.client import File
from tawebeval.filenames import base_name


@attrs.frozen
class Folder:
    """A directory for files of strangers."""

    path: Path

    def save(self, file: File) -> Path:
        """Save a file under its own base name; return its path. Blocks.

        An older file of that name is replaced, and so is a symbolic link: nothing is written to
        where it leads. Raises ValueError for a name that is none, OSError.
        """
        target = self.path / base_name(file.filename)
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
        return target
