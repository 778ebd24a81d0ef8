"""Cache of repositories and checkouts: one repository for each URL and credential, within a size.

A commit in the cache is never fetched again. Objects of one URL are never reached through another
URL, so that no client reads a repository by guessing its commits; nor are objects that were fetched
with a credential reached without that credential.

A checkout is a directory, `<repository>-<tree>-<files>-<bytes>-<boot>.tree`, which evaluations see
below their own changes. It gets that name when it is complete, and never changes. After a power
failure files may lack their content, so checkouts of an earlier boot of the machine are not used.
The numbers in the name tell the size.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from uuid import uuid4

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from tawebeval.core.evaluations import Checkout, Commit, GitCacheCounters, Submodule
from tawebeval.core.form import Repository
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.deferreds import SingleFlight, WorkerThreads, run_in_background
from tawebeval.errors import EvaluationFailure, format_size
from tawebeval.git.command import GitRunner, is_repository_corrupt
from tawebeval.git.fetch_limits import FetchBudget, FetchLimits
from tawebeval.git.lfs import LfsClient
from tawebeval.git.remotes import Credential, GitKeyring, RemoteResolver
from tawebeval.git.repository import BareRepository, GitServers
from tawebeval.linux.filetree import copy_tree, remove_tree
from tawebeval.sandbox.limits import BLOCK_BYTES

CHECKOUT_SUFFIX = ".tree"
_NAME = re.compile(r"[0-9a-f]{40}-[0-9a-f]{40}-([0-9]+)-([0-9]+)-([0-9a-f]{8})\.tree", re.ASCII)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

WriteTree = Callable[[Path, Path], Awaitable[None]]
"""Function that checks a tree out into the first directory, with git's index in the second."""

log = Logger()


@attrs.define
class _StoredCheckout:
    """A checkout on the disk; `size` in bytes. One with users is not evicted."""

    path: Path
    size: int
    users: int = 0
    _checkout: Checkout | None = None  # of the commit that was requested last

    def use(self, commit: Commit) -> Checkout:
        """Add a user; return the checkout, the same one for all users of one commit."""
        self.users += 1
        if self._checkout is None or self._checkout.commit != commit:
            self._checkout = Checkout(commit, self.path, self._release)
        return self._checkout

    def _release(self) -> None:
        self.users -= 1


