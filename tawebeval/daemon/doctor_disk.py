"""Checks of `tawebeval doctor`: directories, their owners and modes, and free space.

An unnamed temporary file shows whether a directory is writable.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from tawebeval.config import Configuration
from tawebeval.daemon.directories import (
    CACHE_DIRECTORY_ENTRIES,
    STATE_DIRECTORY_ENTRIES,
    check_key_file,
    find_existing_ancestor,
    locate_archive,
    locate_directories,
)
from tawebeval.daemon.health import probe_disk_write
from tawebeval.deferreds import resolve_run_slot_count
from tawebeval.errors import ConfigurationError, SetupProblem, format_size
from tawebeval.linux.filetree import DISK_FULL_REMEDY, is_disk_full
from tawebeval.linux.privileges import (
    build_directory_install_command,
    can_others_write,
    check_owner,
    get_user_name,
)
from tawebeval.sandbox.limits import measure_disk_usage

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_RIGHTS = {"r": os.R_OK, "w": os.W_OK, "x": os.X_OK}
_WRITABLE = "mount it for writing, or name another directory by STATE_DIRECTORY and CACHE_DIRECTORY"


@attrs.frozen
class ExaminedDaemon:
    """The daemon that a start with this configuration `file`, None without one, would make."""

    configuration: Configuration
    file: Path | None
    environment: Mapping[str, str]
    reactor: Any

    @property
    def state(self) -> Path:
        """The state directory."""
        return locate_directories(self.environment)[0]

    @property
    def cache(self) -> Path:
        """The cache directory."""
        return locate_directories(self.environment)[1]

    @property
    def user_name(self) -> str:
        """The name of the daemon's user."""
        return get_user_name(os.geteuid())


def make_probe_directories(daemon: ExaminedDaemon) -> tuple[Path, Path]:
    """Make directories for probe checkouts and workspaces, where the daemon's are or will be.

    They are among the temporary files if the present user cannot write there.
    """

    def make(path: Path) -> Path:
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="tawebeval-", dir=find_existing_ancestor(path)))
        return Path(tempfile.mkdtemp(prefix="tawebeval-"))

    return make(daemon.cache), make(daemon.state)


def check_writers(path: Path) -> None:
    """Raise ConfigurationError if other users may write to a path."""
    if can_others_write(path.stat()):
        what = f"{path}: other users may write to it"
        raise ConfigurationError(what, f"chmod go-w {shlex.quote(str(path))}")


def _check_file(daemon: ExaminedDaemon) -> Iterator[str]:
    if daemon.file is not None:
        check_writers(daemon.file)
        yield str(daemon.file)


def _check_directory(name: str, entries: Sequence[str], daemon: ExaminedDaemon) -> Iterator[str]:
    """Check the state or cache directory and its `entries`. Raises: ConfigurationError, OSError."""
    path: Path = getattr(daemon, name)
    if os.statvfs(find_existing_ancestor(path)).f_flag & os.ST_RDONLY:
        raise ConfigurationError(f"{path}: its file system is mounted read-only", _WRITABLE)
    if not path.exists():
        _check_missing(path, daemon)
        yield f"{path}: does not exist; the daemon creates it"
        return
    if path.stat().st_uid == os.geteuid():
        _check_rights(path, daemon)
    check_owner(path, entries)
    for entry in entries:
        _check_rights(path / entry, daemon)
    check_writers(path)
    _check_writes(path, f"{path}: cannot write", _WRITABLE)
    yield str(path)


