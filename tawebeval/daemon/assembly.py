"""Assembly of the daemon: construction of all parts, and the settings that a reload changes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import time
from typing import Any

import attrs
from twisted.application.service import Service
from twisted.internet.defer import DeferredQueue
from twisted.logger import Logger

from tawebeval.config import Configuration, RepositorySettings
from tawebeval.core.budget import Budget
from tawebeval.core.hosts import HostPolicy
from tawebeval.core.identifiers import Identifiers
from tawebeval.daemon.control import ControlSocket, find_socket
from tawebeval.daemon.linewriter import LineWriter
from tawebeval.daemon.logging import LogWriter
from tawebeval.daemon.metrics import DaemonMetrics, Monitoring
from tawebeval.daemon.reload import ConfigurationFile, ConfigurationReload, Reloader
from tawebeval.daemon.services import Daemon, EvaluationService, make_listener, make_timer
from tawebeval.daemon.startup import StartupChecks, ThreadPool, find_exposure, open_access
from tawebeval.daemon.state import Directories
from tawebeval.daemon.systemd import Notifier, Watchdog, compute_stop_timeout, find_notifier
from tawebeval.deferreds import UNBOUNDED, FairQueue, WorkerThreads, count_slots
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.registry import Registry
from tawebeval.git.cache import RepositoryCache
from tawebeval.git.command import Git
from tawebeval.git.commits import TreeLimits
from tawebeval.git.keyring import Keyring
from tawebeval.git.remotes import Remotes
from tawebeval.git.repository import FetchLimits
from tawebeval.linux.cgroups.group import Cgroups
from tawebeval.linux.child import Spawner
from tawebeval.linux.privileges import Privileges
from tawebeval.linux.reaper import Orphans
from tawebeval.resolver import SystemResolver
from tawebeval.sandbox.base import Sandbox
from tawebeval.sandbox.monitor import LimitMonitor
from tawebeval.sandbox.probe import open_command_sandbox, open_sandbox
from tawebeval.web.auth import Authentication
from tawebeval.web.context import WebContext
from tawebeval.web.routes import KleinApplication, make_site
from tawebeval.web.server.request import ApiSite
from tawebeval.webhooks.deliveries import Callbacks, open_callbacks

log = Logger()


@attrs.frozen
class ThreadPools:
    """The daemon's thread pools, one for each kind of call that must not delay another kind."""

    work: WorkerThreads  # checks out, measures and removes file trees
    watch: WorkerThreads  # polls the limits of runs
    count: WorkerThreads  # counts the files of runs that have many
    upload: WorkerThreads  # writes uploads
    check: WorkerThreads  # checks two disks and the directories, any of which may hang
    servers: SystemResolver  # git servers; a silent name server blocks a thread for a minute
    receivers: SystemResolver  # webhook receivers

    @classmethod
    def create(cls, reactor: Any) -> ThreadPools:
        """Create the pools, not started yet."""
        return cls(
            work=WorkerThreads.create(reactor, 20, "work"),
            watch=WorkerThreads.create(reactor, 1, "watch"),
            count=WorkerThreads.create(reactor, 2, "count"),
            upload=WorkerThreads.create(reactor, 8, "upload"),
            check=WorkerThreads.create(reactor, 3, "check"),
            servers=SystemResolver(WorkerThreads.create(reactor, 12, "servers")),
            receivers=SystemResolver(WorkerThreads.create(reactor, 8, "receivers")),
        )

    def list_all(self) -> Sequence[ThreadPool]:
        """List all pools."""
        return attrs.astuple(self, recurse=False)


@attrs.frozen
class SharedParts:
    """Parts that the builders of several packages need."""

    configuration: Configuration
    directories: Directories
    reactor: Any
    cgroups: Cgroups
    spawn: Spawner
    pools: ThreadPools
    access: Authentication
    sandbox: Sandbox
    keyring: Keyring


