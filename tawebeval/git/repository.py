"""One bare repository in the cache: its commits, fetches, and size on the disk; its git server.

Beside git's own files a repository has `url`, for people, and `commits/`: a marker for each commit
that is present with its whole tree, named by the commit's OID. A marker is the `Commit` as JSON, so
that known commits need no git process. The marker of an annotated tag is a link to that of its
commit.
`lfs/` has the contents of files in Git LFS, named by their SHA-256.

Only the newest commits have a ref, and so a line in `shallow`, which git sends to the server with
each fetch. The objects of the others stay: no command here removes objects without a ref. Each
fetch adds a pack. The cache drops a repository with many of them, so that the thousandth fetch
takes as long as the first.

A submodule is a commit of another repository, which `.gitmodules` names (gitmodules(5)). Both come
from the author of the commit, a stranger.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

import attrs
import msgspec
from twisted.internet.defer import DeferredLock

from tawebeval.core.evaluations import Commit
from tawebeval.core.form import Repository
from tawebeval.core.hosts import ResolvedGitRemote
from tawebeval.deferreds import SingleFlight, WorkerThreads
from tawebeval.errors import EvaluationFailure, format_size
from tawebeval.git.command import (
    COMMIT_MISSING_PATTERN,
    COMMIT_UNADVERTISED_PATTERN,
    GitResult,
    GitRunner,
    explain_fetch_failure,
)
from tawebeval.git.fetch_limits import (
    COMMIT_MARKERS_DIRECTORY,
    ByteLimitExceeded,
    CommitInspectionParser,
    FetchBudget,
    FetchLimits,
    build_commit_inspection_commands,
    fetch_within_byte_budget,
    run_within_byte_limit,
    walk_files,
)
from tawebeval.git.lfs import (
    LfsClient,
    LfsPointer,
    add_lfs_object_sizes,
    build_gitattributes_grep_command,
    find_lfs_pointers,
    find_missing_lfs_objects,
    make_lfs_failure,
    replace_lfs_pointers,
)
from tawebeval.git.remotes import Credential, Login, RemoteResolver
from tawebeval.linux.filetree import get_disk_bytes, remove_tree
from tawebeval.pinned_agent import MAX_LOOKUP_SECONDS
from tawebeval.sandbox.bubblewrap import SandboxAccess

_FETCH = (
    "fetch",
    "--quiet",
    "--force",
    "--no-tags",
    "--no-recurse-submodules",
    "--no-write-fetch-head",
    "--no-auto-maintenance",
)
_LEFTOVERS = (
    *("*.lock", "refs/**/*.lock", "gc.pid", "objects/*.lock", "objects/tmp_*"),
    *("objects/pack/tmp_*", "objects/pack/.tmp-*", "objects/pack/*.keep"),
    *("lfs/*.new", "lfs/checkout"),
)
_INFINITE_DEPTH = 2**31 - 1  # git-fetch(1)
_DIRECTORIES_SIZE = 48 * 1024  # bytes on the disk, of a dozen directories
_MARKER_SIZE = 4096  # bytes on the disk
_REFS = 8  # newest commits that have a ref, on which a server can base a pack
_MANY_FILES = 300  # of packs; a fetch adds three, and git looks for an object in each pack
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
# Line ends and encodings are as in every checkout on Linux. No filter is configured either; $Id$
# would let a file grow twelvefold.
_ATTRIBUTES = "* -filter -ident\n"
_LARGE = "lfs"  # the directory with the contents of files in Git LFS

# An operator who allows `file` means repositories of other users, too. git-upload-pack(1) is safe
# for these: it runs nothing that their configuration names. Only that command gets the option.
_SERVE_OTHER_USERS = "--upload-pack=git -c safe.directory='*' upload-pack"
_MAX_BYTES = 60 * 1024  # of the list of .gitmodules; the end of 64 KiB is kept of stdout
_KEY = re.compile(r"submodule\.(.*)\.(path|url)", re.DOTALL)


@attrs.define
class BareRepository:
    """The repository in the directory `path`, which the first fetch creates.

    One fetch runs at a time. `has_many_packs` tells that fetches have added so many files that git
    gets slower. The cache sets `disk_bytes` and `user_count`; one with users is not evicted.
    It drops a damaged one at once, and removes it when nobody uses it any more. Those who fetch the
    same share one of `shared_fetches`, whose keys end with the bytes that may be fetched.
    """

    path: Path
    _git: GitRunner
    _threads: WorkerThreads
    _servers: GitServers
    _limits: FetchLimits
    _lfs: LfsClient
    has_many_packs: bool = False
    disk_bytes: int = 0
    user_count: int = 0
    shared_fetches: SingleFlight[tuple[Repository, str, int], Commit] = attrs.field(
        factory=SingleFlight
    )
    _lock: DeferredLock = attrs.field(factory=DeferredLock)
    _fetches: int = 0
    _marker_count: int = 0

    def find_fetched_commit(self, oid: str) -> Commit | None:
        """Return the commit, or that of a tag, if it has a marker. Blocks briefly."""
        try:
            return msgspec.convert(json.loads(self._marker(oid).read_bytes()), Commit)
        except (OSError, ValueError):
            return None

    def _marker(self, oid: str) -> Path:
        return self.path / COMMIT_MARKERS_DIRECTORY / oid

    def _mark(self, commit: Commit, oid: str) -> None:
        """Write the marker of a commit, also for the tag `oid` of the commit. Blocks."""
        unfinished = self._marker(commit.oid).with_suffix(".new")
        unfinished.write_text(json.dumps(attrs.asdict(commit)))
        self._marker_count += not self._marker(commit.oid).exists()  # it may be malformed
        unfinished.replace(self._marker(commit.oid))
        if oid != commit.oid:
            with suppress(FileExistsError):
                self._marker(oid).symlink_to(commit.oid)
                self._marker_count += 1

    def _remove_marker(self, commit: Commit) -> None:
        """Remove the marker of a commit, if it has one. Blocks."""
        with suppress(FileNotFoundError):
            self._marker(commit.oid).unlink()
            self._marker_count -= 1

    @property
    def has_commits(self) -> bool:
        """Whether a commit was ever fetched."""
        return self._marker_count > 0

    def measure_disk_bytes(self) -> int:
        """Return the bytes of the repository on the disk. Blocks."""
        size = count = 0
        for name, status in walk_files(self.path, COMMIT_MARKERS_DIRECTORY):
            size += get_disk_bytes(status)
            count += name.startswith("objects/pack/")
        self.has_many_packs = count >= _MANY_FILES
        if not self._marker_count:  # of an earlier daemon; later fetches count theirs
            with suppress(OSError), os.scandir(self.path / COMMIT_MARKERS_DIRECTORY) as markers:
                self._marker_count = sum(1 for _ in markers)
        return size + self._marker_count * _MARKER_SIZE + _DIRECTORIES_SIZE

    def remove_files_of_killed_git(self) -> None:
        """Remove what a killed git leaves: locks and unfinished packs. Blocks."""
        for pattern in _LEFTOVERS:
            for leftover in self.path.glob(pattern):
                remove_tree(leftover)
        for part in self.path.glob("objects/pack/pack-*"):
            if not all(part.with_suffix(suffix).exists() for suffix in (".pack", ".idx")):
                remove_tree(part)

    async def check_out_commit(self, commit: Commit, tree: Path, index: Path) -> None:
        """Check a marked commit out into the directory `tree`; `index` is one for git's index.

        Raises: EvaluationFailure.
        """
        await self._read_tree(commit, tree, index)
        pointer = await self._threads.run_in_thread(
            replace_lfs_pointers, tree, self.path / _LARGE, commit.size
        )
        if pointer is not None:
            # Whatever is wrong with the marker, the next request fetches the file.
            await self._threads.run_in_thread(self._remove_marker, commit)
            why = "but not tracked in .gitattributes, or lost from the cache (then try again)"
            raise make_lfs_failure(pointer, why)

    async def _read_tree(self, commit: Commit, tree: Path, index: Path) -> None:
        command = (f"--work-tree={tree}", "read-tree", "--reset", "-u", commit.tree_oid)
        result = await self._git.run_command(
            self.path,
            *command,
            environment={"GIT_INDEX_FILE": str(index / "index")},
            timeout=self._limits.timeout,
            reach=SandboxAccess((tree, index)),
        )
        if result.is_timed_out:
            raise self._limits.make_timeout_failure(
                "the checkout of the commit", stderr=result.stderr
            )
        if result.status:
            raise _make_git_failure("git could not check out the commit; see stderr", result)

    async def fetch_commit(
        self,
        repository: Repository,
        oid: str,
        credential: Credential | None = None,
        budget: FetchBudget | None = None,
    ) -> Commit:
        """Fetch a commit, mark it and return it; without a network if git has it already.

        `budget`: None for a new one. The timeout of the limits includes the wait for another fetch.
        Raises: EvaluationFailure.
        """
        return await self._limits.run_within_timeout(
            self._fetch(repository, oid, credential, budget or FetchBudget(self._limits)),
            "the fetch of the repository",
            ", with all attempts and the wait for other fetches",
        )

    async def _fetch(
        self, repository: Repository, oid: str, credential: Credential | None, budget: FetchBudget
    ) -> Commit:
        async with self._lock:
            try:
                created = await self._threads.run_in_thread(self._create, repository.url)
                commit = None if created else await self._inspect_commit(oid)
                if commit is None:
                    commit = await self._fetch_commit(repository, oid, credential, budget)
                if commit.submodules:
                    # Without .gitmodules git fails, and prints nothing: no submodule has a URL.
                    listing = build_submodule_list_command(commit.oid)
                    result = await self._git.run_command(self.path, *listing)
                    commit = add_submodule_urls(commit, result.stdout)
                if commit.has_gitattributes:
                    commit = await self._convert_files(commit, repository.url, credential, budget)
                await self._threads.run_in_thread(self._mark, commit, oid)
            except BaseException:
                await self._threads.run_in_thread(self.remove_files_of_killed_git)
                raise
        return commit

    def _create(self, url: str) -> bool:
        """Create the repository if it is missing; return whether it was. Blocks."""
        if self.path.exists():
            return False
        unfinished = self.path.with_name(f"{self.path.name}.new-{uuid4().hex}")
        create_repository(unfinished)
        (unfinished / COMMIT_MARKERS_DIRECTORY).mkdir()
        (unfinished / "url").write_text(url + "\n")
        unfinished.rename(self.path)
        return True

    async def _inspect_commit(self, oid: str) -> Commit | None:
        """Return the commit if git has it, marked or not.

        Raises: EvaluationFailure if its tree is over the limits, or it is another object.
        """
        inspection = CommitInspectionParser(self._limits.tree_limits)
        log, ls_tree = build_commit_inspection_commands(oid)
        result = await self._git.run_command(
            self.path, *log, next_commands=(ls_tree,), on_stdout=inspection.feed
        )
        return _inspected(oid, inspection, result)

    async def _convert_files(
        self, commit: Commit, url: str, credential: Credential | None, budget: FetchBudget
    ) -> Commit:
        """Fetch the files in Git LFS; return the commit with the bytes of its checkout.

        Raises: EvaluationFailure.
        """
        command = build_gitattributes_grep_command(commit.oid)
        result = await self._git.run_command(self.path, *command)
        if result.status == 1:
            return commit
        if result.status:
            raise _make_git_failure("git could not read .gitattributes; see stderr", result)
        pointers, size = await self._inspect_checkout(commit)
        commit = attrs.evolve(commit, size=size)
        if not pointers:
            return commit
        if not url.startswith(("http://", "https://")):
            why = "which this server fetches over https and http only; use such a URL"
            raise make_lfs_failure(pointers[0].path, why)
        size = add_lfs_object_sizes(size, pointers)
        self._limits.tree_limits.check_tree(commit.file_count, size)
        large = self.path / _LARGE
        missing = await self._threads.run_in_thread(find_missing_lfs_objects, pointers, large)
        needed = sum(one.object_size for one in missing)
        if needed > budget.remaining_bytes:
            raise budget.make_size_failure()
        await self._lfs.download_objects(url, missing, large, credential)
        budget.spent_bytes += needed
        return attrs.evolve(commit, size=size)

    async def _inspect_checkout(self, commit: Commit) -> tuple[Sequence[LfsPointer], int]:
        """Return the pointers and the bytes of a checkout. Raises: EvaluationFailure.

        An encoding makes a file up to four times as large, and line ends of Windows twice: so the
        checkout is measured while git writes it.
        """
        limits = self._limits.tree_limits
        scratch = self.path / _LARGE / "checkout"
        tree, index = scratch / "tree", scratch / "index"

        def begin() -> None:
            for directory in (tree, index):
                directory.mkdir(parents=True)

        try:
            await self._threads.run_in_thread(begin)
            await run_within_byte_limit(
                self._limits.clock,
                self._threads,
                self._read_tree(commit, tree, index),
                partial(_measure_tree, tree),
                limits.max_bytes,
            )
            pointers, size = await self._threads.run_in_thread(find_lfs_pointers, tree)
        except ByteLimitExceeded:
            pointers, size = (), limits.max_bytes + 1
        finally:
            await self._threads.run_in_thread(remove_tree, scratch)
        limits.check_tree(commit.file_count, size)
        return pointers, size

    async def _fetch_commit(
        self, repository: Repository, oid: str, credential: Credential | None, budget: FetchBudget
    ) -> Commit:
        """Fetch a commit from its URL, by the cheapest refspec that the server allows."""
        route, login = await self._servers.resolve_remote(repository.url, credential)
        reach = SandboxAccess(
            (self.path,), route.readable_paths, has_network=route.local_path is None
        )
        self._fetches += 1
        ref = f"refs/commits/{self._fetches % _REFS}"
        for arguments in _fetch_arguments(repository, route, f"{oid}:{ref}"):
            if not budget.remaining_bytes:
                raise budget.make_size_failure()
            inspection = CommitInspectionParser(self._limits.tree_limits, before=1)
            fetch = partial(
                self._git.run_command,
                self.path,
                *_FETCH,
                *_get_serve_arguments(route),
                *arguments,
                # In the sandbox of the fetch, which saves the start of another one.
                next_commands=build_commit_inspection_commands(oid),
                on_stdout=inspection.feed,
                environment=route.environment_variables,
                max_file_size=budget.remaining_bytes,
                login=login,
                source=route.local_path,
                reach=reach,
            )
            result = await fetch_within_byte_budget(
                self._limits.clock,
                budget,
                self._threads,
                fetch,
                self.path,
                inspection.has_inspection_begun,
            )
            if inspection.has_inspection_begun():
                commit = _inspected(oid, inspection, result)
                if commit is not None:
                    return commit
            elif COMMIT_MISSING_PATTERN.search(result.stderr):
                break
            elif not COMMIT_UNADVERTISED_PATTERN.search(result.stderr):
                raise _make_git_failure(explain_fetch_failure(result.stderr), result)
        if repository.branch:
            where = f", on branch {repository.branch!r} or elsewhere; push it, or correct the form"
        else:
            where = "; push it, or name its branch in repository[branch]"
        raise EvaluationFailure("commit", f"the repository has no commit {oid}{where}")


def _fetch_arguments(
    repository: Repository, route: ResolvedGitRemote, commit: str
) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of `git fetch` that may bring a commit, the cheapest first.

    `commit` is the refspec of the commit alone. Each has a depth, with which git refuses a server
    of plain files: that could send any number of them, and the kernel limits each file alone.
    """
    source = ("--end-of-options", route.url)
    yield f"--depth={repository.depth or 1}", *source, commit
    if repository.branch:
        branch = f"refs/heads/{repository.branch}:refs/origin/heads/{repository.branch}"
        yield f"--depth={repository.depth or _INFINITE_DEPTH}", *source, branch
    yield f"--depth={_INFINITE_DEPTH}", "--prune", *source, "refs/*:refs/origin/*"


