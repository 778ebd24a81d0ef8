"""Assembly of the daemon: construction of all parts, and the settings that a reload changes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from time import time
from typing import Any

import attrs
from twisted.application.service import Service
from twisted.logger import Logger
from twisted.web.client import BrowserLikePolicyForHTTPS

from tawebeval.archive.archive import READER_THREADS, EvaluationArchive
from tawebeval.config import MAX_SUBMODULES, MAX_TREE_FILES, Configuration
from tawebeval.core.event_log import EventMemory
from tawebeval.core.hosts import HostPolicy
from tawebeval.core.identifiers import IdentifierIssuer
from tawebeval.core.signed_links import LinkSigner
from tawebeval.daemon.control_socket import ControlSocket, find_control_socket
from tawebeval.daemon.directories import (
    STORE_NAME,
    DaemonDirectories,
    derive_daemon_label,
    locate_archive,
)
from tawebeval.daemon.disk_sync import DiskSync
from tawebeval.daemon.logging import LineWriter, LogWriter
from tawebeval.daemon.metrics import DaemonMetrics, Monitoring
from tawebeval.daemon.reload import ConfigurationFile, ReloadableConfiguration, ReloadService
from tawebeval.daemon.services import Daemon, EvaluationService, make_listener, make_periodic_timer
from tawebeval.daemon.starter_connection import (
    describe_starter_limits,
    do_jobs_outlive_daemon,
    open_starter,
)
from tawebeval.daemon.startup import StartupChecks, find_exposed_endpoints, open_authentication
from tawebeval.daemon.systemd import SystemdNotifier, Watchdog, compute_stop_timeout, find_notifier
from tawebeval.deferreds import UNLIMITED_WAITERS, FairQueue, WorkerThreads, resolve_run_slot_count
from tawebeval.errors import SetupProblem
from tawebeval.evaluations.context import EvaluationContext, make_unread_events_share
from tawebeval.evaluations.details import format_rfc3339_time
from tawebeval.evaluations.reading import SegmentLoader
from tawebeval.evaluations.registry import EvaluationRegistry
from tawebeval.evaluations.restoring import LeftEvaluations
from tawebeval.evaluations.store import EvaluationStore
from tawebeval.git.cache import RepositoryCache
from tawebeval.git.command import GitRunner
from tawebeval.git.commits import TreeLimits
from tawebeval.git.fetch_limits import FetchLimits
from tawebeval.git.keyring import GitKeyring
from tawebeval.git.lfs import LfsClient
from tawebeval.git.remotes import RemoteResolver
from tawebeval.linux.cgroups import CgroupManager, open_starter_cgroups
from tawebeval.linux.child import Spawner
from tawebeval.linux.reaper import OrphanReaper
from tawebeval.pinned_agent import CachedPolicyForHTTPS
from tawebeval.resolver import CheckedResolver, SystemResolver
from tawebeval.sandbox.base import Sandbox
from tawebeval.sandbox.limit_monitor import LimitMonitor
from tawebeval.sandbox.probe import open_helper_sandbox, open_sandbox
from tawebeval.slurm.checks import check_shared_directories
from tawebeval.slurm.cluster import SlurmSandbox, cancel_all_jobs
from tawebeval.slurm.commands import JobCounters, SlurmCommands
from tawebeval.web.auth import Authentication
from tawebeval.web.context import WebContext
from tawebeval.web.links import EvaluationLinks
from tawebeval.web.peers import make_peer_evaluation_lists
from tawebeval.web.routes import KleinApplication, make_site
from tawebeval.web.server.site import ApiSite
from tawebeval.webhooks.deliveries import CallbackQueue, make_callback_queue

_REMOVAL_PERIOD = 60.0  # seconds

log = Logger()


@attrs.frozen
class ThreadPools:
    """The daemon's thread pools, one for each kind of call that must not delay another kind."""

    file_tree_threads: WorkerThreads  # checks out, measures and removes file trees
    limit_monitor_threads: WorkerThreads  # polls the limits of runs
    file_count_threads: WorkerThreads  # counts the files of runs that have many
    upload_threads: WorkerThreads  # writes uploads
    disk_check_threads: WorkerThreads  # check and sync disks and directories, any of which may hang
    repository_resolver: (
        SystemResolver  # git servers; a silent name server blocks a thread for a minute
    )
    callback_resolver: SystemResolver  # webhook receivers
    peer_daemon_resolver: SystemResolver  # the other daemons of `service.peers`
    store_threads: WorkerThreads  # one, which writes the store of evaluations
    store_reader_threads: WorkerThreads  # one, which reads its archived evaluations
    archive_threads: WorkerThreads | None  # one, which writes the archive
    archive_reader_threads: WorkerThreads | None  # read it, also while writing takes long

    @classmethod
    def create(cls, reactor: Any, *, has_archive: bool = False) -> ThreadPools:
        """Create the pools, not started yet."""
        create = partial(
            WorkerThreads.create, reactor, abandons_running_calls=True
        )  # the disk may hang
        return cls(
            file_tree_threads=WorkerThreads.create(reactor, 20, "work"),
            limit_monitor_threads=WorkerThreads.create(reactor, 1, "watch"),
            file_count_threads=WorkerThreads.create(reactor, 2, "count"),
            upload_threads=WorkerThreads.create(reactor, 8, "upload"),
            disk_check_threads=WorkerThreads.create(reactor, 4, "check"),
            repository_resolver=SystemResolver(WorkerThreads.create(reactor, 12, "servers")),
            callback_resolver=SystemResolver(WorkerThreads.create(reactor, 8, "receivers")),
            peer_daemon_resolver=SystemResolver(WorkerThreads.create(reactor, 2, "peers")),
            store_threads=create(1, "store"),
            store_reader_threads=create(1, "stored"),
            archive_threads=create(1, "archive") if has_archive else None,
            archive_reader_threads=create(READER_THREADS, "archived") if has_archive else None,
        )

    def list_pools(self) -> Sequence[WorkerThreads | SystemResolver]:
        """List all pools."""
        return [pool for pool in attrs.astuple(self, recurse=False) if pool is not None]


