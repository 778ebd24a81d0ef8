"""The submitted files of an evaluation, read again for `GET /evaluation/{id}/submission`."""

from __future__ import annotations

import errno
import os
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

from tawebeval.linux.filetree import open_regular_file

MAX_LISTED_CONTENT_BYTES = 256 * 1024
"""Bytes of the files in one answer, in all; a file beyond them is named without its content."""

MAX_LISTED_FILES = 1000
"""Files in one answer, at most."""

# In JSON six bytes each; and no editor shows them.
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1f]")


def read_submitted_files(directories: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the files below the first of `directories` that exists: FIELD/FILENAME.

    Each has `field`, `filename`, `size` in bytes and either `text` or `base64`, or neither if it is
    beyond `MAX_LISTED_CONTENT_BYTES`. Blocks. Raises: OSError; FileNotFoundError, if none exists.
    """
    for directory in directories[:-1]:
        with suppress(FileNotFoundError):
            return _read_directory(directory)
    return _read_directory(directories[-1])


def _read_directory(directory: Path) -> list[dict[str, Any]]:
    left = MAX_LISTED_CONTENT_BYTES
    files = []
    for path in islice(_list_files(directory), MAX_LISTED_FILES):
        with _open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            document = {"field": path.parent.name, "filename": path.name, "size": size}
            if size <= left:
                content = file.read(left)
                left -= len(content)
                document |= _encode_content(content)
            files.append(document)
    return files


def _open_file(path: Path) -> IO[bytes]:
    """Open a file. Raises: OSError; FileNotFoundError also for anything but a regular file.

    Without a sandbox an evaluator may have put anything in its place.
    """
    try:
        return open_regular_file(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileNotFoundError(errno.ENOENT, "a link", str(path)) from None
        raise


def _list_files(directory: Path) -> Iterator[Path]:
    for field in sorted(os.listdir(directory)):
        if not (directory / field).is_symlink():
            yield from (directory / field / name for name in sorted(os.listdir(directory / field)))


def _encode_content(content: bytes) -> dict[str, str]:
    if not _CONTROL.search(content):
        with suppress(UnicodeDecodeError):
            return {"text": content.decode()}
    return {"base64": b64encode(content).decode()}
