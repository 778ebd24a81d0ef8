"""Start of the daemon: its directories, starter, checks, and access.

$STATE_DIRECTORY/key            32 random bytes, mode 0600: the key of the identifiers' MAC
$STATE_DIRECTORY/uploads/       forms that are being received
$STATE_DIRECTORY/evaluations/   one workspace for each evaluation, with its events
$STATE_DIRECTORY/evaluations.sqlite  what is known of them (`evaluations.store`)
$STATE_DIRECTORY/starter/       the socket of a starter that the daemon has started
$STATE_DIRECTORY/trash/         what an earlier process has left, while a thread removes it
$STATE_DIRECTORY/accounts/      passwd and group files of the sandboxes
$STATE_DIRECTORY/environments/  imported root file systems (`sandbox.environments`)
$STATE_DIRECTORY/archive/       ended evaluations (`[archive]`)
$CACHE_DIRECTORY/repositories/  fetched repositories

The unit of systemd, or whoever starts the daemon, names the socket of a starter of evaluators
(`linux.starter`) in an environment variable. Its evaluators outlive the daemon. Without it the
daemon starts one itself, which ends with the daemon.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any

import attrs
from twisted.application.service import Service
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from tawebeval.config import Configuration
from tawebeval.core.evaluations import SECRET_KEY_BYTES
from tawebeval.daemon.configuration import locate_directories
from tawebeval.deferreds import WorkerThreads, run_in_background
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.evaluations.starting import InheritedResources
from tawebeval.evaluations.store import EvaluationStore
from tawebeval.git.command import check_git_version
from tawebeval.linux import daemon_limits
from tawebeval.linux.cgroups import (
    CgroupManager,
    describe_missing_limits,
    find_process_limit_cgroup,
)
from tawebeval.linux.child import kill_directory_processes
from tawebeval.linux.filetree import (
    DISK_FULL_REMEDY,
    describe_disk_error,
    is_disk_full_error,
    remove_tree,
    replace_private_file,
    sync_file_system,
)
from tawebeval.linux.privileges import check_owner
from tawebeval.linux.starter_client import StarterClient
from tawebeval.sandbox.base import Sandbox
from tawebeval.sandbox.bubblewrap import remove_shell_copies, write_sandbox_files
from tawebeval.sandbox.probe import ProbeDirectories, check_sandbox_and_log_problems
from tawebeval.sandbox.workspace import WorkspaceLauncher
from tawebeval.web.auth import (
    Authenticator,
    RateLimit,
    find_metrics_token_file,
    find_token_file,
)

STORE_FILENAME = "evaluations.sqlite"
"""The name of the database of evaluations in the state directory."""

_EVALUATION_ENTRIES = ("uploads", "evaluations")

STATE_DIRECTORY_ENTRIES = (
    *("lock", "key", "key.new", "accounts", "archive", "environments"),
    *("trash", "starter"),
    *(f"{STORE_FILENAME}{suffix}" for suffix in ("", "-wal", "-shm", ".lock")),
    *_EVALUATION_ENTRIES,
)
CACHE_DIRECTORY_ENTRIES = ("lock", "repositories")
"""Entries of the two directories, which the daemon's user must own."""

STARTER_SOCKET_VARIABLE = "TAWEBEVAL_STARTER"
"""The environment variable with the path of the starter's socket."""

SYNC_PERIOD_SECONDS = 5.0
"""Seconds from a commit to its write to the disk, besides those that the disk takes."""

log = Logger()


@attrs.frozen
class DaemonDirectories:
    """Open directories, locked as long as `directory_locks` are open. Made by `open_directories`.

    `daemon_label` is unique among the daemons of this machine.
    """

    daemon_label: str
    uploads: Path
    evaluations: Path
    sandbox_files_directory: Path
    repositories: Path
    mac_key_content: bytes = attrs.field(repr=False)
    state_directory: Path
    directory_locks: tuple[IO[str], ...] = attrs.field(repr=False)

    def move_leftovers_to_trash(self, kept: Collection[str] = ()) -> None:
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
        return self.state_directory / "trash"

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
        remedy = f"{DISK_FULL_REMEDY}, or " if is_disk_full_error(error) else ""
        raise ConfigurationError(
            f"{error.filename}: {error.strerror}; {remedy}name other directories by"
            " STATE_DIRECTORY and CACHE_DIRECTORY"
        ) from None


