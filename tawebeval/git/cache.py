"""Cache of repositories and checkouts: one repository for each URL and credential, within a size.

Beyond the size the least recently used go, of both: a request uses its repository after its
checkout, which needs no network to be made again.

A commit in the cache is never fetched again. Objects of one URL are never reached through another
URL, so that no client reads a repository by guessing its commits; nor are objects that were fetched
with a credential reached without that credential.

A checkout is a directory, `<repository>-<tree>-<files>-<bytes>-<boot>.tree`, which evaluations see
below their own changes. It gets that name when it is complete, and never changes. After a power
failure files may lack their content, so checkouts of an earlier boot of the machine are not used.
The numbers in the name tell the size. A build is a checkout, too, with its key for <tree>.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

import attrs
from twisted.internet.defer import CancelledError
from twisted.logger import Logger

from tawebeval.core.evaluations import Checkout, Commit, GitCacheCounters, Submodule, TreeBuilder
from tawebeval.core.form import Repository
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.deferreds import SingleFlight, WorkerThreads, run_in_background
from tawebeval.errors import EvaluationFailure
from tawebeval.git.command import REPOSITORY_CORRUPT_PATTERN, GitRunner
from tawebeval.git.fetch_limits import FetchBudget, FetchLimits
from tawebeval.git.lfs import LfsClient
from tawebeval.git.remotes import Credential, GitKeyring, RemoteResolver
from tawebeval.git.repository import BareRepository, GitServers
from tawebeval.linux.filetree import check_and_copy_tree, copy_tree, remove_tree
from tawebeval.sandbox.disk import BLOCK_BYTES

CHECKOUT_SUFFIX = ".tree"
_NAME = re.compile(r"([0-9a-f]{40}-[0-9a-f]{40})-([0-9]+)-([0-9]+)-([0-9a-f]{8})\.tree", re.ASCII)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

TreeWriter = Callable[[Path, Path], Awaitable[tuple[int, int]]]
"""Function that makes a tree in the first directory, with git's index in the second.

