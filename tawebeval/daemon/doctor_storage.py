"""Storage checks of `tawebeval doctor`: directories, secret files, free space.

No check changes anything; an unnamed temporary file shows whether a directory is writable.
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

import attrs

from tawebeval.config import ArchiveSettings, Configuration, CredentialSettings
from tawebeval.daemon.directories import (
    CACHE_DIRECTORY_ENTRIES,
    STATE_DIRECTORY_ENTRIES,
    check_key_file,
    find_existing_ancestor,
    locate_archive,
    locate_directories,
)
from tawebeval.daemon.findings import Finding, run_checks
from tawebeval.daemon.health import probe_disk_write
from tawebeval.deferreds import resolve_run_slot_count
from tawebeval.errors import ConfigurationError, SetupProblem, format_size
from tawebeval.git.keyring import GitKeyring
from tawebeval.linux.filetree import DISK_FULL_REMEDY, is_disk_full
from tawebeval.linux.ownership import (
    build_directory_install_command,
    can_others_write,
    check_owner,
    find_readable_by_others_problem,
    get_user_name,
    is_writable_only_by_root,
)
from tawebeval.linux.privileges import Privileges
from tawebeval.sandbox.disk_usage import measure_disk_usage
from tawebeval.web.auth import find_metrics_token_file, find_token_file, read_token_file
from tawebeval.webhooks.signing import find_secrets_file, read_signing_secrets

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_RIGHTS = {"r": os.R_OK, "w": os.W_OK, "x": os.X_OK}
_WRITABLE = "mount it for writing, or name another directory by STATE_DIRECTORY and CACHE_DIRECTORY"


class StorageChecks:
    """Checks as the user in `privileges`. `environment` is that of the daemon.

    `configuration_file` is the configuration file, None without one.
    """

    def __init__(
        self,
        configuration: Configuration,
        file: Path | None,
        environment: Mapping[str, str],
        privileges: Privileges,
    ) -> None:
        self.configuration_file = file
        self._configuration = configuration
        self._environment = environment
        self._privileges = privileges
        self._state, self._cache = locate_directories(environment)
        user = privileges.user
        self._user = user.name if user else get_user_name(os.geteuid())
        self._uid = user.uid if user else os.geteuid()
        self._group = user.gid if user else os.getegid()

    def run_checks(self) -> Iterator[Finding]:
        """Run all checks and yield the findings. Blocks."""
        return run_checks(
            ("tokens", self._check_tokens),
            ("metrics", self._check_metrics_tokens),
            ("credentials", self._check_credentials),
            ("callbacks", self._check_callbacks),
            ("permissions", self._check_file),
            ("permissions", partial(self._check_directory, self._state, STATE_DIRECTORY_ENTRIES)),
            ("permissions", partial(self._check_directory, self._cache, CACHE_DIRECTORY_ENTRIES)),
            ("permissions", self._check_key),
            ("archive", self._check_archive),
            ("disk", self._check_space),
        )

    def make_probe_directories(self) -> tuple[Path, Path]:
        """Make directories for probe checkouts and workspaces, where the daemon's are or will be.

        They are among the temporary files if the daemon's user cannot write there.
        """
        with self._privileges.act_as_user():
            return _make_probe_directory(self._cache), _make_probe_directory(self._state)

    def _check_tokens(self) -> Iterator[str | SetupProblem]:
        try:
            source = find_token_file(self._configuration.callers, self._environment)
        except ConfigurationError:
            return  # the part "callers" reports it
        yield from self._check_token_file(source)

    def _check_metrics_tokens(self) -> Iterator[str | SetupProblem]:
        source = find_metrics_token_file(self._configuration.metrics, self._environment)
        yield from self._check_token_file(source)

    def _check_token_file(self, source: Path | None) -> Iterator[str | SetupProblem]:
        if source is not None:
            read_token_file(source)
            _check_writers(source)
            yield str(source)
            yield from self._check_reload(
                source, f"chgrp {self._group} {source}; chmod 640 {source}"
            )

    def _check_callbacks(self) -> Iterator[str | SetupProblem]:
        if self._configuration.callbacks.enabled:
            source = find_secrets_file(self._configuration.callbacks.secrets, self._environment)
            read_signing_secrets(source)
            yield f"signed with the callers' secrets in {source}"
            yield from self._check_reload(source, self._format_chown(source))
            _check_closed_to_others(source)

    def _check_reload(self, source: Path, remedy: str) -> Iterator[SetupProblem]:
        if not self._can_access(source, os.R_OK):
            what = f"{source}: {self._user} cannot read the file, so reloads fail"
            yield SetupProblem(what, remedy)

    def _check_credentials(self) -> Iterator[str | Finding]:
        settings = self._configuration.repositories.credentials
        if settings:
            GitKeyring(settings, self._environment.get("CREDENTIALS_DIRECTORY", ""), b"")
            yield f"{len(settings)} for private repositories"
            for entry in settings:
                yield from run_checks(("credentials", partial(self._check_credential, entry)))

    def _check_credential(self, entry: CredentialSettings) -> Iterator[SetupProblem]:
        directory = self._environment.get("CREDENTIALS_DIRECTORY", "")
        path = Path(directory, entry.password_file or entry.key_file)
        if not self._can_access(path, os.R_OK):
            # The daemon reads a password while it is root; ssh reads a key, each time.
            what = f"{path}: {self._user} cannot read the file, so"
            if entry.key_file:
                raise ConfigurationError(f"{what} ssh cannot use it", self._format_chown(path))
            yield SetupProblem(
                f"{what} a reload does not read a new password", self._format_chown(path)
            )
        _check_closed_to_others(path)

    def _check_file(self) -> Iterator[str]:
        if self.configuration_file is not None:
            _check_writers(self.configuration_file)
            yield str(self.configuration_file)

    def _check_directory(self, path: Path, parts: Sequence[str]) -> Iterator[str]:
        """Check the state or cache directory and its `parts`. Raises: ConfigurationError."""
        if os.statvfs(find_existing_ancestor(path)).f_flag & os.ST_RDONLY:
            raise ConfigurationError(f"{path}: its file system is mounted read-only", _WRITABLE)
        if not path.exists():
            self._check_missing(path)
            yield f"{path}: does not exist; the daemon creates it"
            return
        owner = path.stat().st_uid
        if owner == 0 and self._privileges.user and not os.listdir(path):
            yield f"{path}: empty; the daemon gives it to {self._user} at its start"
            return
        if owner == self._uid:
            self._check_rights(path)
        with self._privileges.act_as_user():
            check_owner(path, parts)
        for part in parts:
            self._check_rights(path / part)
        _check_writers(path)
        try:
            with self._privileges.act_as_user():
                probe_disk_write(path)
        except OSError as error:
            raise ConfigurationError(
                f"{path}: cannot write: {error.strerror}",
                DISK_FULL_REMEDY if is_disk_full(error) else _WRITABLE,
            ) from None
        yield str(path)

    def _check_missing(self, path: Path) -> None:
        """Check that a missing directory can be created. Raises: ConfigurationError."""
        above = find_existing_ancestor(path)
        root_makes_it = (
            self._privileges.user is not None
            and above == path.absolute().parent
            and all(is_writable_only_by_root(each.stat()) for each in (above, *above.parents))
        )
        if not root_makes_it and not self._can_access(above, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"{path}: does not exist, and {self._user} cannot create it in {above}",
                "name another directory by STATE_DIRECTORY or CACHE_DIRECTORY, or as root: "
                f"{build_directory_install_command(path, self._user)}",
            )

    def _check_rights(self, path: Path) -> None:
        """Check the rights of the daemon's user to a path. Raises: ConfigurationError."""
        letters = "rwx" if path.is_dir() else "r" if path.name == "key" else "w"
        if path.exists() and not self._can_access(path, sum(_RIGHTS[letter] for letter in letters)):
            raise ConfigurationError(
                f"{path}: {self._user} lacks the permissions {letters}",
                f"chmod u+{letters} {shlex.quote(str(path))}",
            )

    def _check_key(self) -> Iterator[str]:
        path = self._state / "key"
        try:
            if not path.exists():
                return
        except PermissionError:
            return  # the check of the directory reports it
        if path.stat().st_mode & _OTHERS:
            what = f"{path}: other users can read the key and forge identifiers"
            raise ConfigurationError(what, f"chmod 600 {path}")
        check_key_file(path)
        yield str(path)

    def _check_archive(self) -> Iterator[str]:
        """Check that the daemon can create and write to the archive's directory."""
        settings = self._configuration.archive
        if not settings.enabled:
            return
        path = locate_archive(settings, self._state)
        if settings.directory:  # the other one is part of the state directory
            above = path if path.exists() else path.parent
            try:
                with self._privileges.act_as_user():
                    probe_disk_write(above)
            except OSError as error:
                raise ConfigurationError(
                    f"{path}: {self._user} cannot write in {above}: {error.strerror}",
                    f"as root: {build_directory_install_command(path, self._user)}",
                ) from None
        yield str(path)

    def _check_space(self) -> Iterator[str | SetupProblem]:
        with self._privileges.act_as_user():
            found = list(check_free_space(self._configuration, self._state, self._cache))
        yield from found

    def _can_access(self, path: Path, mode: int) -> bool:
        with self._privileges.act_as_user():
            return os.access(path, mode, effective_ids=True)

    def _format_chown(self, path: Path) -> str:
        return f"chown {self._user}: {shlex.quote(str(path))}"


