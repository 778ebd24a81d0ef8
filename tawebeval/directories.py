"""The daemon's directories: its state, with the key of its identifiers, and its cache.

$STATE_DIRECTORY/key            32 random bytes, 0600: it makes and checks identifiers
$STATE_DIRECTORY/uploads/       forms that are arriving
$STATE_DIRECTORY/evaluations/   one workspace for each evaluation
$STATE_DIRECTORY/accounts/      the users and groups that there are in a sandbox
$CACHE_DIRECTORY/repositories/  fetched repositories
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import attrs

from tawebeval.errors import ConfigurationError
from tawebeval.identity import KEY_BYTES
from tawebeval.workspace import remove


@attrs.frozen
class Directories:
    """Opened by `open_directories`, and locked as long as `locks` are open."""

    uploads: Path
    evaluations: Path
    accounts: Path
    repositories: Path
    key: bytes = attrs.field(repr=False)
    locks: tuple[IO[str], ...] = attrs.field(repr=False)


def open_directories(environment: Mapping[str, str], random: Callable[[int], bytes]) -> Directories:
    """Make what is missing, take the locks, and remove what an earlier daemon has left.

    systemd names the directories in STATE_DIRECTORY and CACHE_DIRECTORY; without it they
    follow the XDG Base Directory Specification. Raises ConfigurationError.
    """
    state = _locate(environment, "STATE_DIRECTORY", "XDG_STATE_HOME", ".local/state")
    cache = _locate(environment, "CACHE_DIRECTORY", "XDG_CACHE_HOME", ".cache")
    try:
        locks = _lock(state), _lock(cache)
        for leftovers in (state / "uploads", state / "evaluations"):
            remove(leftovers)
            leftovers.mkdir(mode=0o700)
        (cache / "repositories").mkdir(mode=0o700, exist_ok=True)
        key = _key(state / "key", random)
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from None
    return Directories(
        (state / "uploads").resolve(),
        (state / "evaluations").resolve(),
        (state / "accounts").resolve(),
        (cache / "repositories").resolve(),
        key,
        locks,
    )


def _locate(environment: Mapping[str, str], given: str, xdg: str, default: str) -> Path:
    if environment.get(given):
        # systemd may give several, of which the first is the service's own.
        return Path(environment[given].split(":")[0])
    base = environment.get(xdg) or os.path.join(environment.get("HOME", "/"), default)
    return Path(base, "tawebeval")


def _lock(directory: Path) -> IO[str]:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = open(directory / "lock", "a", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigurationError(
            f"{directory} is in use by another tawebeval; give this one its own "
            "STATE_DIRECTORY and CACHE_DIRECTORY"
        ) from None
    return file


def _key(path: Path, random: Callable[[int], bytes]) -> bytes:
    if not path.exists():
        unfinished = path.with_suffix(".new")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(random(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ConfigurationError(
            f"{path} should have {KEY_BYTES} bytes; remove it, and identifiers issued so far "
            "are no longer recognised"
        )
    return key
