"""The operator's files of secrets: read, and looked at for who else could read them."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from twisted.logger import Logger

from tawebeval.errors import ConfigurationError, Problem

_STRANGERS = 0o007  # the bits of a mode by which every user of the machine can get at a file

Content = TypeVar("Content")

log = Logger()


def read_secrets(path: Path, parse: Callable[[str], Content]) -> Content:
    """Return what `parse` makes of the text of a file. Blocks.

    Raises ConfigurationError with the file, and what else `parse` tells of that kind.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: is not UTF-8") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def find_file(configured: str, credential: str, environment: Mapping[str, str]) -> Path | None:
    """Return where a file of secrets is: as configured, or what systemd hands over by that name.

    None where there is neither. Raises ConfigurationError where that cannot be told.
    """
    if configured:
        return Path(configured).absolute()
    folder = environment.get("CREDENTIALS_DIRECTORY")
    if not folder:
        return None
    given = Path(folder, credential)
    try:
        return given if given.exists() else None
    except OSError as error:  # to take it for none could be to let everybody in
        raise ConfigurationError(f"{given}: cannot be read: {error.strerror}") from None


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, empty where there is none. Blocks.

    Raises OSError where it cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def find_strangers(path: Path, mode: int) -> Problem | None:
    """Return the problem of a secret file whose `mode` lets every user of the machine in."""
    if not mode & _STRANGERS:
        return None
    what = f"{path}: every user of this machine can get at it"
    return Problem(what, f"chmod o= {shlex.quote(str(path))}")


def warn_of_strangers(path: Path, mode: int, setting: str) -> None:
    """Log that every user could get at the file that `setting` names, if its `mode` says so."""
    problem = find_strangers(path, mode)
    if problem is not None:
        log.warn("{setting}: {problem}", setting=setting, problem=str(problem))
