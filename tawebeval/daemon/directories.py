"""State and cache directories of the daemon, with their locks and the key of identifiers.

$STATE_DIRECTORY/key            32 random bytes, mode 0600: the key of the identifiers' MAC
$STATE_DIRECTORY/uploads/       forms that are being received
$STATE_DIRECTORY/evaluations/   one workspace for each evaluation, with its events
$STATE_DIRECTORY/evaluations.sqlite  what is known of them (`evaluations.store`)
$STATE_DIRECTORY/starter/       the socket of a starter that the daemon has started
$STATE_DIRECTORY/trash/         what an earlier process has left, while a thread removes it
$STATE_DIRECTORY/accounts/      passwd and group files of the sandboxes
$STATE_DIRECTORY/environments/  imported root file systems (`sandbox.environment_store`)
$STATE_DIRECTORY/archive/       ended evaluations, unless `archive.directory` is set
$CACHE_DIRECTORY/repositories/  fetched repositories
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO

import attrs

from tawebeval.config import ArchiveSettings
from tawebeval.core.evaluations import SECRET_KEY_BYTES
from tawebeval.errors import ConfigurationError
from tawebeval.linux.filetree import (
    DISK_FULL_REMEDY,
    add_path_to_errors,
    is_disk_full,
    remove_tree,
)
from tawebeval.linux.privileges import check_owner, get_home

STORE_NAME = "evaluations.sqlite"
"""The name of the database of evaluations in the state directory."""

_EVALUATION_ENTRIES = ("uploads", "evaluations")

STATE_DIRECTORY_ENTRIES = (
    *("lock", "key", "key.new", "accounts", "archive", "environments"),
    *("trash", "starter"),
    *(f"{STORE_NAME}{suffix}" for suffix in ("", "-wal", "-shm", ".lock")),
    *_EVALUATION_ENTRIES,
)
CACHE_DIRECTORY_ENTRIES = ("lock", "repositories")
"""Entries of the two directories, which the daemon's user must own."""


@attrs.frozen
class DaemonDirectories:
    """Open directories, locked as long as `lock_files` are open. Made by `open_directories`.

    `daemon_label` is unique among the daemons of this machine.
    """

    daemon_label: str
    uploads: Path
    evaluations: Path
    sandbox_files_directory: Path
    repositories: Path
    identifier_mac_key: bytes = attrs.field(repr=False)
    state: Path
    lock_files: tuple[IO[str], ...] = attrs.field(repr=False)

    def remove_leftovers(self, kept: Collection[str] = ()) -> None:
        """Move the uploads and evaluations of an earlier daemon to the trash. Blocks.

        Their files may be so many that their removal takes a minute: `empty_trash` does it, for a
        thread. `kept` are the names of those that are still needed. Raises: OSError.

        The caller must have dropped its privileges, because the removal may start programs.
        """
        for directory in (self.uploads, self.evaluations):
            if directory.is_symlink():  # its target does not belong to the daemon
                directory.unlink()
            if kept and directory.is_dir():
                for path in list(directory.iterdir()):
                    if path.name not in kept:
                        self._discard(path)
            else:
                self._discard(directory)
                directory.mkdir(mode=0o700)

    def _discard(self, path: Path) -> None:
        """Move a directory to the trash; remove it if it cannot be moved."""
        try:
            os.rename(path, self.trash / os.urandom(8).hex())
        except OSError:  # another file system; no permission; a full disk
            remove_tree(path)

    @property
    def trash(self) -> Path:
        """The directory of files that are to be removed."""
        return self.state / "trash"

    def empty_trash(self) -> None:
        """Remove what is in the trash. Blocks. Raises: OSError, after all that can be removed."""
        problem = None
        for path in self.trash.iterdir():
            try:
                remove_tree(path)
            except OSError as error:
                problem = error
        if problem is not None:
            raise problem


def open_directories(
    environment: Mapping[str, str], random: Callable[[int], bytes]
) -> DaemonDirectories:
    """Create missing directories, and lock them.

    STATE_DIRECTORY and CACHE_DIRECTORY (systemd) name them, or else the variables of the XDG Base
    Directory Specification. `random` returns so many random bytes. Raises: ConfigurationError.
    """
    state, cache = locate_directories(environment)
    try:
        for directory in (state, cache):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(state, STATE_DIRECTORY_ENTRIES)
        check_owner(cache, CACHE_DIRECTORY_ENTRIES)
        locks = _lock_directory(state), _lock_directory(cache)
        for part in (
            *(state / name for name in ("accounts", "trash", *_EVALUATION_ENTRIES)),
            cache / "repositories",
        ):
            part.mkdir(mode=0o700, exist_ok=True)
        key = _read_key(state / "key", random)
        return DaemonDirectories(
            derive_daemon_label(state),
            state.resolve() / "uploads",
            state.resolve() / "evaluations",
            state.resolve() / "accounts",
            (cache / "repositories").resolve(),
            key,
            state.resolve(),
            locks,
        )
    except OSError as error:
        remedy = f"{DISK_FULL_REMEDY}, or " if is_disk_full(error) else ""
        raise ConfigurationError(
            f"{error.filename}: {error.strerror}; {remedy}name other directories by"
            " STATE_DIRECTORY and CACHE_DIRECTORY"
        ) from None


def locate_directories(environment: Mapping[str, str]) -> tuple[Path, Path]:
    """Return the paths of the state and the cache directory."""
    return (
        _locate_directory(environment, "STATE_DIRECTORY", "XDG_STATE_HOME", ".local/state"),
        _locate_directory(environment, "CACHE_DIRECTORY", "XDG_CACHE_HOME", ".cache"),
    )


def locate_archive(settings: ArchiveSettings, state: Path) -> Path:
    """Return the directory of the archive."""
    return Path(settings.directory) if settings.directory else state / "archive"


def find_existing_ancestor(path: Path) -> Path:
    """Return a path, or its closest ancestor that exists."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def derive_daemon_label(state: Path) -> str:
    """Return the label of a daemon: 12 hexadecimal digits from its state directory."""
    return hashlib.sha256(bytes(state.resolve())).hexdigest()[:12]


def _locate_directory(environment: Mapping[str, str], given: str, xdg: str, default: str) -> Path:
    if environment.get(given):
        # systemd may name several; the first belongs to the service.
        return Path(environment[given].split(":")[0])
    base = environment.get(xdg) or os.path.join(
        environment.get("HOME") or get_home(os.geteuid()), default
    )
    return Path(base, "tawebeval")


def _lock_directory(directory: Path) -> IO[str]:
    file = open(directory / "lock", "a", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigurationError(
            f"{directory} is in use by another tawebeval; stop it, or set another STATE_DIRECTORY"
            " and CACHE_DIRECTORY"
        ) from None
    return file


def _read_key(path: Path, random: Callable[[int], bytes]) -> bytes:
    if not path.exists():
        unfinished = path.with_suffix(".new")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with add_path_to_errors(unfinished), open(descriptor, "wb") as file:
            file.write(random(SECRET_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    check_key_file(path)
    return path.read_bytes()


def check_key_file(path: Path) -> None:
    """Check the size of the key. Raises: ConfigurationError, OSError."""
    size = path.stat().st_size
    if size != SECRET_KEY_BYTES:
        raise ConfigurationError(
            f"{path} has {size} bytes, and a key has {SECRET_KEY_BYTES}",
            "remove the file; identifiers issued before are then unknown",
        )