@attrs.frozen
class Parts:
    """The daemon's parts that a reload or the metrics need."""

    remotes: Remotes
    repositories: RepositoryCache
    context: EvaluationContext
    registry: Registry
    callbacks: Callbacks
    access: Authentication
    monitoring: Monitoring
    application: KleinApplication
    site: ApiSite

    def apply(self, configuration: Configuration) -> None:
        """Apply the live settings of a configuration; running evaluations keep their limits."""
        self.context.configuration = configuration
        self.context.sandbox.limits = configuration.limits
        self.remotes.policy = _host_policy(configuration.repositories)
        queue = self.registry.queue
        queue.set_bounds(queue.slots, *_queue_bounds(configuration, self.access))
        queue.dispatch()
        self.registry.spool.limit = configuration.limits.uploads
        self.access.rate.per_minute = configuration.callers.requests_per_minute
        self.monitoring.readiness.free = configuration.health.free_disk
        self.monitoring.request_log.is_enabled = configuration.log.access
        self.application.context.configuration = configuration
        self.site.connection_limits.settings = configuration.http

    def make_metrics(self, log_lines: LineWriter | None) -> DaemonMetrics:
        """Return the metrics of the parts; `log_lines` is None if twistd writes the log."""
        return DaemonMetrics(
            self.context,
            self.repositories,
            self.registry,
            self.callbacks,
            self.monitoring.request_log,
            self.application.routes,
            self.site.connection_limits,
            self.monitoring.lag,
            log_lines,
        )


def make_service(
    configuration: Configuration,
    directories: Directories,
    reactor: Any,
    privileges: Privileges,
    cgroups: Cgroups,
    file: ConfigurationFile | None = None,
    log_writer: LogWriter | None = None,
) -> Daemon:
    """Build the daemon, which drops `privileges` before it starts any program.

    `file` is the configuration file for a reload, `log_writer` as for `Daemon`. Raises:
    ConfigurationError, for an invalid endpoint, unreadable tokens or secrets, an exposed endpoint
    without tokens, or a missing sandbox.
    """
    pools, spawn = ThreadPools.create(reactor), Spawner(reactor)
    access = open_access(configuration, reactor)
    orphans = Orphans(reactor, spawn)
    sandbox = open_sandbox(configuration, directories.accounts, cgroups, orphans)
    credentials = os.environ.get("CREDENTIALS_DIRECTORY", "")
    keyring = Keyring(configuration.repositories.credentials, credentials, directories.key)
    parts = _make_parts(
        SharedParts(
            configuration, directories, reactor, cgroups, spawn, pools, access, sandbox, keyring
        )
    )
    registry, repositories, monitoring = parts.registry, parts.repositories, parts.monitoring
    startup = StartupChecks(
        directories, cgroups, sandbox, pools.list_all(), pools.check, configuration
    )
    evaluations = EvaluationService(registry, repositories, parts.callbacks, parts.context)
    daemon = Daemon(startup, evaluations, parts.site, privileges, reactor, log_writer)
    lines = log_writer.lines if log_writer else None
    monitoring.metrics.register(parts.make_metrics(lines))
    notifier = find_notifier(os.environ)
    endpoints = dict.fromkeys(configuration.listen)  # without duplicates
    on_reload = (parts.apply, daemon.set_log_level)
    reload = ConfigurationReload(file or ConfigurationFile(), configuration, on_reload)
    sources = (reload, parts.callbacks, access, monitoring.readers, keyring)
    reloader = Reloader(sources, credentials, notifier, reactor)
    calls = (
        *(
            registry.expire,
            orphans.reap,
            startup.restore_directories,
            parts.context.cleanups.retry_next,
        ),
        *(repositories.note_uses, repositories.maintain, monitoring.readiness.check),
    )
    for part in (
        *_reload_services(reloader, reactor),
        *(monitoring.lag, monitoring.probe, make_timer(calls, reactor)),
        *(
            make_listener(endpoint, parts.site, reactor, configuration.http)
            for endpoint in endpoints
        ),
        _make_watchdog(notifier, parts, reactor),
    ):
        part.setServiceParent(daemon)
    if access.is_open:
        for problem in find_exposure(configuration):
            log.warn("{problem}", problem=str(problem))
    return daemon