def _make_probe_directory(path: Path) -> Path:
    with suppress(OSError):
        return Path(tempfile.mkdtemp(prefix="tawebeval-", dir=find_existing_ancestor(path)))
    return Path(tempfile.mkdtemp(prefix="tawebeval-"))


def _check_closed_to_others(path: Path) -> None:
    problem = find_readable_by_others_problem(path, path.stat().st_mode)
    if problem is not None:
        raise ConfigurationError(*problem)


def _check_writers(path: Path) -> None:
    if can_others_write(path.stat()):
        what = f"{path}: other users may write to it"
        raise ConfigurationError(what, f"chmod go-w {shlex.quote(str(path))}")


@attrs.frozen
class _Space:
    """Bytes that a directory may need because of `settings`, and the bytes `taken` already."""

    path: Path
    needed: int
    taken: int
    settings: tuple[str, ...]


def check_free_space(
    configuration: Configuration, state: Path, cache: Path
) -> Iterator[str | SetupProblem]:
    """Compare the free bytes of each file system with docs/scale.md, "Sizing".

    A file system with both directories needs the sum. Bytes in the cache count as free. Blocks in
    proportion to the number of files in the cache. Raises: OSError.
    """
    limits, repositories = configuration.limits.largest_requestable, configuration.repositories
    running = resolve_run_slot_count(configuration.evaluations.running)
    fetched = repositories.max_fetch_bytes + repositories.tree_bytes
    systems: dict[int, list[_Space]] = {}
    for space in (
        _Space(
            state,
            limits.uploads
            + configuration.buffers.disk
            + running * (limits.disk + limits.output + repositories.tree_bytes),
            0,
            ("limits.uploads", "buffers.disk", "limits.disk", "repositories.tree_bytes"),
        ),
        _Space(
            cache,
            repositories.cache + (running + repositories.fetches) * fetched,
            min(_measure_directory(cache), repositories.cache),
            ("repositories.cache", "repositories.fetch_bytes", "repositories.tree_bytes"),
        ),
        *_list_archive_space(configuration.archive, state),
    ):
        systems.setdefault(os.stat(find_existing_ancestor(space.path)).st_dev, []).append(space)
    for spaces in systems.values():
        taken = sum(space.taken for space in spaces)
        room = shutil.disk_usage(find_existing_ancestor(spaces[0].path)).free + taken
        needed = sum(space.needed for space in spaces) + configuration.health.min_free_disk_bytes
        paths = " and ".join(str(space.path) for space in spaces)
        free = "is free or in the cache" if taken else "is free"
        what = f"{paths}: {format_size(room)} {free}, and up to {format_size(needed)} may be needed"
        settings = dict.fromkeys(name for space in spaces for name in space.settings)
        remedy = f"use a larger file system, or lower {', '.join(settings)} or evaluations.running"
        yield what if room >= needed else SetupProblem(what, remedy)


def _list_archive_space(settings: ArchiveSettings, state: Path) -> Iterator[_Space]:
    if settings.enabled:
        path = locate_archive(settings, state)
        taken = min(_measure_directory(path), settings.size)
        yield _Space(path, settings.size, taken, ("archive.size",))


def _measure_directory(directory: Path) -> int:
    try:
        return measure_disk_usage(directory, ()).disk_bytes
    except OSError:  # missing or not readable: the check of the directory reports it
        return 0