def _inspected(oid: str, inspection: CommitInspectionParser, result: GitResult) -> Commit | None:
    """Return the commit, None without one.

    Raises EvaluationFailure if its tree was not listed, or `oid` names another object.
    """
    if inspection.is_tree_or_blob():
        raise EvaluationFailure(
            "commit",
            f"{oid} is a tree or a file of the repository, not a commit; `git rev-parse HEAD` in a"
            " clone prints the last commit",
        )
    if inspection.commit is not None and result.status:
        raise _make_git_failure("git could not list the commit's files; see stderr", result)
    return inspection.commit


def _measure_tree(tree: Path) -> int:
    """Return the bytes of the files of a tree that git writes. Blocks."""
    return sum(status.st_size for _, status in walk_files(tree))


def create_repository(path: Path) -> None:
    """Create the directory `path` as an empty bare repository, without a git process. Blocks.

    Its parts are those of gitrepository-layout(5). Raises: OSError.
    """
    path.mkdir()
    for directory in _INITIAL_DIRECTORIES:
        (path / directory).mkdir()
    (path / "HEAD").write_text(_HEAD)
    (path / "config").write_text(_CONFIG)
    (path / "info" / "attributes").write_text(_ATTRIBUTES)


@attrs.frozen
class GitServers:
    """The git servers that the operator permits."""

    _git: GitRunner
    _threads: WorkerThreads
    _remotes: RemoteResolver
    _limits: FetchLimits

    async def resolve_branch(
        self, repository: Repository, credential: Credential | None = None
    ) -> str:
        """Return the OID of the newest commit of the repository's branch.

        The same limits hold as for a fetch. Raises: EvaluationFailure.
        """
        words = f"the question for the branch {repository.branch!r} of the repository"
        asking = self._ask_for_branch(repository, credential)
        return await self._limits.run_within_timeout(asking, words)

    async def _ask_for_branch(self, repository: Repository, credential: Credential | None) -> str:
        ref = f"refs/heads/{repository.branch}"
        route, login = await self.resolve_remote(repository.url, credential)
        serve = _get_serve_arguments(route)
        command = ("ls-remote", "--heads", *serve, "--end-of-options", route.url, ref)
        # Without a repository, which might be fetched into, evicted or removed meanwhile.
        result = await self._git.run_command(
            None,
            *command,
            environment=route.environment_variables,
            login=login,
            source=route.local_path,
            reach=SandboxAccess(
                readable_paths=route.readable_paths, has_network=route.local_path is None
            ),
        )
        if result.status:
            raise _make_git_failure(explain_fetch_failure(result.stderr), result)
        # git also lists other refs that end in this name.
        found = re.search(rf"^([0-9a-f]{{40}})\t{re.escape(ref)}$", result.stdout, re.MULTILINE)
        if found is None:
            raise EvaluationFailure(
                "repository",
                f"the repository has no branch {repository.branch!r}; push it, or name another"
                " branch",
            )
        return found[1]

    async def resolve_remote(
        self, url: str, credential: Credential | None
    ) -> tuple[ResolvedGitRemote, Login | None]:
        """Return the route to the repository, and the login. Raises: EvaluationFailure."""
        # Before the timeout of the fetch: a silent name server is not the repository's fault.
        lookup = min(MAX_LOOKUP_SECONDS, self._limits.timeout / 2)
        route, login = await self._remotes.resolve_remote(url, credential, lookup)
        if route.local_path is not None:
            await self._threads.run_in_thread(
                self._remotes.check_local_repository, route.local_path
            )
        return route, login