def find_existing_ancestor(path: Path) -> Path:
    """Return a path, or its closest ancestor that exists."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def derive_daemon_label(state: Path) -> str:
    """Return the label of a daemon: 12 hexadecimal digits from its state directory."""
    return hashlib.sha256(bytes(state.resolve())).hexdigest()[:12]


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
        replace_private_file(path, random(SECRET_KEY_BYTES))
    check_mac_key_file(path)
    return path.read_bytes()


def check_mac_key_file(path: Path) -> None:
    """Check the size of the key. Raises: ConfigurationError, OSError."""
    size = path.stat().st_size
    if size != SECRET_KEY_BYTES:
        raise ConfigurationError(
            f"{path} has {size} bytes, and a key has {SECRET_KEY_BYTES}",
            "remove the file; identifiers issued before are then unknown",
        )


def open_starter(
    configuration: Configuration, environment: Mapping[str, str], state: Path
) -> tuple[WorkspaceLauncher, bool]:
    """Return what starts evaluators, and whether they outlive the daemon. Blocks.

    `state` is the state directory. Without a sandbox evaluations never outlive the daemon. Raises:
    ConfigurationError, if the named starter does not answer, is of another version or may have too
    little for evaluators.
    """
    path = environment.get(STARTER_SOCKET_VARIABLE, "")
    if not path or configuration.sandbox.kind == "none":
        return WorkspaceLauncher(state / "starter" / "socket"), False
    launcher = WorkspaceLauncher(Path(path), is_own=False)
    try:
        client = launcher.connect_starter()
    except OSError as error:
        raise ConfigurationError(
            f"{STARTER_SOCKET_VARIABLE}: the starter does not answer: {error.strerror or error}",
            "start tawebeval-starter.service",
        ) from None
    try:
        with suppress(PermissionError):  # of another user
            daemon_limits.check_hard_limits(configuration.limits, client.pid)
    except ConfigurationError:
        launcher.close()
        raise
    return launcher, True


def describe_limits_on_starter(
    configuration: Configuration, starter: StarterClient
) -> Iterator[str | SetupProblem]:
    """Yield what the starter may have and need: a problem if too few. Blocks, hardly.

    What the kernel does not tell is left out.
    """
    cgroup = find_process_limit_cgroup(starter.cgroups)
    with suppress(PermissionError):  # of another user
        for name, found in daemon_limits.assess_starter_limits(configuration, starter.pid, cgroup):
            what = f"{name}: {found}"
            yield SetupProblem(what, found.remedy) if found.problems else what


@attrs.define
class DiskSync:
    """Writer of the file system of `directory`, which has the store and all its files.

    A commit of the store, and the files that belong to it, are safe from `kill -9` at once; the
    kernel writes them to the disk up to half a minute later. One call for the whole file system
    (syncfs(2)) costs the requests nothing, unlike one for each file and commit.
    """

    _store: EvaluationStore
    _directory: Path
    _threads: WorkerThreads
    _clock: IReactorTime
    _synced_count: int = 0  # transactions
    _is_syncing: bool = False
    _next: float = 0.0  # clock time from which the next write may begin

    def sync_if_due(self) -> None:
        """Write to the disk if something was committed. To be called once a second."""
        has_changed = self._store.transaction_count != self._synced_count
        if has_changed and not self._is_syncing and self._clock.seconds() >= self._next:
            self._is_syncing = True
            run_in_background(self._sync(), log, "defect: the disk could not be synchronized")

    async def _sync(self) -> None:
        count = self._store.transaction_count
        try:
            await self._threads.run_in_thread(sync_file_system, self._directory)
        except OSError as error:
            words = "rows and files of evaluations are not written to the disk: {error}"
            log.error(words, error=describe_disk_error(error))  # noqa: TRY400  (no defect)
        finally:
            self._synced_count, self._is_syncing = count, False
            self._next = self._clock.seconds() + SYNC_PERIOD_SECONDS


@attrs.define(eq=False, slots=False)
class StartupChecks(Service):
    """Service that starts before the evaluations, as the daemon's user, and stops last.

    It owns the directories with their locks, the cgroups, the sandbox and the thread `pools`.
    `inherited` is what an earlier process has left.
    """

    name = "startup"

    directories: DaemonDirectories
    _cgroups: CgroupManager
    _sandbox: Sandbox
    _pools: Sequence[WorkerThreads]
    _inherited: InheritedResources

    def startService(self) -> None:
        """Clear the directories, check them, git and the sandbox; start the threads.

        Raises: SystemExit, with a message, if a check fails or no threads can be started.
        """
        super().startService()
        directories = self.directories
        try:
            self._remove_leftovers()
            if not self._inherited.job_names:  # a node may be about to show them
                remove_shell_copies(directories.sandbox_files_directory)
            write_sandbox_files(directories.sandbox_files_directory)
            check_git_version()
        except OSError as error:
            raise SystemExit(f"tawebeval: {describe_disk_error(error)}") from None
        except ConfigurationError as error:
            raise SystemExit(f"tawebeval: {error}") from None
        if problem := describe_missing_limits(self._cgroups):
            log.warn("limits: {problem}", problem=problem)
        check_sandbox_and_log_problems(
            self._sandbox, ProbeDirectories(directories.repositories, directories.evaluations)
        )
        try:
            for threads in self._pools:
                threads.start()
            # No pool's: the stop does not wait for it, the next start goes on.
            Thread(target=self._empty_trash, name="trash", daemon=True).start()
        except (OSError, RuntimeError) as error:  # the second is Python's own of a thread
            what = getattr(error, "strerror", "threads")
            raise SystemExit(f"tawebeval: {what}; {daemon_limits.PROCESS_LIMIT_REMEDY}") from None

    def _remove_leftovers(self) -> None:
        """Discard what an earlier process has left, but for evaluations that go on. Blocks.

        Raises: OSError.
        """
        directories, inherited = self.directories, self._inherited
        starter = self._sandbox.workspace_launcher.connect_starter()
        programs = starter.list_programs()
        # A starter that is gone may have left what has hidden from it, of evaluations that end now.
        evaluators = () if programs else (directories.evaluations,)
        if killed := kill_directory_processes(directories.repositories, *evaluators):
            what = "killed {count} processes left by an earlier daemon: {pids}"
            log.warn(what, count=len(killed), pids=sorted(killed))
        for program in programs:
            evaluation = program.parent
            if evaluation.parent != directories.evaluations.resolve() or (
                evaluation.name not in inherited.running_directory_names
            ):
                starter.forget_program_blocking(program)
        self._cgroups.remove_orphan_cgroups(inherited.cgroup_names)
        directories.move_leftovers_to_trash(inherited.directory_names)

    def _empty_trash(self) -> None:
        try:
            self.directories.empty_trash()
        except OSError as error:
            what = "files of an earlier process in the trash are not removed: {error}"
            log.error(what, error=describe_disk_error(error))  # noqa: TRY400  (no defect)

    def stopService(self) -> None:
        """Stop the threads, the sandbox and the cgroups. Blocks until the threads have ended."""
        super().stopService()
        for threads in self._pools:
            threads.stop()
        self._sandbox.workspace_launcher.close()
        self._cgroups.remove_all_cgroups()


def open_authenticator(configuration: Configuration, clock: Any) -> Authenticator:
    """Return the authenticator of callers.

    Raises: ConfigurationError, if the tokens cannot be read.
    """
    callers = configuration.callers
    source = find_token_file(callers, os.environ)
    return Authenticator(RateLimit(callers.requests_per_minute, clock.seconds), source)


def open_metrics_authenticator(configuration: Configuration, clock: Any) -> Authenticator | None:
    """Return the authenticator of metrics readers, None if they need no token.

    Raises: ConfigurationError, if the tokens cannot be read.
    """
    source = find_metrics_token_file(configuration.metrics, os.environ)
    if source is None:
        return None
    return Authenticator(RateLimit(0, clock.seconds), source, "metrics.tokens")