def _check_missing(path: Path, daemon: ExaminedDaemon) -> None:
    above = find_existing_ancestor(path)
    if not os.access(above, os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigurationError(
            f"{path}: does not exist, and {daemon.user_name} cannot create it in {above}",
            "name another directory by STATE_DIRECTORY or CACHE_DIRECTORY, or as root: "
            f"{build_directory_install_command(path, daemon.user_name)}",
        )


def _check_rights(path: Path, daemon: ExaminedDaemon) -> None:
    letters = "rwx" if path.is_dir() else "r" if path.name == "key" else "w"
    mode = sum(_RIGHTS[letter] for letter in letters)
    if path.exists() and not os.access(path, mode, effective_ids=True):
        raise ConfigurationError(
            f"{path}: {daemon.user_name} lacks the permissions {letters}",
            f"chmod u+{letters} {shlex.quote(str(path))}",
        )


def _check_writes(path: Path, what: str, remedy: str) -> None:
    try:
        probe_disk_write(path)
    except OSError as error:
        remedy = DISK_FULL_REMEDY if is_disk_full(error) else remedy
        raise ConfigurationError(f"{what}: {error.strerror}", remedy) from None


def _check_key(daemon: ExaminedDaemon) -> Iterator[str]:
    path = daemon.state / "key"
    try:
        mode = path.stat().st_mode
    except OSError:  # missing, or the check of the directory reports it
        return
    if mode & _OTHERS:
        what = f"{path}: other users can read the key and forge identifiers"
        raise ConfigurationError(what, f"chmod 600 {path}")
    check_key_file(path)
    yield str(path)


def _check_archive(daemon: ExaminedDaemon) -> Iterator[str]:
    settings = daemon.configuration.archive
    if settings.enabled:
        path = locate_archive(settings, daemon.state)
        if settings.directory:  # the other one is part of the state directory
            above = path if path.exists() else path.parent
            remedy = f"as root: {build_directory_install_command(path, daemon.user_name)}"
            _check_writes(above, f"{path}: {daemon.user_name} cannot write in {above}", remedy)
        yield str(path)


@attrs.frozen
class _Space:
    """Bytes that a directory may need because of `settings`, and the bytes `taken` already."""

    path: Path
    needed: int
    taken: int
    settings: tuple[str, ...]


def _list_spaces(configuration: Configuration, state: Path, cache: Path) -> Iterator[_Space]:
    limits, repositories = configuration.limits.largest_requestable, configuration.repositories
    running = resolve_run_slot_count(configuration.evaluations.running)
    fetched = repositories.fetch_bytes + repositories.tree_bytes
    yield _Space(
        state,
        limits.uploads
        + configuration.buffers.disk
        + running * (limits.disk + limits.output + repositories.tree_bytes),
        0,
        ("limits.uploads", "buffers.disk", "limits.disk", "repositories.tree_bytes"),
    )
    yield _Space(
        cache,
        repositories.cache + (running + repositories.fetches) * fetched,
        min(_measure_directory(cache), repositories.cache),
        ("repositories.cache", "repositories.fetch_bytes", "repositories.tree_bytes"),
    )
    archive = configuration.archive
    if archive.enabled:
        path = locate_archive(archive, state)
        taken = min(_measure_directory(path), archive.size)
        yield _Space(path, archive.size, taken, ("archive.size",))


def _measure_directory(directory: Path) -> int:
    try:
        return measure_disk_usage(directory, ()).disk_bytes
    except OSError:  # missing or not readable: the check of the directory reports it
        return 0


def check_free_space(daemon: ExaminedDaemon) -> Iterator[str | SetupProblem]:
    """Compare the free bytes of each file system with docs/scale.md, "Sizing".

    A file system with both directories needs the sum. Bytes in the cache count as free. Blocks in
    proportion to the number of files in the cache. Raises: OSError.
    """
    systems: dict[int, list[_Space]] = {}
    for space in _list_spaces(daemon.configuration, daemon.state, daemon.cache):
        systems.setdefault(os.stat(find_existing_ancestor(space.path)).st_dev, []).append(space)
    for spaces in systems.values():
        taken = sum(space.taken for space in spaces)
        room = shutil.disk_usage(find_existing_ancestor(spaces[0].path)).free + taken
        reserve = daemon.configuration.limits.free_disk_for_readiness
        needed = sum(space.needed for space in spaces) + reserve
        paths = " and ".join(str(space.path) for space in spaces)
        free = "is free or in the cache" if taken else "is free"
        what = f"{paths}: {format_size(room)} {free}, and up to {format_size(needed)} may be needed"
        settings = dict.fromkeys(name for space in spaces for name in space.settings)
        remedy = f"use a larger file system, or lower {', '.join(settings)} or evaluations.running"
        yield what if room >= needed else SetupProblem(what, remedy)


CHECKS = (
    ("permissions", _check_file),
    ("permissions", partial(_check_directory, "state", STATE_DIRECTORY_ENTRIES)),
    ("permissions", partial(_check_directory, "cache", CACHE_DIRECTORY_ENTRIES)),
    ("permissions", _check_key),
    ("archive", _check_archive),
    ("disk", check_free_space),
)
"""The components and their checks."""