@attrs.frozen
class SharedDependencies:
    """Parts that the builders of several packages need."""

    configuration: Configuration
    directories: DaemonDirectories
    reactor: Any
    cgroups: CgroupManager
    spawner: Spawner
    thread_pools: ThreadPools
    authentication: Authentication
    sandbox: Sandbox
    keyring: GitKeyring
    store: EvaluationStore
    left_evaluations: LeftEvaluations


@attrs.frozen
class DaemonParts:
    """The daemon's parts that a reload or the metrics need."""

    repository_cache: RepositoryCache
    evaluation_context: EvaluationContext
    evaluation_registry: EvaluationRegistry
    callbacks: CallbackQueue
    monitoring: Monitoring
    application: KleinApplication
    site: ApiSite

    def apply_settings(self, configuration: Configuration) -> None:
        """Apply the environments and problems of a configuration."""
        self.evaluation_context.configuration = configuration

    def make_metrics(self, log_lines: LineWriter | None) -> DaemonMetrics:
        """Return the metrics of the parts; `log_lines` is None if twistd writes the log."""
        sandbox = self.evaluation_context.sandbox
        jobs = sandbox.commands.counters if isinstance(sandbox, SlurmSandbox) else JobCounters()
        return DaemonMetrics(
            evaluation_context=self.evaluation_context,
            repository_cache=self.repository_cache,
            evaluation_registry=self.evaluation_registry,
            callbacks=self.callbacks,
            request_log=self.monitoring.request_log,
            route_table=self.application.routes,
            connection_limits=self.site.connection_limits,
            reactor_lag=self.monitoring.reactor_lag,
            find_unreadiness_reasons=self.monitoring.readiness.find_unreadiness_reasons,
            line_writer=log_lines,
            archive=self.evaluation_context.archive,
            slurm_jobs=jobs,
        )


