"""One repository of the cache, whose git is real and in its sandbox, without a daemon."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path

from twisted.internet import reactor
from twisted.trial.unittest import TestCase
from twisted.web.client import BrowserLikePolicyForHTTPS

from tawebeval.core.hosts import HostPolicy
from tawebeval.deferreds import WorkerThreads
from tawebeval.git.command import GitRunner
from tawebeval.git.fetch_limits import FetchLimits, TreeLimits
from tawebeval.git.lfs import LfsClient
from tawebeval.git.remotes import RemoteResolver
from tawebeval.git.repository import BareRepository, GitServers
from tawebeval.linux.child import spawn_child
from tawebeval.pinned_agent import CheckedResolver
from tawebeval.sandbox.bubblewrap import (
    NETWORK_FILE_PATTERNS,
    TrustedCommandSandbox,
    build_file_options,
    build_system_options,
    write_sandbox_files,
)
from tawebeval.sandbox.seccomp import make_seccomp_filters
from tests.cases.patience import LONG_PATIENCE, PATIENCE
from tests.fakes.resolver import FakeResolver
from tests.integration.repositories import GitRepository

MOST = 2**30
"""Bytes that a fetch may add."""


def make_sandbox(folder: Path) -> TrustedCommandSandbox:
    """Return the sandbox of git, with its files in a folder, until the end of a test."""
    accounts = folder / "accounts"
    accounts.mkdir()
    write_sandbox_files(accounts)
    filters = make_seccomp_filters(internet=True)
    views = tuple(build_system_options(accounts)), tuple(build_file_options(NETWORK_FILE_PATTERNS))
    return TrustedCommandSandbox(shutil.which("bwrap") or "", filters, *views)


class BareRepositoryCase(TestCase):
    """`bare` is the repository in `path`, `source` the one to fetch from, in `folder`.

    `servers` answers questions without a repository.
    """

    timeout = LONG_PATIENCE

    def make(self, resolver: CheckedResolver | None = None) -> None:
        """Make both repositories, which are empty; `resolver` looks up hosts for a test."""
        self.folder = Path(tempfile.mkdtemp(prefix="tawebeval-test-")).resolve()
        self.addCleanup(shutil.rmtree, self.folder)
        self.source = GitRepository(self.folder / "source")
        self.threads = WorkerThreads.create(reactor, 4, "work")
        self.threads.start()
        self.addCleanup(self.threads.stop)
        box = make_sandbox(self.folder)
        self.path = self.folder / "cached.git"
        protocols = ("file", "git", "http", "https")
        policy = HostPolicy(allowed_private_networks=("127.0.0.0/8",))
        resolver = resolver or CheckedResolver(policy, FakeResolver(), reactor)
        remotes = RemoteResolver(resolver, (), protocols)
        git = GitRunner(reactor, partial(spawn_child, reactor), protocols, box=box)
        limits = FetchLimits(reactor, PATIENCE, MOST, TreeLimits(100, 2**23))
        self.servers = GitServers(git, self.threads, remotes, limits)
        self.bare = BareRepository(
            self.path,
            git,
            self.threads,
            self.servers,
            limits,
            LfsClient(reactor, BrowserLikePolicyForHTTPS(), self.threads, remotes, PATIENCE),
        )
