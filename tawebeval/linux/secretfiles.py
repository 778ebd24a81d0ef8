"""The operator's files of secrets: read, and looked at for who else could read them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from twisted.logger import Logger

from tawebeval.errors import ConfigurationError

STRANGERS = 0o007
"""The bits of a mode by which every user of the machine can get at a file."""

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


def warn_of_strangers(path: Path, mode: int, setting: str) -> None:
    """Log it where every user could read the file of this mode, which some setting names."""
    if mode & STRANGERS:
        log.warn(
            "{setting}: every user of this machine can read {path}", setting=setting, path=path
        )