def build_daemon(
    configuration: Configuration,
    directories: DaemonDirectories,
    reactor: Any,
    cgroups: CgroupManager,
    file: ConfigurationFile | None = None,
    log_writer: LogWriter | None = None,
) -> Daemon:
    """Build the daemon, which drops its privileges before it starts any program.

    `file` is the configuration file for a reload, `log_writer` as for `Daemon`. Raises:
    ConfigurationError, for an invalid endpoint, unreadable tokens or secrets, an exposed endpoint
    without tokens, or a missing sandbox.
    """
    pools = ThreadPools.create(reactor, has_archive=configuration.archive.enabled)
    spawn = Spawner(reactor)
    access = open_authentication(configuration, reactor)
    orphans = OrphanReaper(reactor, spawn)
    store = EvaluationStore.open(
        directories.state / STORE_NAME,
        pools.store_threads,
        pools.store_reader_threads,
        reactor,
    )
    left = LeftEvaluations(store.load_live())
    trees, is_lasting = open_starter(configuration, os.environ, directories.state)
    if is_lasting:
        for found in describe_starter_limits(configuration, trees.starter):
            if isinstance(found, SetupProblem):
                log.warn("the starter's {problem}", problem=str(found))
        if trees.starter.cgroups:
            cgroups = open_starter_cgroups(cgroups, trees.starter.cgroups)
    # A job goes on without the daemon, its starter and srun.
    is_lasting = is_lasting or do_jobs_outlive_daemon(configuration)
    sandbox = open_sandbox(
        configuration, directories.sandbox_files_directory, cgroups, orphans, trees
    )
    credentials = os.environ.get("CREDENTIALS_DIRECTORY", "")
    keyring = GitKeyring(
        configuration.repositories.credentials, credentials, directories.identifier_mac_key
    )
    parts = _make_parts(
        SharedDependencies(
            configuration,
            directories,
            reactor,
            cgroups,
            spawn,
            pools,
            access,
            sandbox,
            keyring,
            store,
            left,
        )
    )
    registry, repositories, monitoring = (
        parts.evaluation_registry,
        parts.repository_cache,
        parts.monitoring,
    )
    startup = StartupChecks(
        directories,
        cgroups,
        sandbox,
        pools.list_pools(),
        configuration,
        left,
    )
    evaluations = EvaluationService(
        registry,
        repositories,
        parts.callbacks,
        parts.evaluation_context,
        left.rows,
        directories.uploads,
        sandbox.writable_trees,
        is_lasting=is_lasting,
    )
    daemon = Daemon(startup, evaluations, parts.site, reactor, log_writer)
    lines = log_writer.line_writer if log_writer else None
    monitoring.metrics.register(parts.make_metrics(lines))
    notifier = find_notifier(os.environ)
    endpoints = dict.fromkeys(configuration.listen)  # without duplicates
    on_reload = (parts.apply_settings, daemon.apply_log_level, startup.lock_environments)
    reload = ReloadableConfiguration(file or ConfigurationFile(), configuration, on_reload)
    sources = (reload, parts.callbacks, access, monitoring.metrics_authentication, keyring)
    reloader = ReloadService(sources, credentials, notifier, reactor)
    calls = (
        registry.expire_evaluations,
        orphans.reap_ended_orphans,
        parts.evaluation_context.cleanup_queue.retry_next_calls,
        repositories.start_removal_of_leftovers,
        monitoring.readiness.check_disks,
        DiskSync(store, directories.state, pools.disk_check_threads, reactor).sync_if_due,
    )
    for part in (
        *_reload_services(reloader, reactor),
        monitoring.reactor_lag,
        monitoring.sandbox_probe,
        make_periodic_timer(calls, reactor),
        *_make_archive_timers(parts.evaluation_context.archive, reactor),
        *(make_listener(one, parts.site, reactor, configuration.http) for one in endpoints),
        _make_watchdog(notifier, parts, reactor),
    ):
        part.setServiceParent(daemon)
    if access.is_token_optional:
        for problem in find_exposed_endpoints(configuration):
            log.warn("{problem}", problem=str(problem))
    return daemon