def _make_parts(base: SharedParts) -> Parts:
    configuration, directories, reactor = base.configuration, base.directories, base.reactor
    running = count_slots(configuration.evaluations.running)
    remotes = _make_remotes(base)
    repositories = _make_repositories(base, remotes)
    context = _make_context(base, repositories, running)
    callbacks = open_callbacks(
        *(configuration.callbacks, os.environ, base.pools.receivers, reactor, os.urandom, time),
        has_one_caller=base.access.is_open,
    )
    slots = (running, *_queue_bounds(configuration, base.access))
    identities = Identifiers(directories.key, os.urandom, configuration.service.name)
    registry = Registry(context, identities, slots, directories.evaluations, callbacks)
    monitoring = Monitoring.create(directories, registry, context, base.pools.check)
    application = _make_application(base, registry, monitoring)
    return Parts(
        remotes,
        repositories,
        context,
        registry,
        callbacks,
        base.access,
        monitoring,
        application,
        make_site(application, reactor),
    )


def _make_remotes(base: SharedParts) -> Remotes:
    directories = base.directories
    return Remotes(
        _host_policy(base.configuration.repositories),
        base.pools.servers,
        base.reactor,
        (directories.repositories, directories.uploads, directories.evaluations),
    )


def _make_repositories(base: SharedParts, remotes: Remotes) -> RepositoryCache:
    settings, directories = base.configuration.repositories, base.directories
    git = Git(
        base.reactor,
        base.spawn,
        settings.protocols,
        settings.memory,
        open_command_sandbox(base.sandbox, directories.accounts),
        base.cgroups.git_entry,
        base.cgroups.niceness,
    )
    limits = FetchLimits(
        base.reactor,
        timeout=settings.fetch_timeout,
        size=settings.fetch_bytes,
        tree=TreeLimits(settings.tree_files, settings.tree_bytes),
    )
    return RepositoryCache(
        directories.repositories,
        git,
        base.pools.work,
        remotes,
        limits,
        base.keyring,
        capacity=settings.cache,
    )


def _make_context(
    base: SharedParts, repositories: RepositoryCache, running: int
) -> EvaluationContext:
    configuration, reactor, pools = base.configuration, base.reactor, base.pools
    fetches = configuration.repositories.fetches
    free_quotas: DeferredQueue[Path] = DeferredQueue()
    for directory in base.directories.quotas:
        free_quotas.put(directory)
    return EvaluationContext(
        configuration=configuration,
        clock=reactor,
        random=os.urandom,
        threads=pools.work,
        spawn=base.spawn,
        repositories=repositories,
        sandbox=base.sandbox,
        monitor=LimitMonitor(reactor, pools.watch, pools.count),
        # The servers of one caller may be slow, so a caller has half of the slots at most.
        fetch_slots=FairQueue(fetches, UNBOUNDED, 0 if base.access.is_open else (fetches + 1) // 2),
        budget=Budget(
            configuration.buffers.total,
            configuration.buffers.evaluation,
            running,
            lambda call: reactor.callLater(0, call),
            configuration.callers.buffers,
        ),
        quota_directories=free_quotas if base.directories.quotas else None,
    )


def _make_application(
    base: SharedParts, registry: Registry, monitoring: Monitoring
) -> KleinApplication:
    context = WebContext(
        registry,
        base.configuration,
        base.directories.uploads,
        os.urandom,
        base.access,
        base.reactor,
        base.pools.upload,
        monitoring.operations,
        monitoring.request_log,
    )
    return KleinApplication(context)


def _reload_services(reloader: Reloader, reactor: Any) -> Iterator[Service]:
    yield reloader
    path = find_socket(os.environ)
    if path is not None:
        yield ControlSocket(path, reloader.reload, reactor)


def _make_watchdog(notifier: Notifier, parts: Parts, reactor: Any) -> Watchdog:
    queue = parts.registry.queue
    return Watchdog(
        notifier,
        lambda: (queue.running, queue.waiting),
        parts.monitoring.operations.obstacles,
        lambda: compute_stop_timeout(parts.context.configuration),
        reactor,
    )


def _queue_bounds(configuration: Configuration, access: Authentication) -> tuple[int, int, int]:
    """Return the limits of queued, and per caller of running and queued; 0 means no limit."""
    callers, queued = configuration.callers, configuration.evaluations.queued
    return (queued, 0, 0) if access.is_open else (queued, callers.running, callers.queued)


def _host_policy(settings: RepositorySettings) -> HostPolicy:
    return HostPolicy(settings.allow_hosts, settings.deny_hosts, settings.private_networks)
