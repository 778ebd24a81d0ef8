"""One bare repository in the cache: its commits, fetches, maintenance, and size on the disk.

Beside git's own files a repository has `url`, for people, and `commits/`: a marker for each commit
that is present with its whole tree, named by the commit's OID. A marker holds the OID of the tree,
the number of its files, their bytes, and the submodules, so that known commits need no git process.

Only the newest commits have a ref, and so a line in `shallow`, which git sends to the server with
each fetch. The objects of the others stay: no command here removes objects without a ref.
Maintenance packs what fetches leave, so that the thousandth fetch takes as long as the first.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredLock
from twisted.internet.defer import TimeoutError as DeadlineExceeded
from twisted.internet.task import LoopingCall

from tawebeval.core.checkout import Commit, Submodule
from tawebeval.core.form import Repository
from tawebeval.core.hosts import GitRoute
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import EvaluationFailure, format_size
from tawebeval.git.command import GitResult, GitRunner
from tawebeval.git.commits import CommitInspection, TreeLimits, build_inspection_commands
from tawebeval.git.credentials import Credential
from tawebeval.git.remotes import RemoteResolver
from tawebeval.git.stderr_patterns import explain_fetch, is_commit_missing, is_commit_unadvertised
from tawebeval.git.submodules import SubmoduleUrls, build_list_command
from tawebeval.linux.filetree import remove_tree, walk_tree
from tawebeval.resolver import LOOKUP_TIMEOUT
from tawebeval.sandbox.command_sandbox import SandboxAccess

_T = TypeVar("_T")

_FETCH = (
    "fetch",
    "--quiet",
    "--force",
    "--no-tags",
    "--no-recurse-submodules",
    "--no-write-fetch-head",
    "--no-auto-maintenance",
)
# An operator who allows `file` means repositories of other users, too. git-upload-pack(1) is safe
# for these: it runs nothing that their configuration names. Only that command gets the option.
_SERVE_OTHER_USERS = "--upload-pack=git -c safe.directory='*' upload-pack"
_LEFTOVERS = (
    *("*.lock", "refs/**/*.lock", "objects/tmp_*", "objects/pack/tmp_*"),
    *("objects/pack/.tmp-*", "objects/pack/*.keep"),
)
_INFINITE_DEPTH = 2**31 - 1  # git-fetch(1)
# Without a window git searches no deltas, but keeps those of servers: time depends on bytes alone.
_REPACK = ("repack", "--quiet", "-d", "-n", "--geometric=2", "--window=0", "--threads=1")
# git-prune(1) also removes the lines of `shallow` that no ref leads to.
_TIDY_COMMANDS = (("pack-refs", "--all"), ("prune", "--expire=never"))
_DIRECTORIES_SIZE = 48 * 1024  # bytes on the disk, of a dozen directories
_REFS = 8  # newest commits that have a ref, on which a server can base a pack
_MAINTENANCE_FILES = 100  # files added before maintenance is due; a fetch adds two or three
_LOCK_TIMEOUT = 5.0  # seconds that a fetch waits for maintenance, and maintenance for fetches
_MARKER = re.compile(r"([0-9a-f]{40}) ([0-9]+) ([0-9]+) (\[.*\])", re.ASCII)
_POLL_INTERVAL = 0.25  # seconds between two measurements of a fetch
_INITIAL_DIRECTORIES = (
    *("objects", "objects/info", "objects/pack"),
    *("refs", "refs/heads", "refs/tags", "info"),
)
_HEAD = "ref: refs/heads/main\n"
_CONFIG = """\
[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = true
"""
# Check files out as they were committed, whatever the tree's own .gitattributes say.
_ATTRIBUTES = "* -text -ident -filter !working-tree-encoding\n"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_MAX_POINTER = 1024  # bytes
_MARKERS = "commits"  # the directory with the markers

_Files = Mapping[str, os.stat_result]


@attrs.frozen
class FetchLimits:
    """Limits of fetches and trees.

    `timeout`: seconds for a fetch with all its attempts, and as many for checking out.
    `max_bytes`: bytes that each attempt may add to the repository.
    `tree_limits`: limits of the commit's tree.
    """

    clock: Any
    timeout: float
    max_bytes: int
    tree_limits: TreeLimits


@attrs.define
class BareRepository:
    """The repository in the directory `path`, which the first fetch creates.

    One lock covers fetches, maintenance and removal. `generation` counts removals
    (`discard_generation`). `is_empty` tells that no fetch has added anything yet.
    """

    path: Path
    _git: GitRunner
    _threads: WorkerThreads
    _remotes: RemoteResolver
    _limits: FetchLimits
    generation: int = 0
    is_empty: bool = True
    _lock: DeferredLock = attrs.field(factory=DeferredLock)
    _packing: Deferred[None] | None = None
    _fetches: int = 0
    _markers_size: int = 0  # bytes on the disk
    _files: int = 0  # without the markers
    _maintenance_step: int = _MAINTENANCE_FILES
    _maintenance_due: int = _MAINTENANCE_FILES  # files

    def find_marked_commit(self, oid: str) -> Commit | None:
        """Return the commit if it has a marker. Blocks briefly."""
        try:
            marker = _MARKER.fullmatch(self._marker(oid).read_text())
        except OSError:
            return None
        if marker is None:
            return None
        submodules = tuple(Submodule(*each) for each in json.loads(marker[4]))
        return Commit(oid, marker[1], int(marker[2]), int(marker[3]), submodules)

    def _marker(self, oid: str) -> Path:
        return self.path / _MARKERS / oid

    def _mark(self, commit: Commit) -> None:
        unfinished = self._marker(commit.oid).with_suffix(".new")
        submodules = json.dumps([attrs.astuple(each) for each in commit.submodules])
        unfinished.write_text(f"{commit.tree_oid} {commit.file_count} {commit.size} {submodules}")
        self._markers_size += unfinished.stat().st_blocks * 512
        unfinished.replace(self._marker(commit.oid))

    @property
    def has_commits(self) -> bool:
        """Whether a commit was ever fetched. Blocks briefly."""
        try:
            with os.scandir(self.path / _MARKERS) as markers:
                return any(markers)
        except OSError:
            return False

    def load_existing(self) -> int:
        """Take over the repository of an earlier daemon; return its bytes on the disk. Blocks."""
        self.remove_leftovers()
        self._markers_size = _disk_usage(_list_files(self.path / _MARKERS))
        return self.measure_disk_bytes()

    def measure_disk_bytes(self) -> int:
        """Return the bytes of the repository on the disk. Blocks.

        Markers, of which there may be many, are counted as they are written.
        """
        found = _list_files(self.path)
        self._files = len(found)
        self.is_empty = not self.has_commits and not any(
            name.startswith("objects") for name in found
        )
        return _disk_usage(found) + self._markers_size + _DIRECTORIES_SIZE

    def remove_leftovers(self) -> None:
        """Remove what a killed git leaves: locks and unfinished packs. Blocks."""
        for pattern in _LEFTOVERS:
            for leftover in self.path.glob(pattern):
                remove_tree(leftover)
        for part in self.path.glob("objects/pack/pack-*"):
            if not all(part.with_suffix(suffix).exists() for suffix in (".pack", ".idx")):
                remove_tree(part)

    @property
    def needs_maintenance(self) -> bool:
        """Whether fetches have added so many files that maintenance is due."""
        return self._files >= self._maintenance_due

    async def combine_packs(self, max_pack_size: int) -> None:
        """Combine the packs of fetches into packs of at most `max_pack_size` bytes.

        Raises: CancelledError if a fetch has waited for 5 seconds, or this has waited as long for
        fetches; EvaluationError if git fails.
        """
        await _cancel_late(self._lock.acquire(), self._limits.clock)
        self._maintenance_step *= 2  # until it succeeds, so that failures are rarely repeated
        try:
            self._packing = Deferred.fromCoroutine(self._pack(max_pack_size))
            if self._lock.waiting:
                _cancel_late(self._packing, self._limits.clock)
            await self._packing
            self._maintenance_step = _MAINTENANCE_FILES
        finally:
            self._packing = None
            try:
                await self._threads.run_in_thread(self._finish_maintenance)
            finally:
                self._lock.release()

    async def _pack(self, max_pack_size: int) -> None:
        result = await self._git.run_command(
            self.path,
            *_REPACK,
            next_commands=_TIDY_COMMANDS,
            timeout=self._limits.timeout,
            max_file_size=max_pack_size,
            reach=SandboxAccess((self.path,)),
        )
        if result.status:
            raise _failed("git could not pack the repository; see stderr", result)

    def _finish_maintenance(self) -> None:
        self.remove_leftovers()
        self.measure_disk_bytes()
        self._maintenance_due = self._files + self._maintenance_step

    async def _acquire(self) -> None:
        """Acquire the lock, and cancel maintenance that holds it for too long."""
        if self._packing is not None:
            _cancel_late(self._packing, self._limits.clock)
        await self._lock.acquire()

    async def check_out_commit(self, commit: Commit, tree: Path, index: Path) -> None:
        """Check a marked commit out into the directory `tree`; `index` is one for git's index.

        Raises: EvaluationError.
        """
        result = await self._git.run_command(
            self.path,
            f"--work-tree={tree}",
            *("read-tree", "--reset", "-u", commit.tree_oid),
            environment={"GIT_INDEX_FILE": str(index / "index")},
            timeout=self._limits.timeout,
            reach=SandboxAccess((tree, index)),
        )
        if result.is_timed_out:
            seconds = self._limits.timeout
            raise _failed(
                f"the checkout of the commit took over {seconds:g} seconds"
                " (repositories.fetch_timeout)",
                result,
                limit="repositories.fetch_timeout",
                value=seconds,
            )
        if result.status:
            raise _failed("git could not check out the commit; see stderr", result)
        pointer = await self._threads.run_in_thread(_find_lfs_pointer, tree)
        if pointer is not None:
            raise EvaluationFailure(
                "repository",
                f"{pointer!r} is stored in Git LFS, which this server does not fetch; commit the"
                " file itself (`git lfs migrate export`)",
                {"path": pointer},
            )

    async def discard_generation(self, generation: int) -> None:
        """Remove the repository, if it is still of that `generation`; the next fetch creates it."""
        await self._acquire()
        try:
            if self.generation == generation:
                self.generation += 1
                damaged = self.path.with_suffix(".damaged")
                with suppress(FileNotFoundError):
                    self.path.rename(damaged)
                await self._threads.run_in_thread(remove_tree, damaged)
        finally:
            self._lock.release()

    async def fetch_commit(
        self, repository: Repository, oid: str, credential: Credential | None = None
    ) -> Commit:
        """Fetch a commit, mark it and return it; without a network if git has it already.

        The timeout of the limits includes the wait for another fetch. Raises: EvaluationError.
        """
        fetching = Deferred.fromCoroutine(self._fetch(repository, oid, credential))
        seconds = self._limits.timeout
        try:
            return await fetching.addTimeout(seconds, self._limits.clock)
        except DeadlineExceeded:
            raise EvaluationFailure(
                "repository",
                f"the fetch of the repository took over {seconds:g} seconds"
                " (repositories.fetch_timeout), with all attempts and the wait for other fetches",
                {"limit": "repositories.fetch_timeout", "value": seconds},
            ) from None

    async def _fetch(
        self, repository: Repository, oid: str, credential: Credential | None
    ) -> Commit:
        await self._acquire()
        complete = False
        try:
            created = await self._threads.run_in_thread(self._create, repository.url)
            commit = None if created else await self._inspect_commit(oid)
            if commit is None:
                commit = await self._fetch_commit(repository, oid, credential)
            if commit.submodules:
                commit = await self._find_submodule_urls(commit)
            await self._threads.run_in_thread(self._mark, commit)
            complete = True
            return commit
        finally:
            try:
                if not complete:
                    await self._threads.run_in_thread(self.remove_leftovers)
            finally:
                self._lock.release()

    def _create(self, url: str) -> bool:
        """Create the repository if it is missing; return whether it was. Blocks."""
        if self.path.exists():
            return False
        unfinished = self.path.with_suffix(".new")
        remove_tree(unfinished)
        create_repository(unfinished)
        (unfinished / _MARKERS).mkdir()
        (unfinished / "url").write_text(url + "\n")
        unfinished.rename(self.path)
        self._markers_size = 0
        return True

    async def _inspect_commit(self, oid: str) -> Commit | None:
        """Return the commit if git has it, marked or not.

        Raises: EvaluationError if its tree is over the limits.
        """
        inspection = CommitInspection(oid, self._limits.tree_limits)
        log, ls_tree = build_inspection_commands(oid)
        result = await self._git.run_command(
            self.path, *log, next_commands=(ls_tree,), on_stdout=inspection.feed
        )
        return _inspected(inspection, result)

    async def _find_submodule_urls(self, commit: Commit) -> Commit:
        """Return the commit, with the URLs of its submodules. Raises: EvaluationError."""
        urls = SubmoduleUrls()
        # Without .gitmodules git fails, and prints nothing: then no submodule has a URL.
        await self._git.run_command(self.path, *build_list_command(commit.oid), on_stdout=urls.feed)
        return urls.complete(commit)

    async def _fetch_commit(
        self, repository: Repository, oid: str, credential: Credential | None
    ) -> Commit:
        """Fetch a commit from its URL, by the cheapest refspec that the server allows."""
        # Before the timeout of the fetch: a silent name server is not the repository's fault.
        lookup = min(LOOKUP_TIMEOUT, self._limits.timeout / 2)
        route, login = await self._remotes.find_route(repository.url, credential, lookup)
        if route.local_path is not None:
            await self._threads.run_in_thread(
                self._remotes.check_local_repository, route.local_path
            )
        reach = SandboxAccess(
            (self.path,), route.readable_paths, has_network=route.local_path is None
        )
        serve = () if route.local_path is None else (_SERVE_OTHER_USERS,)
        self._fetches += 1
        ref = f"refs/commits/{self._fetches % _REFS}"
        for arguments in _fetch_arguments(repository, route, f"{oid}:{ref}"):
            deepen: tuple[str, ...] = ()
            if (self.path / "shallow").exists() and not arguments[0].startswith("--depth"):
                deepen = (f"--depth={_INFINITE_DEPTH}",)
            inspection = CommitInspection(oid, self._limits.tree_limits, before=1)
            fetch = partial(
                self._git.run_command,
                self.path,
                *(*_FETCH, *serve, *deepen, *arguments),
                # In the sandbox of the fetch, which saves the start of another one.
                next_commands=build_inspection_commands(oid),
                on_stdout=inspection.feed,
                environment=route.environment,
                max_file_size=self._limits.max_bytes,
                login=login,
                source=route.local_path,
                reach=reach,
            )
            result = await fetch_within_limits(
                self._limits, self._threads, fetch, self.path, inspection.has_begun
            )
            if inspection.has_begun():
                commit = _inspected(inspection, result)
                if commit is not None:
                    return commit
            elif is_commit_missing(result.stderr):
                break
            elif not is_commit_unadvertised(result.stderr):
                raise _failed(explain_fetch(result.stderr), result)
        raise EvaluationFailure(
            "commit",
            f"the repository has no commit {oid}; push it, or name its branch in"
            " repository[branch]",
        )


def _find_lfs_pointer(tree: Path) -> str | None:
    """Return the path of a file whose content is in Git LFS, None without one. Blocks.

    The tree has a pointer in its place (git-lfs specification, "The Pointer").
    """
    top = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path, status in walk_tree(top):
            if stat.S_ISREG(status.st_mode) and len(_LFS_POINTER) < status.st_size < _MAX_POINTER:
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
                try:
                    if os.read(file, len(_LFS_POINTER)) == _LFS_POINTER:
                        return os.path.normpath(path)
                finally:
                    os.close(file)
    finally:
        os.close(top)
    return None


def _cancel_late(deferred: Deferred[_T], clock: Any) -> Deferred[_T]:
    """Cancel a Deferred after `_LOCK_TIMEOUT` seconds."""
    return deferred.addTimeout(_LOCK_TIMEOUT, clock, lambda failure, _: failure)


def _fetch_arguments(
    repository: Repository, route: GitRoute, commit: str
) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of `git fetch` that may bring a commit, the cheapest first.

    `commit` is the refspec of the commit alone.
    """
    depth = f"--depth={repository.depth or 1}"
    source = ("--end-of-options", route.url)
    yield depth, *source, commit
    if repository.branch:
        branch = f"refs/heads/{repository.branch}:refs/origin/heads/{repository.branch}"
        if repository.depth:
            yield depth, *source, branch
        else:
            yield *source, branch
    yield "--prune", *source, "refs/*:refs/origin/*"


def _inspected(inspection: CommitInspection, result: GitResult) -> Commit | None:
    """Return the commit, None without one. Raises EvaluationError if its tree was not listed."""
    if inspection.commit is not None and result.status:
        raise _failed("git could not list the commit's files; see stderr", result)
    return inspection.commit


def _failed(message: str, result: GitResult, **members: str | float) -> EvaluationFailure:
    return EvaluationFailure("repository", message, {"stderr": result.stderr, **members})


def create_repository(path: Path) -> None:
    """Create the directory `path` as an empty bare repository, without a git process. Blocks.

    Its parts are those of gitrepository-layout(5). git creates most directories when it needs them,
    but not all: a fetch from a server of static files relies on `objects/pack`. Raises: OSError.
    """
    path.mkdir()
    for directory in _INITIAL_DIRECTORIES:
        (path / directory).mkdir()
    (path / "HEAD").write_text(_HEAD)
    (path / "config").write_text(_CONFIG)
    (path / "info" / "attributes").write_text(_ATTRIBUTES)


def _list_files(directory: Path) -> _Files:
    """Return the files below a directory, without markers, by their relative paths. Blocks."""
    found = {}
    for parent, directories, names in os.walk(directory):
        inside = parent[len(str(directory)) + 1 :]
        if not inside:
            directories[:] = [name for name in directories if name != _MARKERS]
        for name in names:
            with suppress(OSError):
                found[os.path.join(inside, name)] = os.lstat(os.path.join(parent, name))
    return found


def _disk_usage(found: _Files) -> int:
    """Return the bytes of files on the disk."""
    return sum(status.st_blocks * 512 for status in found.values())


async def fetch_within_limits(
    limits: FetchLimits,
    threads: WorkerThreads,
    fetch: Callable[[], Coroutine[Deferred[Any], Any, GitResult]],
    repository: Path,
    is_complete: Callable[[], bool],
) -> GitResult:
    """Return the result of `fetch`, which may add at most `limits.size` bytes to `repository`.

    `is_complete` tells whether the fetch is done, whatever becomes of the commands after it. Of a
    fetch that raises EvaluationError before, nothing stays.

    `fetch` has the kernel limit each file, and so the one pack that a usual server sends. A server
    of static files sends many files; their sum is measured again and again.

    Raises: EvaluationError, of `fetch` or for too many bytes.
    """
    before = await threads.run_in_thread(_list_files, repository)
    over = False
    fetching = Deferred.fromCoroutine(fetch())

    async def measure() -> None:
        nonlocal over
        now = await threads.run_in_thread(_list_files, repository)
        if not over and _disk_usage(now) - _disk_usage(before) > limits.max_bytes:
            over = True
            fetching.cancel()

    polling = LoopingCall(lambda: Deferred.fromCoroutine(measure()))
    polling.clock = limits.clock
    polling.start(_POLL_INTERVAL, now=False)
    try:
        result = await fetching
    except CancelledError:
        if not over:
            raise
    except EvaluationFailure:
        if not await threads.run_in_thread(
            _is_over, repository, before, limits.max_bytes, is_complete()
        ):
            await threads.run_in_thread(_undo, repository, before)
            raise
    else:
        if not await threads.run_in_thread(
            _is_over, repository, before, limits.max_bytes, is_complete()
        ):
            return result
    finally:
        polling.stop()
    if is_complete() or not await threads.run_in_thread(_undo, repository, before):
        # The fetch ended before it was measured, and refs name its objects: remove all.
        await threads.run_in_thread(remove_tree, repository)
    raise EvaluationFailure(
        "repository",
        f"the repository is over {format_size(limits.max_bytes)} (repositories.fetch_bytes)",
        {"limit": "repositories.fetch_bytes", "value": limits.max_bytes},
    )


def _is_over(repository: Path, before: _Files, limit: int, is_complete: bool) -> bool:
    """Tell whether a fetch has added too many bytes, or a file at the kernel's limit. Blocks."""
    after = _list_files(repository)
    if is_complete:
        return _disk_usage(after) - _disk_usage(before) > limit
    return any(after[name].st_size >= limit for name in after.keys() - before)


def _undo(repository: Path, before: _Files) -> bool:
    """Remove the objects that an incomplete fetch has added. Blocks.

    Return False, and remove nothing, if refs have changed, which may name the objects.
    """
    after = _list_files(repository)
    for name, status in after.items():
        if name.startswith(("refs", "packed-refs")) and (
            name not in before or before[name].st_mtime_ns != status.st_mtime_ns
        ):
            return False
    for name in after.keys() - before:
        if name.startswith("objects"):
            (repository / name).unlink(missing_ok=True)
    return True