def _make_parts(base: SharedDependencies) -> DaemonParts:
    configuration, directories, reactor = base.configuration, base.directories, base.reactor
    running = resolve_run_slot_count(configuration.evaluations.running)
    repositories = _make_repositories(base, _make_remotes(base))
    context = _make_context(base, repositories, _make_archive(base))
    callbacks = make_callback_queue(
        configuration.callbacks,
        os.environ,
        base.thread_pools.callback_resolver,
        reactor,
        os.urandom,
        time,
        has_one_caller=base.authentication.is_token_optional,
    )
    slots = (running, *_queue_bounds(configuration, base.authentication))
    identities = IdentifierIssuer(
        directories.identifier_mac_key, os.urandom, configuration.service.name
    )
    registry = EvaluationRegistry(context, identities, slots, directories.evaluations, callbacks)
    monitoring = Monitoring.create(
        directories, registry, context, base.thread_pools.disk_check_threads
    )
    application = _make_application(base, registry, monitoring)
    return DaemonParts(
        repositories,
        context,
        registry,
        callbacks,
        monitoring,
        application,
        make_site(application, reactor),
    )


def _make_remotes(base: SharedDependencies) -> RemoteResolver:
    settings, directories = base.configuration.repositories, base.directories
    policy = HostPolicy(settings.allow_hosts, settings.deny_hosts, settings.private_networks)
    return RemoteResolver(
        CheckedResolver(policy, base.thread_pools.repository_resolver, base.reactor),
        (directories.repositories, directories.uploads, directories.evaluations),
        settings.protocols,
    )


def _make_repositories(base: SharedDependencies, remotes: RemoteResolver) -> RepositoryCache:
    settings, directories = base.configuration.repositories, base.directories
    git = GitRunner(
        base.reactor,
        base.spawner,
        settings.protocols,
        settings.memory,
        open_helper_sandbox(base.sandbox, directories.sandbox_files_directory),
        base.cgroups.git_procs_files,
        base.cgroups.evaluator_niceness,
    )
    limits = FetchLimits(
        base.reactor,
        timeout=settings.fetch_timeout,
        max_bytes=settings.fetch_bytes,
        tree_limits=TreeLimits(MAX_TREE_FILES, settings.tree_bytes, MAX_SUBMODULES),
    )
    return RepositoryCache(
        directories.repositories,
        git,
        base.thread_pools.file_tree_threads,
        remotes,
        limits,
        base.keyring,
        capacity=settings.cache,
        lfs=_make_lfs_client(base, remotes),
    )


def _make_lfs_client(base: SharedDependencies, remotes: RemoteResolver) -> LfsClient:
    return LfsClient(
        base.reactor,
        CachedPolicyForHTTPS(BrowserLikePolicyForHTTPS()),
        base.thread_pools.file_tree_threads,
        remotes,
        base.configuration.repositories.fetch_timeout,
    )


def _make_context(
    base: SharedDependencies,
    repositories: RepositoryCache,
    archive: EvaluationArchive | None,
) -> EvaluationContext:
    configuration, reactor, pools = base.configuration, base.reactor, base.thread_pools
    fetches = configuration.repositories.fetches
    return EvaluationContext(
        configuration=configuration,
        clock=reactor,
        generate_random_bytes=os.urandom,
        worker_threads=pools.file_tree_threads,
        spawner=base.spawner,
        checkout_source=repositories,
        sandbox=_open_runner(base),
        limit_monitor=LimitMonitor(reactor, pools.limit_monitor_threads, pools.file_count_threads),
        # The servers of one caller may be slow, so a caller has half of the slots at most.
        fetch_slots=FairQueue(
            fetches,
            UNLIMITED_WAITERS,
            0 if base.authentication.is_token_optional else (fetches + 1) // 2,
        ),
        event_memory=EventMemory(configuration.buffers.total),
        unread_events=make_unread_events_share(configuration.buffers.disk),
        segment_loader=SegmentLoader(pools.file_tree_threads),
        store=base.store,
        archive=archive,
    )