It returns the number of files, and of their bytes."""

log = Logger()


@attrs.define(eq=False)
class _StoredCheckout:
    """A checkout on the disk, of the key `key` of the cache. One with users is not evicted."""

    _root: Path
    key: str
    file_count: int
    byte_count: int
    _boot: str
    user_count: int = 0
    _checkout: Checkout | None = None  # of the commit that was requested last

    @property
    def path(self) -> Path:
        """Its directory, by whose name another process of the daemon finds it."""
        figures = f"{self.file_count}-{self.byte_count}-{self._boot}"
        return self._root / f"{self.key}-{figures}{CHECKOUT_SUFFIX}"

    @property
    def disk_bytes(self) -> int:
        """Its bytes on the disk: a file rarely fills its last block."""
        return self.byte_count + (self.file_count + 1) * BLOCK_BYTES

    def use(self, commit: Commit) -> Checkout:
        """Add a user; return the checkout, the same one for all users of one commit."""
        self.user_count += 1
        if self._checkout is None or self._checkout.commit != commit:
            self._checkout = Checkout(commit, self.path, self._release)
        return self._checkout

    def _release(self) -> None:
        self.user_count -= 1


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


@attrs.define(eq=False)
class RepositoryCache:
    """Checked-out trees of commits, fetched at most once, in the directory `root`.

    `remotes` permits URLs, `limits` bound fetches and trees, `keyring` chooses credentials.
    `capacity`: bytes on the disk, exceeded only by what is in use. `boot`: eight hexadecimal
    digits, which identify the boot of the machine.
    """

    _root: Path
    _git: GitRunner
    _threads: WorkerThreads
    _remotes: RemoteResolver
    _limits: FetchLimits
    _keyring: GitKeyring
    _lfs: LfsClient
    _capacity: int
    _boot: str = attrs.field(factory=lambda: _BOOT_ID.read_text()[:8])
    counters: GitCacheCounters = attrs.field(factory=GitCacheCounters)
    _servers: GitServers = attrs.field(init=False)
    # By their names, checkouts by the first two parts; the least recently used first.
    _stored: OrderedDict[str, BareRepository | _StoredCheckout] = attrs.field(factory=OrderedDict)
    _creations: SingleFlight[str, None] = attrs.field(factory=SingleFlight)
    _leftovers: list[Path] = attrs.field(factory=list)  # to be removed

    def __attrs_post_init__(self) -> None:
        self._servers = GitServers(self._git, self._threads, self._remotes, self._limits)

    @property
    def disk_bytes_by_kind(self) -> dict[str, int]:
        """The bytes of `repositories` and of `checkouts` on the disk."""
        sizes = {"repositories": 0, "checkouts": 0}
        for stored in self._stored.values():
            sizes["repositories" if isinstance(stored, BareRepository) else "checkouts"] += (
                stored.disk_bytes
            )
        return sizes

    def load_from_disk(self, on_load: Callable[[], object] = lambda: None) -> None:
        """Take over the cache of an earlier daemon, as far as it fits. Blocks.

        `on_load` is called before anything is evicted, and may resume checkouts. What is evicted or
        left over is removed in the background.
        """
        with os.scandir(self._root) as entries:  # names: paths take several times the memory
            found = sorted((one.stat(follow_symlinks=False).st_mtime, one.name) for one in entries)
        for _, name in found:
            if self._load_checkout(name):
                continue
            path = self._root / name
            if path.suffix == ".git" and not path.is_symlink():
                bare = self._add(name)
                try:
                    bare.remove_files_of_killed_git()
                    bare.disk_bytes = bare.measure_disk_bytes()
                except OSError as error:
                    log.warn("{path} cannot be used: {error}", path=path, error=error)
                    self._leftovers.append(self._detach(name))
            else:
                self._leftovers.append(path)  # half made, half removed, or of an earlier boot
        on_load()
        leftovers, self._leftovers = [*self._leftovers, *self._detach_excess()], []
        what = "defect: leftovers of the cache are not removed"
        run_in_background(self._remove_leftovers(leftovers), log, what)

    def _load_checkout(self, name: str) -> bool:
        """Take over a checkout of this boot; return False for any other name."""
        described = _NAME.fullmatch(name)
        if described is None or described[4] != self._boot or described[1] in self._stored:
            return False
        self._stored[described[1]] = _StoredCheckout(
            self._root, described[1], int(described[2]), int(described[3]), self._boot
        )
        return True

    def use_checkout_at(self, commit: Commit, path: Path) -> Checkout:
        """Return a checkout that an evaluation of an earlier daemon uses, by its path."""
        if path in self._leftovers:
            self._leftovers.remove(path)
        stored = self._find_checkout(_key(path.name))
        return Checkout(commit, path, lambda: None) if stored is None else stored.use(commit)

    def _add(self, name: str) -> BareRepository:
        bare = BareRepository(
            self._root / name, self._git, self._threads, self._servers, self._limits, self._lfs
        )
        self._stored[name] = bare
        return bare

    def _find_repository(self, name: str) -> BareRepository | None:
        found = self._stored.get(name)
        return found if isinstance(found, BareRepository) else None

    def checkout_needs_network(
        self, repository: Repository, oid: str, caller: str = ANONYMOUS_CALLER
    ) -> bool:
        """Tell whether `check_out_commit` would fetch over a network. Blocks briefly.

        Raises: EvaluationFailure.
        """
        if not self._remotes.is_network_url(repository.url):
            return False
        credential = self._keyring.choose_credential(repository.url, caller)
        bare = self._find_repository(self._name(repository.url, credential))
        commit = bare.find_fetched_commit(oid) if bare is not None and oid else None
        # For submodules, which may be on any host, it may.
        return commit is None or bool(commit.submodules)

    async def resolve_branch(self, repository: Repository, caller: str = ANONYMOUS_CALLER) -> str:
        """Return the OID of the newest commit of the repository's branch.

        Each call asks the server, so that a push is seen at once. Raises: EvaluationFailure.
        """
        self._remotes.check_url(repository.url)
        credential = self._keyring.choose_credential(repository.url, caller)
        return await self._servers.resolve_branch(repository, credential)

    async def check_out_commit(
        self, repository: Repository, oid: str, caller: str = ANONYMOUS_CALLER
    ) -> Checkout:
        """Return the checkout of a commit, which is fetched first unless the cache has it.

        `caller` chooses the credential. Raises: EvaluationFailure.
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
        async with self._use(repository.url, credential) as bare:
            request = _CheckoutRequest(repository, oid, caller, credential, budget)
            submodule_count = budget.submodule_count
            commit = bare.find_fetched_commit(oid)
            had_commits = commit is not None or bare.has_commits
            try:
                return await self._provide(bare, request, commit)
            except EvaluationFailure as error:
                # Without a commit the cached repository is not damaged: the server's is. An error
                # with a path is that of a submodule, which has a repository of its own.
                stderr = str(error.extra_members.get("stderr", ""))
                is_ours = error.reason != "lost" and "path" not in error.extra_members
                # By another user that has found it damaged: git fails in many words.
                is_dropped = self._is_dropped(bare)
                is_damaged = is_dropped or (
                    had_commits and REPOSITORY_CORRUPT_PATTERN.search(stderr) is not None
                )
                if is_repaired or not (is_ours and is_damaged):
                    raise
                log.warn(
                    "{path} is damaged; fetching it again: {stderr}",
                    path=bare.path,
                    stderr=stderr,
                )
            if not self._is_dropped(bare):
                bare.path = self._detach(bare.path.name)
        budget.submodule_count = submodule_count
        return await self._check_out(repository, oid, caller, budget, is_repaired=True)

    async def _provide(
        self, bare: BareRepository, request: _CheckoutRequest, commit: Commit | None
    ) -> Checkout:
        """Return the checkout of a commit; `commit` is None unless the cache has it."""
        if commit is None:
            # A fetch with a smaller budget may fail where this one would not.
            wanted = request.repository, request.oid, request.budget.remaining_bytes
            commit = await bare.shared_fetches.run_once(wanted, lambda: self._fetch(bare, request))
        self._limits.tree_limits.check_tree(commit.file_count, commit.size)
        with ExitStack() as used:
            parts = []
            for submodule in commit.submodules:
                part = await self._check_out_submodule(submodule, request)
                used.callback(part.release)
                parts.append((submodule.path, part))
            return await self._provide_tree(bare, commit, parts)

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
        bare: BareRepository,
        commit: Commit,
        parts: Sequence[tuple[str, Checkout]],
    ) -> Checkout:
        """Return the checkout of a commit, with the submodules in `parts` at their paths."""

        async def write(tree: Path, index: Path) -> tuple[int, int]:
            await bare.check_out_commit(commit, tree, index)
            for path, part in parts:
                await self._threads.run_in_thread(copy_tree, part.path, tree, path)
            return whole.file_count, whole.size

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
        return await self._get_or_create_checkout(
            bare.path.name[:40], whole, write, content=content
        )

    async def _get_or_create_checkout(
        self, repository: str, commit: Commit, write: TreeWriter, *, content: str = ""
    ) -> Checkout:
        """Return a checkout of a commit of `repository`, a name; `write` makes a missing one.

        Concurrent calls for one tree share one `write`. `content` takes the place of the tree's OID
        where there is more than the tree: 40 hexadecimal digits. Raises: what `write` raises.
        """
        key = f"{repository}-{content or commit.tree_oid}"
        if (stored := self._find_checkout(key)) is not None:
            return stored.use(commit)
        while stored is None:
            await self._creations.run_once(key, lambda: self._create_checkout(key, write))
            stored = self._find_checkout(key)
        checkout = stored.use(commit)
        try:
            await self._evict()
        except BaseException:
            checkout.release()
            raise
        return checkout

    def find_build(self, checkout: Checkout, key: str) -> Checkout | None:
        """Return the build of a checkout with this key, to release after use; None without one."""
        stored = self._find_checkout(f"{checkout.path.name[:40]}-{key}")
        if stored is None:
            return None
        files, size = stored.file_count, stored.byte_count
        return stored.use(attrs.evolve(checkout.commit, file_count=files, size=size))

    async def store_build(self, checkout: Checkout, key: str, build: TreeBuilder) -> Checkout:
        """Return a new build of a checkout, to release after use. `key`: 40 hexadecimal digits.

        Raises: what `build` raises.
        """
        check = self._limits.tree_limits.check_tree

        def write(tree: Path, index: Path) -> Awaitable[tuple[int, int]]:
            return build(partial(check_and_copy_tree, target=tree, check=check))

        repository = checkout.path.name[:40]
        made = await self._get_or_create_checkout(repository, checkout.commit, write, content=key)
        built = self.find_build(checkout, key)
        made.release()
        assert built is not None, "what is used is not evicted"
        return built

    def _find_checkout(self, name: str) -> _StoredCheckout | None:
        stored = self._stored.get(name)
        if not isinstance(stored, _StoredCheckout):
            return None
        if not stored.path.is_dir():
            log.warn("{path} was removed; checking it out again", path=stored.path)
            del self._stored[name]
            return None
        self._stored.move_to_end(name)
        return stored

    async def _create_checkout(self, key: str, write: TreeWriter) -> None:
        unfinished = self._root / f"{key}{CHECKOUT_SUFFIX}.new-{uuid4().hex}"
        tree, index = unfinished / "tree", unfinished / "index"
        stored, is_complete = None, False

        def begin() -> None:
            for directory in (unfinished, tree, index):
                directory.mkdir()

        def finish(stored: _StoredCheckout) -> None:
            nonlocal is_complete
            tree.rename(stored.path)
            is_complete = True

        try:
            await self._threads.run_in_thread(begin)
            stored = _StoredCheckout(self._root, key, *await write(tree, index), self._boot)
            await self._threads.run_in_thread(finish, stored)
        finally:
            try:
                await self._threads.run_in_thread(remove_tree, unfinished)
            finally:
                # Also after a cancellation, as the checkout is on the disk. Not before, as it might
                # be evicted before the request that waits for it uses it.
                if stored is not None and is_complete:
                    self._stored[key] = stored

    def _name(self, url: str, credential: Credential | None) -> str:
        named = url.encode()
        if credential is not None:
            named += b"\0" + credential.derive_credential_id(self._keyring.credential_id_key)
        return hashlib.sha256(named).hexdigest()[:40] + ".git"

    @asynccontextmanager
    async def _use(self, url: str, credential: Credential | None) -> AsyncIterator[BareRepository]:
        name = self._name(url, credential)
        bare = self._find_repository(name) or self._add(name)
        bare.user_count += 1
        try:
            yield bare
        finally:
            bare.user_count -= 1
            is_dropped = self._is_dropped(bare)
            # Otherwise made-up URLs would fill memory and disk.
            is_worthless = not bare.has_commits or bare.has_many_packs
            if not is_dropped:
                self._stored.move_to_end(name)  # after its checkouts, which need no network
            if not bare.user_count and (is_dropped or is_worthless):
                path = bare.path if is_dropped else self._detach(name)
                await self._threads.run_in_thread(remove_tree, path)

    async def _fetch(self, bare: BareRepository, request: _CheckoutRequest) -> Commit:
        begin, ended = self._limits.clock.seconds(), "failed"
        try:
            commit = await bare.fetch_commit(
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
            bare.disk_bytes = await self._threads.run_in_thread(bare.measure_disk_bytes)
            await self._evict()

    async def _remove_leftovers(self, leftovers: Sequence[Path]) -> None:
        for path in leftovers:
            try:
                await self._threads.run_in_thread(remove_tree, path)
            except OSError as error:
                log.warn("{path} in the cache cannot be removed: {error}", path=path, error=error)

    async def _evict(self) -> None:
        """Remove the least recently used until the rest fits."""
        for path in self._detach_excess():
            await self._threads.run_in_thread(remove_tree, path)

    def _detach_excess(self) -> list[Path]:
        """Rename the least recently used; return the new paths, for removal.

        Checkouts, which are made again without a network, get half of the capacity at most.
        """
        excess, freed, sizes = [], 0, self.disk_bytes_by_kind
        for kind, size in (
            (_StoredCheckout, sizes["checkouts"] - self._capacity // 2),
            (object, sum(sizes.values()) - self._capacity),
        ):
            if freed >= size:  # as a rule: there may be 10,000 checkouts
                continue
            for name, stored in list(self._stored.items()):
                if freed < size and isinstance(stored, kind) and not stored.user_count:
                    freed += stored.disk_bytes
                    excess.append(self._detach(name))
                    log.info("{path} is evicted from the cache", path=name)
        return excess

    def _is_dropped(self, bare: BareRepository) -> bool:
        """Tell whether a repository has left the cache; its users go on with it."""
        return self._stored.get(bare.path.name) is not bare

    def _detach(self, name: str) -> Path:
        """Rename a directory out of the cache, if it exists; return the new path, for removal."""
        path = self._stored[name].path
        # Where an earlier removal failed, its name may be left over.
        detached = path.with_name(f"{path.name}.old-{uuid4().hex}")
        with suppress(FileNotFoundError):
            path.rename(detached)
        del self._stored[name]
        return detached


def _key(name: str) -> str:
    """Return the repository and the tree in the name of a checkout."""
    return name.rsplit("-", 3)[0]