def _get_serve_arguments(route: ResolvedGitRemote) -> tuple[str, ...]:
    """Return the option for a repository of this machine, which git serves to itself."""
    return () if route.local_path is None else (_SERVE_OTHER_USERS,)


def _make_git_failure(message: str, result: GitResult) -> EvaluationFailure:
    """Return the error about a git command, with its stderr."""
    return EvaluationFailure("repository", message, {"stderr": result.stderr})


def build_submodule_list_command(oid: str) -> Sequence[str]:
    """Return the git command whose stdout `add_submodule_urls` reads."""
    return "config", f"--blob={oid}:.gitmodules", "--no-includes", "--null", "--list"


def add_submodule_urls(commit: Commit, printed: str) -> Commit:
    """Return the commit, with the URLs of its submodules in the settings of `.gitmodules`.

    `printed` has U+FFFD for bytes that are not UTF-8. Raises: EvaluationFailure, also if the list
    is over 60 KiB.
    """
    if len(printed.encode()) > _MAX_BYTES:
        raise EvaluationFailure(
            "repository", f"the commit's .gitmodules is over {format_size(_MAX_BYTES)}"
        )
    modules: dict[str, dict[str, str]] = {}
    for setting in printed.split("\0"):
        key, _, value = setting.partition("\n")
        if found := _KEY.fullmatch(key):
            modules.setdefault(found[1], {})[found[2]] = value
    urls = {
        module["path"].rstrip("/"): module["url"]
        for module in modules.values()
        if {"path", "url"} <= module.keys()
    }
    found_all = []
    for submodule in commit.submodules:
        printed_path = submodule.path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if printed_path not in urls:
            raise EvaluationFailure(
                "repository",
                f"the submodule at {submodule.path!r} has no URL in .gitmodules; add it there, or"
                " remove the submodule from the commit",
                {"path": submodule.path},
            )
        found_all.append(attrs.evolve(submodule, url=urls[printed_path]))
    return attrs.evolve(commit, submodules=tuple(found_all))