def _open_runner(base: SharedDependencies) -> Sandbox:
    """Return what evaluators run in: the daemon's own sandbox, or the nodes of a cluster."""
    directories = base.directories
    label = derive_daemon_label(directories.state)
    commands = SlurmCommands(base.reactor, base.spawner)
    if base.configuration.runner.kind == "local":
        if base.left_evaluations.has_cluster_runs:
            cancel_all_jobs(commands, base.reactor, label)
        return base.sandbox
    check_shared_directories(base.configuration, (directories.state, directories.repositories))
    return SlurmSandbox.create(
        base.configuration.runner,
        base.sandbox,
        commands,
        base.thread_pools.file_tree_threads,
        base.reactor,
        label,
    )


def _make_archive(base: SharedDependencies) -> EvaluationArchive | None:
    """Return the archive, None if `archive.enabled` is not set."""
    settings, pools = base.configuration.archive, base.thread_pools
    if pools.archive_threads is None or pools.archive_reader_threads is None:
        return None
    return EvaluationArchive(
        locate_archive(settings, base.directories.state),
        settings,
        _compute_archive_reserve(base.configuration),
        base.store,
        pools.archive_threads,
        pools.archive_reader_threads,
        format_rfc3339_time,
    )


def _make_archive_timers(archive: EvaluationArchive | None, reactor: Any) -> Iterator[Service]:
    """Yield the service that removes old evaluations, if there is an archive."""
    if archive is not None:
        yield make_periodic_timer((archive.begin_removal,), reactor, _REMOVAL_PERIOD)


def _compute_archive_reserve(configuration: Configuration) -> int:
    """Return the bytes that the archive leaves free: the daemon stays ready."""
    return configuration.limits.free_disk_for_readiness * 9 // 8


def _make_application(
    base: SharedDependencies, registry: EvaluationRegistry, monitoring: Monitoring
) -> KleinApplication:
    context = WebContext(
        registry,
        upload_directory=base.directories.uploads,
        random_bytes=os.urandom,
        authentication=base.authentication,
        clock=base.reactor,
        upload_threads=base.thread_pools.upload_threads,
        peer_lists=make_peer_evaluation_lists(base.thread_pools.peer_daemon_resolver, base.reactor),
        links=_make_links(base),
        health_and_metrics=monitoring.health_and_metrics,
        request_log=monitoring.request_log,
    )
    return KleinApplication(context)


def _make_links(base: SharedDependencies) -> EvaluationLinks:
    directories = base.directories
    return EvaluationLinks(
        base.store,
        LinkSigner(directories.identifier_mac_key),
        base.authentication,
        base.reactor,
        time,
        os.urandom,
    )


def _reload_services(reloader: ReloadService, reactor: Any) -> Iterator[Service]:
    yield reloader
    path = find_control_socket(os.environ)
    if path is not None:
        yield ControlSocket(path, reloader.reload_files, reactor)


def _make_watchdog(notifier: SystemdNotifier, parts: DaemonParts, reactor: Any) -> Watchdog:
    queue = parts.evaluation_registry.run_queue
    return Watchdog(
        notifier,
        lambda: (queue.taken_slot_count, queue.waiter_count),
        parts.monitoring.health_and_metrics.find_unreadiness_reasons,
        lambda: compute_stop_timeout(parts.evaluation_context.configuration),
        reactor,
    )


def _queue_bounds(configuration: Configuration, access: Authentication) -> tuple[int, int, int]:
    """Return the limits of queued, and per caller of running and queued; 0 means no limit."""
    callers, queued = configuration.callers, configuration.evaluations.queued
    return (queued, 0, 0) if access.is_token_optional else (queued, callers.running, callers.queued)