@attrs.define(eq=False)
class CheckoutCache:
    """The checkouts in the directory `root`; `disk_bytes` is the most that they take on the disk.

    `boot`: eight hexadecimal digits, which identify the boot of the machine.
    """

    _root: Path
    _threads: WorkerThreads
    _boot: str = attrs.field(factory=lambda: _BOOT_ID.read_text()[:8])
    disk_bytes: int = 0
    # The least recently used first.
    _stored: OrderedDict[str, _StoredCheckout] = attrs.field(factory=OrderedDict)
    _creations: SingleFlight[str, None] = attrs.field(factory=SingleFlight)

    def load_checkout(self, path: Path) -> bool:
        """Take over a checkout of an earlier daemon; return False for any other path.

        Call this for the least recently used checkout first.
        """
        described = _NAME.fullmatch(path.name)
        if described is None or described[3] != self._boot:
            return False
        self._add(path.name)
        return True

    async def get_or_create_checkout(
        self,
        repository: str,
        commit: Commit,
        write: WriteTree,
        *,
        content: str = "",
    ) -> Checkout:
        """Return a checkout of a commit of `repository`, a name; `write` makes a missing one.

        Concurrent calls for one tree share one `write`. `content` takes the place of the tree's OID
        where there is more than the tree: 40 hexadecimal digits. Raises: what `write` raises.
        """
        tree = content or commit.tree_oid
        figures = f"{commit.file_count}-{commit.size}"
        name = f"{repository}-{tree}-{figures}-{self._boot}{CHECKOUT_SUFFIX}"
        stored = self._find(name)
        while stored is None:
            await self._creations.run_once(name, lambda: self._create(name, write))
            stored = self._find(name)
        return stored.use(commit)

    def resume_checkout(self, commit: Commit, path: Path) -> Checkout:
        """Return a checkout that is in use already."""
        stored = self._stored.get(path.name)
        return Checkout(commit, path, lambda: None) if stored is None else stored.use(commit)

    def _find(self, name: str) -> _StoredCheckout | None:
        stored = self._stored.get(name)
        if stored is not None and not stored.path.is_dir():
            log.warn("{path} was removed; checking it out again", path=stored.path)
            self._forget(name)
            return None
        if stored is not None:
            self._stored.move_to_end(name)
        return stored

    async def _create(self, name: str, write: WriteTree) -> None:
        unfinished = self._root / f"{name}.new-{uuid4().hex}"
        tree, index = unfinished / "tree", unfinished / "index"
        is_complete = False

        def begin() -> None:
            for directory in (unfinished, tree, index):
                directory.mkdir()

        def finish() -> None:
            nonlocal is_complete
            tree.rename(self._root / name)
            is_complete = True

        try:
            await self._threads.run_in_thread(begin)
            await write(tree, index)
            await self._threads.run_in_thread(finish)
        finally:
            try:
                await self._threads.run_in_thread(remove_tree, unfinished)
            finally:
                # Also after a cancellation, as the checkout is on the disk. Not before, as it might
                # be evicted before the request that waits for it uses it.
                if is_complete:
                    self._add(name)

    def _add(self, name: str) -> None:
        described = _NAME.fullmatch(name)
        assert described is not None, "the name of a checkout"
        # A file rarely fills its last block.
        size = int(described[2]) + (int(described[1]) + 1) * BLOCK_BYTES
        self._stored[name] = _StoredCheckout(self._root / name, size)
        self.disk_bytes += size

    def _forget(self, name: str) -> None:
        self.disk_bytes -= self._stored.pop(name).size

    def evict_excess_checkouts(self, capacity: int) -> Iterator[Path]:
        """Rename the least recently used until the rest has at most `capacity` bytes.

        Checkouts in use stay. Yields the new paths, for removal.
        """
        if self.disk_bytes <= capacity:
            return  # after almost every checkout, with thousands in the cache
        for name, stored in list(self._stored.items()):
            if self.disk_bytes > capacity and not stored.users:
                yield self._detach(name)

    def evict_repository_checkouts(self, repository: str) -> Iterator[Path]:
        """Rename all checkouts of a repository that are not in use. Yields the new paths."""
        for name, stored in list(self._stored.items()):
            if name.startswith(f"{repository}-") and not stored.users:
                yield self._detach(name)

    def _detach(self, name: str) -> Path:
        detached = detach(self._stored[name].path)
        self._forget(name)
        return detached


def detach(path: Path) -> Path:
    """Rename a directory of the cache, if it exists; return the new path, for removal."""
    # Where an earlier removal failed, its name may be left over.
    detached = path.with_name(f"{path.name}.old-{uuid4().hex}")
    with suppress(FileNotFoundError):
        path.rename(detached)
    return detached


@attrs.frozen
class _CheckoutRequest:
    """A commit to check out, and the credential to fetch it with.

    `budget` bounds its submodules.
    """

    repository: Repository
    oid: str
    caller: str
    credential: Credential | None
    budget: FetchBudget


@attrs.define
class _Entry:
    """A repository in the cache; `size` in bytes. One with users is not evicted.

    A damaged one leaves the cache at once, and is removed when nobody uses it any more. `stem` is
    the beginning of its name, and of those of its checkouts.
    """

    stem: str
    bare: BareRepository
    size: int = 0
    users: int = 0
    fetches: SingleFlight[tuple[Repository, str, int], Commit] = attrs.field(factory=SingleFlight)


