"""One bare repository in the cache: its commits, fetches, maintenance, and size on the disk.

Beside git's own files a repository has `url`, for people, and `commits/`: a marker for each commit
that is present with its whole tree, named by the commit's OID. A marker holds its format, the OID
of the tree, the number of its files, their bytes, and the submodules, so that known commits need no
git process. The marker of an annotated tag is a link to that of its commit.
`lfs/` has the contents of files in Git LFS, named by their SHA-256.

Only the newest commits have a ref, and so a line in `shallow`, which git sends to the server with
each fetch. The objects of the others stay: no command here removes objects without a ref.
`git maintenance` packs what fetches leave, so that the thousandth fetch takes as long as the first.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredLock
from twisted.internet.defer import TimeoutError as DeadlineExceeded
from twisted.internet.task import LoopingCall

from tawebeval.core.checkout import Commit, Submodule
from tawebeval.core.form import Repository
from tawebeval.core.hosts import ResolvedGitRemote
from tawebeval.core.url_slips import guess_repository_url
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import EvaluationFailure, format_size
from tawebeval.git.checkouts import detach, measure_tree
from tawebeval.git.command import GitResult, GitRunner
from tawebeval.git.commits import (
    CommitInspectionParser,
    TreeLimits,
    build_commit_inspection_commands,
)
from tawebeval.git.credentials import Credential, Login
from tawebeval.git.lfs import (
    LfsClient,
    LfsPointer,
    build_conversion_detection_command,
    explain_missing_lfs_object,
    find_lfs_pointers,
    find_missing_lfs_objects,
    replace_lfs_pointers,
)
from tawebeval.git.remotes import RemoteResolver
from tawebeval.git.stderr_patterns import (
    explain_fetch_failure,
    explain_redirect,
    is_commit_missing,
    is_commit_unadvertised,
    is_redirect,
    is_server_of_files,
)
from tawebeval.git.submodules import SubmoduleUrlParser, build_submodule_list_command
from tawebeval.linux.filetree import remove_tree
from tawebeval.resolver import LOOKUP_TIMEOUT
from tawebeval.sandbox.helper_sandbox import SandboxAccess

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
    *("*.lock", "refs/**/*.lock", "gc.pid", "objects/*.lock", "objects/tmp_*"),
    *("objects/pack/tmp_*", "objects/pack/.tmp-*", "objects/pack/*.keep"),
    *("lfs/*.new", "lfs/checkout"),
)
_INFINITE_DEPTH = 2**31 - 1  # git-fetch(1)
_MAINTENANCE_SETTINGS = {
    # Objects without a ref get a pack of their own, and are never removed.
    "gc.cruftPacks": "true",
    "gc.pruneExpire": "never",
    "gc.writeCommitGraph": "false",
    "repack.writeBitmaps": "false",
    # git searches no deltas, but keeps those of servers: time depends on bytes alone.
    "pack.window": "0",
    "pack.threads": "1",
}
_MAINTENANCE = (
    *(word for pair in _MAINTENANCE_SETTINGS.items() for word in ("-c", "=".join(pair))),
    *("maintenance", "run", "--quiet", "--task=gc"),
)
_DIRECTORIES_SIZE = 48 * 1024  # bytes on the disk, of a dozen directories
_MARKER_SIZE = 4096  # bytes on the disk
_REFS = 8  # newest commits that have a ref, on which a server can base a pack
_MAINTENANCE_FILES = 100  # files added before maintenance is due; a fetch adds two or three
_MAINTENANCE_TIMEOUT = 30.0  # seconds, for which a fetch may wait
# Its 3 is the format: in earlier ones, the bytes were those before git converted line ends.
_MARKER = re.compile(r"3 ([0-9a-f]{40}) ([0-9]+) ([0-9]+) (\[.*\])", re.ASCII)
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
# Line ends, encodings and $Id$ are as in every checkout on Linux. No filter is configured either.
_ATTRIBUTES = "* -filter\n"
_LARGE = "lfs"  # the directory with the contents of files in Git LFS
_MARKERS = "commits"  # the directory with the markers

_Files = Mapping[str, os.stat_result]


@attrs.frozen
class FetchLimits:
    """Limits of fetches and trees.

    `timeout`: seconds for a fetch with all its attempts, and as many for checking out.
    `max_bytes`: bytes that all fetches of one commit may add, those of its submodules among them.
    `tree_limits`: limits of the commit's tree.
    """

    clock: Any
    timeout: float
    max_bytes: int
    tree_limits: TreeLimits

    def make_timeout_failure(self, words: str, more: str = "", **members: str) -> EvaluationFailure:
        """Return the error of what took longer than the timeout; `words` name it."""
        return EvaluationFailure(
            "repository",
            f"{words} took over {self.timeout:g} seconds (repositories.fetch_timeout){more}",
            {**members, "limit": "repositories.fetch_timeout", "value": self.timeout},
        )


@attrs.define
class FetchBudget:
    """The bytes that the fetches of one commit may add, and those that they have added."""

    max_bytes: int
    spent_bytes: int = 0

    @property
    def remaining_bytes(self) -> int:
        """Bytes that a fetch may add."""
        return max(self.max_bytes - self.spent_bytes, 0)

    def make_failure(self) -> EvaluationFailure:
        """Return the error of a fetch that would add more."""
        words = "the repositories of the commit are" if self.spent_bytes else "the repository is"
        return EvaluationFailure(
            "repository",
            f"{words} over {format_size(self.max_bytes)} (repositories.fetch_bytes)",
            {"limit": "repositories.fetch_bytes", "value": self.max_bytes},
        )


@attrs.define
class BareRepository:
    """The repository in the directory `path`, which the first fetch creates.

    One lock covers fetches, maintenance and removal. `lfs`: None if files in Git LFS are not
    fetched. `removals` counts calls of `remove_damaged` that removed the repository. `is_empty`
    tells that no fetch has added anything yet.
    """

    path: Path
    _git: GitRunner
    _threads: WorkerThreads
    _remotes: RemoteResolver
    _limits: FetchLimits
    _lfs: LfsClient | None = None
    removals: int = 0
    is_empty: bool = True
    _lock: DeferredLock = attrs.field(factory=DeferredLock)
    _fetches: int = 0
    _files: int = 0  # without the markers
    _maintenance_due: int = _MAINTENANCE_FILES  # files

    def find_fetched_commit(self, oid: str) -> Commit | None:
        """Return the commit, or that of a tag, if it has a marker. Blocks briefly."""
        path = self._marker(oid).resolve()
        try:
            marker = _MARKER.fullmatch(path.read_text())
        except OSError:
            return None
        if marker is None:
            return None
        submodules = tuple(Submodule(*each) for each in json.loads(marker[4]))
        return Commit(path.name, marker[1], int(marker[2]), int(marker[3]), submodules)

    def _marker(self, oid: str) -> Path:
        return self.path / _MARKERS / oid

    def _mark(self, commit: Commit, oid: str) -> None:
        """Write the marker of a commit, also for the tag `oid` of the commit. Blocks."""
        unfinished = self._marker(commit.oid).with_suffix(".new")
        submodules = json.dumps([attrs.astuple(each) for each in commit.submodules])
        counts = f"{commit.file_count} {commit.size}"
        unfinished.write_text(f"3 {commit.tree_oid} {counts} {submodules}")
        unfinished.replace(self._marker(commit.oid))
        if oid != commit.oid:
            with suppress(FileExistsError):
                self._marker(oid).symlink_to(commit.oid)

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
        self.remove_files_of_killed_git()
        with suppress(OSError):  # of a damaged repository
            (self.path / "info" / "attributes").write_text(_ATTRIBUTES)
        return self.measure_disk_bytes()

    def measure_disk_bytes(self) -> int:
        """Return the bytes of the repository on the disk. Blocks."""
        found = _list_files(self.path)
        markers = 0
        # Counted one at a time: a list of the status of 100,000 markers takes 140 MB.
        with suppress(OSError), os.scandir(self.path / _MARKERS) as entries:
            markers = sum(1 for _ in entries)
        self._files = sum(not name.startswith(_LARGE) for name in found)
        self.is_empty = not markers and not any(name.startswith("objects") for name in found)
        return _disk_usage(found) + markers * _MARKER_SIZE + _DIRECTORIES_SIZE

    def remove_files_of_killed_git(self) -> None:
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

    async def maintain(self, max_pack_size: int) -> None:
        """Combine the packs of fetches into packs of at most `max_pack_size` bytes.

        Fetches wait, at most 30 seconds. Raises: EvaluationError if git fails or takes longer.
        """
        await self._lock.acquire()
        try:
            result = await self._git.run_command(
                self.path,
                *_MAINTENANCE,
                timeout=_MAINTENANCE_TIMEOUT,
                max_file_size=max_pack_size,
                reach=SandboxAccess((self.path,)),
            )
            if result.is_timed_out:
                raise _failed(f"git took over {_MAINTENANCE_TIMEOUT:g} seconds", result)
            if result.status:
                raise _failed("git could not pack the repository; see stderr", result)
        finally:
            try:
                await self._threads.run_in_thread(self._finish_maintenance)
            finally:
                self._lock.release()

    def _finish_maintenance(self) -> None:
        self.remove_files_of_killed_git()
        self.measure_disk_bytes()
        self._maintenance_due = self._files + _MAINTENANCE_FILES

    async def check_out_commit(self, commit: Commit, tree: Path, index: Path) -> None:
        """Check a marked commit out into the directory `tree`; `index` is one for git's index.

        Raises: EvaluationError.
        """
        await self._read_tree(commit, tree, index)
        pointer = await self._threads.run_in_thread(
            replace_lfs_pointers, tree, self.path / _LARGE, commit.size
        )
        if pointer is not None:
            # Whatever is wrong with the marker, the next request fetches the file.
            await self._threads.run_in_thread(self._marker(commit.oid).unlink, missing_ok=True)
            why = "but not tracked in .gitattributes, or lost from the cache (then try again)"
            raise explain_missing_lfs_object(pointer, why)

    async def _read_tree(self, commit: Commit, tree: Path, index: Path) -> None:
        result = await self._git.run_command(
            self.path,
            f"--work-tree={tree}",
            *("read-tree", "--reset", "-u", commit.tree_oid),
            environment={"GIT_INDEX_FILE": str(index / "index")},
            timeout=self._limits.timeout,
            reach=SandboxAccess((tree, index)),
        )
        if result.is_timed_out:
            raise self._limits.make_timeout_failure(
                "the checkout of the commit", stderr=result.stderr
            )
        if result.status:
            raise _failed("git could not check out the commit; see stderr", result)

    async def remove_damaged(self, removals: int) -> None:
        """Remove the repository, unless that happened since `removals` was read.

        The next fetch creates it.
        """
        await self._lock.acquire()
        try:
            if self.removals == removals:
                self.removals += 1
                await self._threads.run_in_thread(remove_tree, detach(self.path))
        finally:
            self._lock.release()

    async def fetch_commit(
        self,
        repository: Repository,
        oid: str,
        credential: Credential | None = None,
        budget: FetchBudget | None = None,
    ) -> Commit:
        """Fetch a commit, mark it and return it; without a network if git has it already.

        `budget`: None for a new one. The timeout of the limits includes the wait for another fetch.
        Raises: EvaluationError.
        """
        return await self._finish_in_time(
            self._fetch(repository, oid, credential, budget or FetchBudget(self._limits.max_bytes)),
            "the fetch of the repository",
            ", with all attempts and the wait for other fetches",
        )

    async def resolve_branch(
        self, repository: Repository, credential: Credential | None = None
    ) -> str:
        """Return the OID of the newest commit of the repository's branch.

        The same limits hold as for a fetch. Raises: EvaluationError.
        """
        branch = repository.branch
        words = f"the question for the branch {branch!r} of the repository"
        found = await self._finish_in_time(self._list_branch(repository, credential), words)
        if found is None:
            raise EvaluationFailure(
                "repository",
                f"the repository has no branch {branch!r}; push it, or name another branch",
            )
        return found

    async def _finish_in_time(
        self, working: Coroutine[Deferred[Any], Any, _T], words: str, more: str = ""
    ) -> _T:
        """Return the result of `working`, within the timeout. Raises: EvaluationError."""
        limits = self._limits
        try:
            return await Deferred.fromCoroutine(working).addTimeout(limits.timeout, limits.clock)
        except DeadlineExceeded:
            raise limits.make_timeout_failure(words, more) from None

    async def _list_branch(
        self, repository: Repository, credential: Credential | None
    ) -> str | None:
        """Return the OID of the branch, None without one. Raises: EvaluationError."""
        ref = f"refs/heads/{repository.branch}"
        printed = await self._list_refs(repository.url, credential, "--heads", ref)
        # git also lists other refs that end in this name.
        found = re.search(rf"^([0-9a-f]{{40}})\t{re.escape(ref)}$", printed, re.MULTILINE)
        return found and found[1]

    async def _list_refs(self, url: str, credential: Credential | None, *which: str) -> str:
        """Return the output of `git ls-remote`; `which` is an option and a name, or nothing.

        Raises: EvaluationError.
        """
        route, login = await self._find_route(url, credential)
        result = await self._run_ls_remote(route, login, which)
        if result.status:
            raise await self._explain_failure(route, login, result)
        return result.stdout

    async def _run_ls_remote(
        self,
        route: ResolvedGitRemote,
        login: Login | None,
        which: Sequence[str] = (),
        **environment: str,
    ) -> GitResult:
        # Without the repository, which may be fetched into, evicted or removed meanwhile.
        return await self._git.run_command(
            None,
            *("ls-remote", *which[:1], *_serve_arguments(route)),
            *("--end-of-options", route.url, *which[1:]),
            environment={**route.environment, **environment},
            login=login,
            source=route.local_path,
            reach=SandboxAccess(
                readable_paths=route.readable_paths, has_network=route.local_path is None
            ),
        )

    async def _explain_failure(
        self, route: ResolvedGitRemote, login: Login | None, result: GitResult
    ) -> EvaluationFailure:
        """Return the error of a fetch. Where a redirect leads git says only if it is asked to."""
        if not is_redirect(result.stderr):
            message = explain_fetch_failure(result.stderr)
            guess = guess_repository_url(route.url, ("https", "http"))
            return _failed(f"{message}; try {guess}" if guess else message, result)
        traced = await self._run_ls_remote(route, login, GIT_CURL_VERBOSE="1")
        return _failed(explain_redirect(route.url, traced.stderr), result)

    async def _find_route(
        self, url: str, credential: Credential | None
    ) -> tuple[ResolvedGitRemote, Login | None]:
        """Return the route to the repository, and the login. Raises: EvaluationError."""
        # Before the timeout of the fetch: a silent name server is not the repository's fault.
        lookup = min(LOOKUP_TIMEOUT, self._limits.timeout / 2)
        route, login = await self._remotes.resolve_remote(url, credential, lookup)
        if route.local_path is not None:
            await self._threads.run_in_thread(
                self._remotes.check_local_repository, route.local_path
            )
        return route, login

    async def _fetch(
        self, repository: Repository, oid: str, credential: Credential | None, budget: FetchBudget
    ) -> Commit:
        await self._lock.acquire()
        complete = False
        try:
            created = await self._threads.run_in_thread(self._create, repository.url)
            commit = None if created else await self._inspect_commit(oid)
            if commit is None:
                commit = await self._fetch_commit(repository, oid, credential, budget)
            if commit.submodules:
                commit = await self._find_submodule_urls(commit)
            if commit.has_gitattributes:
                commit = await self._convert_files(commit, repository.url, credential, budget)
            await self._threads.run_in_thread(self._mark, commit, oid)
            complete = True
            return commit
        finally:
            try:
                if not complete:
                    await self._threads.run_in_thread(self.remove_files_of_killed_git)
            finally:
                self._lock.release()

    def _create(self, url: str) -> bool:
        """Create the repository if it is missing; return whether it was. Blocks."""
        if self.path.exists():
            return False
        unfinished = self.path.with_name(f"{self.path.name}.new-{uuid4().hex}")
        create_repository(unfinished)
        (unfinished / _MARKERS).mkdir()
        (unfinished / "url").write_text(url + "\n")
        unfinished.rename(self.path)
        return True

    async def _inspect_commit(self, oid: str) -> Commit | None:
        """Return the commit if git has it, marked or not.

        Raises: EvaluationError if its tree is over the limits, or it is another object.
        """
        inspection = CommitInspectionParser(self._limits.tree_limits)
        log, ls_tree = build_commit_inspection_commands(oid)
        result = await self._git.run_command(
            self.path, *log, next_commands=(ls_tree,), on_stdout=inspection.feed
        )
        return _inspected(oid, inspection, result)

    async def _find_submodule_urls(self, commit: Commit) -> Commit:
        """Return the commit, with the URLs of its submodules. Raises: EvaluationError."""
        urls = SubmoduleUrlParser()
        # Without .gitmodules git fails, and prints nothing: then no submodule has a URL.
        await self._git.run_command(
            self.path, *build_submodule_list_command(commit.oid), on_stdout=urls.feed
        )
        return urls.complete(commit)

    async def _convert_files(
        self, commit: Commit, url: str, credential: Credential | None, budget: FetchBudget
    ) -> Commit:
        """Fetch the files in Git LFS; return the commit with the bytes of its checkout.

        Raises: EvaluationError.
        """
        command = build_conversion_detection_command(commit.oid)
        result = await self._git.run_command(self.path, *command)
        if result.status == 1:
            return commit
        if result.status:
            raise _failed("git could not read .gitattributes; see stderr", result)
        pointers, size = await self._inspect_checkout(commit)
        commit = attrs.evolve(commit, size=size)
        if not pointers:
            return commit
        first = pointers[0].path
        if self._lfs is None:
            raise explain_missing_lfs_object(first, "which this server does not fetch")
        if not url.startswith(("http://", "https://")):
            why = "which this server fetches over https and http only; use such a URL"
            raise explain_missing_lfs_object(first, why)
        size = commit.size + sum(one.object_bytes - one.pointer_file_size for one in pointers)
        self._limits.tree_limits.check_tree(commit.file_count, size)
        large = self.path / _LARGE
        missing = await self._threads.run_in_thread(find_missing_lfs_objects, pointers, large)
        needed = sum(one.object_bytes for one in missing)
        if needed > budget.remaining_bytes:
            raise budget.make_failure()
        await self._lfs.download_objects(url, missing, large, credential)
        budget.spent_bytes += needed
        return attrs.evolve(commit, size=size)

    async def _inspect_checkout(self, commit: Commit) -> tuple[Sequence[LfsPointer], int]:
        """Return the pointers and the bytes of a checkout. Raises: EvaluationError.

        `$Id$` may grow twelvefold, so the checkout is measured while git writes it.
        """
        limits = self._limits.tree_limits
        scratch = self.path / _LARGE / "checkout"
        tree, index = scratch / "tree", scratch / "index"
        is_over = False

        def begin() -> None:
            for directory in (tree, index):
                directory.mkdir(parents=True)

        async def poll() -> None:
            nonlocal is_over
            with suppress(OSError):  # of a file that appears or disappears
                size = await self._threads.run_in_thread(measure_tree, tree)
                is_over |= size > limits.max_bytes
            if is_over:
                reading.cancel()

        try:
            await self._threads.run_in_thread(begin)
            reading = Deferred.fromCoroutine(self._read_tree(commit, tree, index))
            polling = LoopingCall(lambda: Deferred.fromCoroutine(poll()))
            polling.clock = self._limits.clock
            polling.start(_POLL_INTERVAL, now=False)
            try:
                await reading
            except CancelledError:
                if not is_over:
                    raise
            finally:
                polling.stop()
            size = await self._threads.run_in_thread(measure_tree, tree)
            limits.check_tree(commit.file_count, size)
            return await self._threads.run_in_thread(find_lfs_pointers, tree), size
        finally:
            await self._threads.run_in_thread(remove_tree, scratch)

    async def _fetch_commit(
        self, repository: Repository, oid: str, credential: Credential | None, budget: FetchBudget
    ) -> Commit:
        """Fetch a commit from its URL, by the cheapest refspec that the server allows."""
        route, login = await self._find_route(repository.url, credential)
        reach = SandboxAccess(
            (self.path,), route.readable_paths, has_network=route.local_path is None
        )
        self._fetches += 1
        ref = f"refs/commits/{self._fetches % _REFS}"
        is_plain = False
        for arguments in _fetch_arguments(repository, route, f"{oid}:{ref}"):
            deepen: tuple[str, ...] = ()
            if (self.path / "shallow").exists() and not arguments[0].startswith("--depth"):
                deepen = (f"--depth={_INFINITE_DEPTH}",)
            if not budget.remaining_bytes:
                raise budget.make_failure()
            inspection = CommitInspectionParser(self._limits.tree_limits, before=1)
            fetch = partial(
                self._git.run_command,
                self.path,
                *(*_FETCH, *_serve_arguments(route), *deepen, *arguments),
                # In the sandbox of the fetch, which saves the start of another one.
                next_commands=build_commit_inspection_commands(oid),
                on_stdout=inspection.feed,
                environment=route.environment,
                max_file_size=budget.remaining_bytes,
                login=login,
                source=route.local_path,
                reach=reach,
            )
            result = await fetch_within_byte_budget(
                self._limits.clock, budget, self._threads, fetch, self.path, inspection.has_begun
            )
            if inspection.has_begun():
                commit = _inspected(oid, inspection, result)
                if commit is not None:
                    return commit
            elif is_commit_missing(result.stderr):
                break
            elif not is_commit_unadvertised(result.stderr):
                raise await self._explain_failure(route, login, result)
            is_plain |= is_server_of_files(result.stderr)
        if is_plain and not await self._list_refs(repository.url, credential):
            raise EvaluationFailure(
                "repository",
                "repository[url] leads to a web page, or to a repository without a branch; use the"
                " URL for `git clone`",
            )
        branch = repository.branch
        if branch and await self._list_branch(repository, credential) is None:
            message = f"branch {branch!r} and no commit {oid}; push them, or correct the form"
        elif branch:
            message = f"commit {oid}, neither on branch {branch!r} nor elsewhere; push it"
        else:
            message = f"commit {oid}; push it, or name its branch in repository[branch]"
        raise EvaluationFailure("commit", f"the repository has no {message}")


def _fetch_arguments(
    repository: Repository, route: ResolvedGitRemote, commit: str
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


def _serve_arguments(route: ResolvedGitRemote) -> tuple[str, ...]:
    """Return the option for a repository of this machine, which git serves to itself."""
    return () if route.local_path is None else (_SERVE_OTHER_USERS,)


def _inspected(oid: str, inspection: CommitInspectionParser, result: GitResult) -> Commit | None:
    """Return the commit, None without one.

    Raises EvaluationError if its tree was not listed, or `oid` names another object.
    """
    if inspection.is_other_object():
        raise EvaluationFailure(
            "commit",
            f"{oid} is a tree or a file of the repository, not a commit; `git rev-parse HEAD` in a"
            " clone prints the last commit",
        )
    if inspection.commit is not None and result.status:
        raise _failed("git could not list the commit's files; see stderr", result)
    return inspection.commit


def _failed(message: str, result: GitResult) -> EvaluationFailure:
    return EvaluationFailure("repository", message, {"stderr": result.stderr})


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


async def fetch_within_byte_budget(
    clock: Any,
    budget: FetchBudget,
    threads: WorkerThreads,
    fetch: Callable[[], Coroutine[Deferred[Any], Any, GitResult]],
    repository: Path,
    is_complete: Callable[[], bool],
) -> GitResult:
    """Return the result of `fetch`, which may add the rest of `budget` to `repository`.

    `is_complete` tells whether the fetch is done, whatever becomes of the commands after it. Of a
    fetch that raises EvaluationError before, nothing stays.

    `fetch` has the kernel limit each file, and so the one pack that a usual server sends. A server
    of static files sends many files; their sum is measured again and again.

    Raises: EvaluationError, of `fetch` or for too many bytes.
    """
    before = await threads.run_in_thread(_list_files, repository)
    limit = budget.remaining_bytes
    over = False
    fetching = Deferred.fromCoroutine(fetch())

    async def measure() -> None:
        nonlocal over
        now = await threads.run_in_thread(_list_files, repository)
        if not over and _disk_usage(now) - _disk_usage(before) > limit:
            over = True
            fetching.cancel()

    polling = LoopingCall(lambda: Deferred.fromCoroutine(measure()))
    polling.clock = clock
    polling.start(_POLL_INTERVAL, now=False)
    try:
        result = await fetching
    except CancelledError:
        if not over:
            raise
    except EvaluationFailure:
        after = await threads.run_in_thread(_list_files, repository)
        if not _is_over(after, before, limit, is_complete()):
            await threads.run_in_thread(_undo, repository, before)
            raise
    else:
        after = await threads.run_in_thread(_list_files, repository)
        if not _is_over(after, before, limit, is_complete()):
            budget.spent_bytes += max(_disk_usage(after) - _disk_usage(before), 0)
            return result
    finally:
        polling.stop()
    if is_complete() or not await threads.run_in_thread(_undo, repository, before):
        # The fetch ended before it was measured, and refs name its objects: remove all.
        await threads.run_in_thread(remove_tree, repository)
    raise budget.make_failure()


def _is_over(after: _Files, before: _Files, limit: int, is_complete: bool) -> bool:
    """Tell whether a fetch has added too many bytes, or a file at the kernel's limit."""
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
