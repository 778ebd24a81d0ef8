"""The daemon's directories: its state, with the key of its identifiers, and its cache.

$STATE_DIRECTORY/key            32 random bytes, 0600: it makes and checks identifiers
$STATE_DIRECTORY/uploads/       forms that are arriving
$STATE_DIRECTORY/evaluations/   one workspace for each evaluation
$STATE_DIRECTORY/accounts/      the users and groups that there are in a sandbox
$STATE_DIRECTORY/quotas/        quota directories, one for each evaluation, if root has made them
$CACHE_DIRECTORY/repositories/  fetched repositories
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import attrs

from tawebeval.core.identifiers import KEY_BYTES
from tawebeval.errors import ConfigurationError
from tawebeval.linux.filetree import DISK_FULL_REMEDY, add_path, empty, is_full, remove
from tawebeval.linux.ownership import check_owner, give_directory
from tawebeval.linux.privileges import Privileges
from tawebeval.sandbox.project_quotas import find_quota_directories

_OF_EVALUATIONS = ("uploads", "evaluations")

OF_STATE = ("lock", "key", "key.new", "accounts", "quotas", *_OF_EVALUATIONS)
OF_CACHE = ("lock", "repositories")
"""What is in the two directories, and has to be the daemon's user's."""


@attrs.frozen
class Directories:
    """Opened by `open_directories`, and locked as long as `locks` are open.

    `label` is a word of their own: no other daemon on this machine has the same.
    """

    label: str
    uploads: Path
    evaluations: Path
    accounts: Path
    repositories: Path
    key: bytes = attrs.field(repr=False)
    locks: tuple[IO[str], ...] = attrs.field(repr=False)
    quotas: Sequence[Path] = ()

    def restore(self) -> list[Path]:
        """Make anew what somebody has removed meanwhile; return what that was. Raises OSError.

        The key is not among that: who removes it wants another one at the next start.
        """
        gone = []
        for path in (self.uploads, self.evaluations, self.accounts, self.repositories):
            if not path.is_dir():
                path.mkdir(mode=0o700)
                gone.append(path)
        return gone

    def clear(self) -> None:
        """Remove what an earlier daemon has left of evaluations; blocks. Raises OSError.

        Programs may be run for it, so it is the unprivileged daemon that does it.
        """
        for leftovers in (self.uploads, self.evaluations):
            if leftovers.is_symlink():  # and leads to what is not the daemon's to remove
                leftovers.unlink()
            remove(leftovers)
            leftovers.mkdir(mode=0o700)
        for directory in self.quotas:
            empty(directory)


def open_directories(
    environment: Mapping[str, str], random: Callable[[int], bytes], privileges: Privileges
) -> Directories:
    """Make what is missing, and take the locks; all of it belongs to the daemon's user.

    systemd names the directories in STATE_DIRECTORY and CACHE_DIRECTORY; without it they
    follow the XDG Base Directory Specification. Raises ConfigurationError.
    """
    state, cache = locate(environment)
    try:
        for directory in (state, cache):
            _provide(directory, privileges)
        with privileges.act_as_user():
            check_owner(state, OF_STATE)
            check_owner(cache, OF_CACHE)
            locks = _lock(state), _lock(cache)
            for part in (
                *(state / name for name in ("accounts", *_OF_EVALUATIONS)),
                cache / "repositories",
            ):
                part.mkdir(mode=0o700, exist_ok=True)
            key = _key(state / "key", random)
            return Directories(
                label_of(state),
                state.resolve() / "uploads",
                state.resolve() / "evaluations",
                state.resolve() / "accounts",
                (cache / "repositories").resolve(),
                key,
                locks,
                find_quota_directories(state.resolve()),
            )
    except OSError as error:
        whose = f" (as the user {privileges.user.name})" if privileges.user else ""
        remedy = f"{DISK_FULL_REMEDY}, or elsewhere: " if is_full(error) else ""
        raise ConfigurationError(
            f"{error.filename}: {error.strerror}{whose}; {remedy}STATE_DIRECTORY and"
            " CACHE_DIRECTORY say where to write"
        ) from None


def locate(environment: Mapping[str, str]) -> tuple[Path, Path]:
    """Return where the state and the cache are, as `open_directories` says."""
    return (
        _locate(environment, "STATE_DIRECTORY", "XDG_STATE_HOME", ".local/state"),
        _locate(environment, "CACHE_DIRECTORY", "XDG_CACHE_HOME", ".cache"),
    )


def existing(path: Path) -> Path:
    """Return a path, or what of the way to it is there already."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def label_of(state: Path) -> str:
    """Return the label of a daemon by its state directory."""
    return hashlib.sha256(bytes(state.resolve())).hexdigest()[:12]


def _provide(directory: Path, privileges: Privileges) -> None:
    """Make a directory as the user; where that may not, or has one of root's, as root for it."""
    try:
        with privileges.act_as_user():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if privileges.user is None or directory.stat().st_uid == os.geteuid():
                return
    except PermissionError:
        if privileges.user is None:
            raise
    give_directory(directory, privileges.user)


def _locate(environment: Mapping[str, str], given: str, xdg: str, default: str) -> Path:
    if environment.get(given):
        # systemd may give several, of which the first is the service's own.
        return Path(environment[given].split(":")[0])
    base = environment.get(xdg) or os.path.join(environment.get("HOME", "/"), default)
    return Path(base, "tawebeval")


def _lock(directory: Path) -> IO[str]:
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
        with add_path(unfinished), open(descriptor, "wb") as file:
            file.write(random(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    check_key(path)
    return path.read_bytes()


def check_key(path: Path) -> None:
    """Raise ConfigurationError for a key that is not whole; OSError."""
    size = path.stat().st_size
    if size != KEY_BYTES:
        raise ConfigurationError(
            f"{path} should have {KEY_BYTES} bytes, and has {size}",
            "remove it; identifiers issued so far are no longer recognised then",
        )