@attrs.define(eq=False)
class RepositoryCache:
    """Checked-out trees of commits, fetched at most once, in the directory `root`.

    `remotes` permits URLs, `limits` bound fetches and trees, `keyring` chooses credentials.
    `capacity`: bytes on the disk, exceeded only by what is in use. `lfs`: None if files in Git LFS
    are not fetched.
    """

    _root: Path
    _git: GitRunner
    _threads: WorkerThreads
    _remotes: RemoteResolver
    _limits: FetchLimits
    _keyring: GitKeyring
    _capacity: int = attrs.field(kw_only=True)
    _lfs: LfsClient | None = None
    counters: GitCacheCounters = attrs.field(factory=GitCacheCounters)
    _servers: GitServers = attrs.field(init=False)
    _checkouts: CheckoutCache = attrs.field(init=False)
    # In the order of their last use.
    _entries: OrderedDict[str, _Entry] = attrs.field(factory=OrderedDict)
    _leftovers: list[Path] = attrs.field(factory=list)  # to be removed
    _removal: Deferred[None] | None = None

    def __attrs_post_init__(self) -> None:
        self._servers = GitServers(self._git, self._threads, self._remotes, self._limits)
        self._checkouts = CheckoutCache(self._root, self._threads)

    @property
    def disk_sizes(self) -> dict[str, int]:
        """The bytes of `repositories` and of `checkouts` on the disk."""
        repositories = sum(entry.size for entry in self._entries.values())
        return {"repositories": repositories, "checkouts": self._checkouts.disk_bytes}

    def load_existing(self, on_load: Callable[[], object] = lambda: None) -> None:
        """Take over the cache of an earlier daemon, as far as it fits. Blocks.

        `on_load` is called before anything is evicted, and may resume checkouts. What is evicted or
        left over is removed later, by `start_removal_of_leftovers`.
        """
        for _, path in sorted((path.lstat().st_mtime, path) for path in self._root.iterdir()):
            if path.suffix == ".git" and not path.is_symlink():
                entry = self._add(path.name)
                try:
                    entry.size = entry.bare.load_existing()
                except OSError as error:
                    log.warn("{path} cannot be used: {error}", path=path, error=error)
                    self._leftovers.append(self._detach(path.name))
            elif not self._checkouts.load_checkout(path):
                self._leftovers.append(path)  # half made, half removed, or of an earlier boot
        on_load()
        self._leftovers += self._detach_excess()

    def resume_checkout(self, commit: Commit, path: Path) -> Checkout:
        """Return a checkout that an evaluation of an earlier daemon uses, by its path."""
        if path in self._leftovers:
            self._leftovers.remove(path)
        return self._checkouts.resume_checkout(commit, path)

    def _add(self, name: str) -> _Entry:
        bare = BareRepository(
            self._root / name, self._git, self._threads, self._servers, self._limits, self._lfs
        )
        entry = self._entries[name] = _Entry(bare.path.stem, bare)
        return entry

    def checkout_needs_network(
        self, repository: Repository, oid: str, caller: str = ANONYMOUS_CALLER
    ) -> bool:
        """Tell whether `check_out_commit` would fetch over a network. Blocks briefly.

        Raises: EvaluationError.
        """
        if not self._remotes.check_url(repository.url):
            return False
        credential = self._keyring.choose_credential(repository.url, caller)
        entry = self._entries.get(self._name(repository.url, credential))
        commit = entry.bare.find_fetched_commit(oid) if entry is not None and oid else None
        # For submodules, which may be on any host, it may.
        return commit is None or bool(commit.submodules)

    async def resolve_branch(self, repository: Repository, caller: str = ANONYMOUS_CALLER) -> str:
        """Return the OID of the newest commit of the repository's branch.

        Each call asks the server, so that a push is seen at once. Raises: EvaluationError.
        """
        self._remotes.check_url(repository.url)
        credential = self._keyring.choose_credential(repository.url, caller)
        return await self._servers.resolve_branch(repository, credential)

    async def check_out_commit(
        self, repository: Repository, oid: str, caller: str = ANONYMOUS_CALLER
    ) -> Checkout:
        """Return the checkout of a commit, which is fetched first unless the cache has it.

        `caller` chooses the credential. Raises: EvaluationError.
        """
        return await self._check_out(repository, oid, caller, FetchBudget(self._limits))

    async def _check_out(
        self,
        repository: Repository,
        oid: str,
        caller: str,
        budget: FetchBudget,
        *,
        is_repaired: bool = False,
    ) -> Checkout:
        self._remotes.check_url(repository.url)
        credential = self._keyring.choose_credential(repository.url, caller)
        async with self._use(repository.url, credential) as entry:
            request = _CheckoutRequest(repository, oid, caller, credential, budget)
            commit = entry.bare.find_fetched_commit(oid)
            had_commits = commit is not None or entry.bare.has_commits
            try:
                return await self._provide(entry, request, commit)
            except EvaluationFailure as error:
                # Without a commit the cached repository is not damaged: the server's is. An error
                # with a path is that of a submodule, which has a repository of its own.
                stderr = str(error.extra_members.get("stderr", ""))
                is_ours = error.reason != "lost" and "path" not in error.extra_members
                # By another user that has found it damaged: git fails in many words.
                is_dropped = self._is_dropped(entry)
                is_damaged = is_dropped or (had_commits and is_repository_corrupt(stderr))
                if is_repaired or not (is_ours and is_damaged):
                    raise
                log.warn(
                    "{path} is damaged; fetching it again: {stderr}",
                    path=entry.bare.path,
                    stderr=stderr,
                )
            if not self._is_dropped(entry):
                entry.bare.path = self._detach(entry.bare.path.name)
        return await self._check_out(repository, oid, caller, budget, is_repaired=True)

    async def _provide(
        self, entry: _Entry, request: _CheckoutRequest, commit: Commit | None
    ) -> Checkout:
        """Return the checkout of a commit; `commit` is None unless the cache has it."""
        if commit is None:
            # A fetch with a smaller budget may fail where this one would not.
            wanted = request.repository, request.oid, request.budget.remaining_bytes
            commit = await entry.fetches.run_once(wanted, lambda: self._fetch(entry, request))
        self._limits.tree_limits.check_tree(commit.file_count, commit.size)
        before = self._checkouts.disk_bytes
        with ExitStack() as used:
            parts = []
            for submodule in commit.submodules:
                part = await self._check_out_submodule(submodule, request)
                used.callback(part.release)
                parts.append((submodule.path, part))
            checkout = await self._provide_tree(entry, request, commit, parts)
        try:
            if self._checkouts.disk_bytes > before:
                await self._evict()
        except BaseException:
            checkout.release()
            raise
        return checkout

    async def _check_out_submodule(
        self, submodule: Submodule, request: _CheckoutRequest
    ) -> Checkout:
        """Return the checkout of a submodule, under the rules of its parent's repository."""
        budget = request.budget
        budget.count_submodule(submodule.path)
        try:
            budget.check_time()
            url = self._remotes.resolve_submodule(submodule.url, request.repository.url)
            return await self._check_out(Repository(url), submodule.oid, request.caller, budget)
        except EvaluationFailure as error:
            inner = error.extra_members.get("path")
            path = f"{submodule.path}/{inner}" if inner else submodule.path
            raise attrs.evolve(
                error,
                reason="lost" if error.reason == "lost" else "repository",
                message=error.message if inner else f"submodule {path!r}: {error.message}",
                extra_members={**error.extra_members, "path": path},
            ) from None

    async def _provide_tree(
        self,
        entry: _Entry,
        request: _CheckoutRequest,
        commit: Commit,
        parts: Sequence[tuple[str, Checkout]],
    ) -> Checkout:
        """Return the checkout of a commit, with the submodules in `parts` at their paths."""

        async def write(tree: Path, index: Path) -> None:
            await entry.bare.check_out_commit(commit, tree, index)
            for path, part in parts:
                await self._threads.run_in_thread(copy_tree, part.path, tree, path)

        content = ""
        if parts:
            # Two callers may have different credentials for a submodule, and so different names.
            named = [commit.tree_oid, *(part.path.name for _, part in parts)]
            content = hashlib.sha256("\0".join(named).encode()).hexdigest()[:40]
        whole = attrs.evolve(
            commit,
            file_count=commit.file_count + sum(part.commit.file_count for _, part in parts),
            size=commit.size + sum(part.commit.size for _, part in parts),
        )
        self._limits.tree_limits.check_tree(whole.file_count, whole.size)
        return await self._checkouts.get_or_create_checkout(
            entry.stem, whole, write, content=content
        )

    def _name(self, url: str, credential: Credential | None) -> str:
        named = url.encode()
        if credential is not None:
            named += b"\0" + self._keyring.derive_credential_id(credential)
        return hashlib.sha256(named).hexdigest()[:40] + ".git"

    @asynccontextmanager
    async def _use(self, url: str, credential: Credential | None) -> AsyncIterator[_Entry]:
        name = self._name(url, credential)
        entry = self._entries.get(name) or self._add(name)
        self._entries.move_to_end(name)
        entry.users += 1
        try:
            yield entry
        finally:
            entry.users -= 1
            is_dropped = self._is_dropped(entry)
            # Otherwise made-up URLs would fill memory and disk.
            is_worthless = not entry.bare.has_commits or entry.bare.has_many_packs
            if not entry.users and (is_dropped or is_worthless):
                path = entry.bare.path if is_dropped else self._detach(name)
                await self._threads.run_in_thread(remove_tree, path)

    async def _fetch(self, entry: _Entry, request: _CheckoutRequest) -> Commit:
        begin, ended = self._limits.clock.seconds(), "failed"
        try:
            commit = await entry.bare.fetch_commit(
                request.repository, request.oid, request.credential, request.budget
            )
            ended = "fetched"
        except CancelledError:
            ended = "cancelled"
            raise
        else:
            return commit
        finally:
            self.counters.fetch_counts[ended] += 1
            self.counters.fetch_durations.record_value(self._limits.clock.seconds() - begin)
            entry.size = await self._threads.run_in_thread(entry.bare.measure_disk_bytes)
            await self._evict()

    def start_removal_of_leftovers(self) -> None:
        """Start to remove what an earlier daemon has left over, unless that is under way."""
        if self._leftovers and self._removal is None:
            self._removal = run_in_background(
                self._remove_leftovers(), log, "defect: leftovers of the cache are not removed"
            )
            self._removal.addBoth(self._on_removal_end)

    def _on_removal_end(self, _: object) -> None:
        self._removal = None

    async def _remove_leftovers(self) -> None:
        while self._leftovers:
            path = self._leftovers.pop()
            try:
                await self._threads.run_in_thread(remove_tree, path)
            except CancelledError:
                return  # the daemon stops
            except OSError as error:
                log.warn("{path} in the cache cannot be removed: {error}", path=path, error=error)

    async def close(self) -> None:
        """Stop the removal of leftovers, and wait for its end."""
        self._leftovers.clear()
        if self._removal is not None:
            self._removal.cancel()
            await self._removal

    async def _evict(self) -> None:
        """Remove the least recently used until the rest fits."""
        for path in self._detach_excess():
            await self._threads.run_in_thread(remove_tree, path)

    def _detach_excess(self) -> list[Path]:
        """Rename the least recently used; return the new paths, for removal.

        Checkouts, which are made again without a network, get half of the capacity.
        """
        excess = list(self._checkouts.evict_excess_checkouts(self._capacity // 2))
        repositories = self.disk_sizes["repositories"]
        for name, entry in list(self._entries.items()):
            if repositories + self._checkouts.disk_bytes > self._capacity and not entry.users:
                repositories -= entry.size
                excess.append(self._detach(name))
                excess += self._checkouts.evict_repository_checkouts(entry.stem)
                log.info(
                    "{path} is evicted from the cache: " + format_size(entry.size),
                    path=name,
                    size=entry.size,
                )
        excess += self._checkouts.evict_excess_checkouts(max(self._capacity - repositories, 0))
        return excess

    def _is_dropped(self, entry: _Entry) -> bool:
        """Tell whether a repository has left the cache; its users go on with it."""
        return self._entries.get(entry.bare.path.name) is not entry

    def _detach(self, name: str) -> Path:
        """Rename a repository out of the cache; return the new path, for removal."""
        return detach(self._entries.pop(name).bare.path)
