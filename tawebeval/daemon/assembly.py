"""Assembly of the daemon: construction of all parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import chain
from time import time
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from twisted.application.service import Service
from twisted.logger import Logger
from twisted.web.client import BrowserLikePolicyForHTTPS

from tawebeval.archive.archive import READER_THREADS, EvaluationArchive
from tawebeval.config import MAX_SUBMODULES, MAX_TREE_FILES, Configuration
from tawebeval.core.evaluations import IdentifierIssuer
from tawebeval.core.event_log import EventMemory
from tawebeval.core.hosts import HostPolicy
from tawebeval.core.tokens import LinkSigner
from tawebeval.daemon.control_socket import ControlSocket, find_control_socket
from tawebeval.daemon.directories import (
    STORE_NAME,
    DaemonDirectories,
    derive_daemon_label,
    locate_archive,
)
from tawebeval.daemon.disk_sync import DiskSync
from tawebeval.daemon.health import SANDBOX_PROBE_PERIOD, DiskCheck, Readiness, SandboxProbe
from tawebeval.daemon.logging import LogWriter
from tawebeval.daemon.metrics import DaemonMetrics, ReactorLag
from tawebeval.daemon.reload import ConfigurationFile, ReloadableConfiguration, ReloadService
from tawebeval.daemon.services import Daemon, EvaluationService, make_listener, make_periodic_timer
from tawebeval.daemon.starter_connection import (
    describe_starter_limits,
    do_jobs_outlive_daemon,
    open_starter,
)
from tawebeval.daemon.startup import (
    StartupChecks,
    find_exposed_endpoints,
    open_authentication,
    open_metrics_authentication,
)
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
from tawebeval.git.fetch_limits import FetchLimits, TreeLimits
from tawebeval.git.lfs import LfsClient
from tawebeval.git.remotes import GitKeyring, RemoteResolver
from tawebeval.linux.cgroups import CgroupManager, open_starter_cgroups
from tawebeval.linux.child import OrphanReaper, Spawner
from tawebeval.pinned_agent import CachedPolicyForHTTPS
from tawebeval.resolver import CheckedResolver, SystemResolver
from tawebeval.sandbox.base import Sandbox
from tawebeval.sandbox.limits import LimitMonitor
from tawebeval.sandbox.probe import (
    ProbeDirectories,
    open_helper_sandbox,
    open_sandbox,
    reprobe_sandbox,
)
from tawebeval.slurm.checks import check_shared_directory
from tawebeval.slurm.cluster import SlurmSandbox, cancel_all_jobs
from tawebeval.slurm.commands import SlurmCommands
from tawebeval.web.auth import EvaluationLinks
from tawebeval.web.context import HealthAndMetrics, RequestLog, WebContext
from tawebeval.web.peers import make_peer_evaluation_lists
from tawebeval.web.routes import KleinApplication, make_site
from tawebeval.web.server.channel import ApiSite
from tawebeval.webhooks.deliveries import CallbackQueue, make_callback_queue

_REMOVAL_PERIOD = 60.0  # seconds

log = Logger()


class DaemonBuilder:
    """Builder of the daemon: each property builds one part when another part first needs it.

    `cgroups` are those of the daemon, `self.cgroups` those of evaluators, which the starter may
    have. A reload replaces the configuration in `context`; `configuration` is that of the start.
    """

    def __init__(
        self,
        configuration: Configuration,
        directories: DaemonDirectories,
        reactor: Any,
        cgroups: CgroupManager,
    ) -> None:
        self.configuration = configuration
        self.directories = directories
        self.reactor = reactor
        self.pools: list[WorkerThreads | SystemResolver] = []
        self.file_tree_threads = self._make_threads(20, "work")  # check out, measure, remove trees
        # They check and sync disks and directories, any of which may hang.
        self.disk_check_threads = self._make_threads(4, "check")
        self.spawner = Spawner(reactor)
        self.orphans = OrphanReaper(reactor, self.spawner)
        self.metrics = CollectorRegistry()
        self.reactor_lag = ReactorLag(reactor)
        self.request_log = RequestLog(configuration.log.access)
        self.credentials_directory = os.environ.get("CREDENTIALS_DIRECTORY", "")
        self.authentication = open_authentication(configuration, reactor)
        self.store = EvaluationStore.open(
            directories.state / STORE_NAME,
            self._make_threads(1, "store", abandons_running_calls=True),
            self._make_threads(1, "stored", abandons_running_calls=True),
            reactor,
        )
        self.left_evaluations = LeftEvaluations(self.store.load_live())
        self.trees, is_lasting = open_starter(configuration, os.environ, directories.state)
        if is_lasting:
            for found in describe_starter_limits(configuration, self.trees.starter):
                if isinstance(found, SetupProblem):
                    log.warn("the starter's {problem}", problem=str(found))
            if self.trees.starter.cgroups:
                cgroups = open_starter_cgroups(cgroups, self.trees.starter.cgroups)
        self.cgroups = cgroups
        # A job goes on without the daemon, its starter and srun.
        self.is_lasting = is_lasting or do_jobs_outlive_daemon(configuration)

    def _make_threads(self, count: int, name: str, **options: bool) -> WorkerThreads:
        """Return a thread pool for calls that no other kind of calls must delay."""
        threads = WorkerThreads.create(self.reactor, count, name, **options)
        self.pools.append(threads)
        return threads

    def _make_resolver(self, count: int, name: str) -> SystemResolver:
        """Return a resolver. A silent name server blocks one of its threads for a minute."""
        resolver = SystemResolver(WorkerThreads.create(self.reactor, count, name))
        self.pools.append(resolver)
        return resolver

    @cached_property
    def sandbox(self) -> Sandbox:
        """The sandbox of this machine."""
        files = self.directories.sandbox_files_directory
        return open_sandbox(self.configuration, files, self.cgroups, self.orphans, self.trees)

    @cached_property
    def runner(self) -> Sandbox:
        """What evaluators run in: the sandbox of this machine, or the nodes of a cluster."""
        directories = self.directories
        label = derive_daemon_label(directories.state)
        commands = SlurmCommands(self.reactor, self.spawner)
        if self.configuration.runner.kind == "local":
            if self.left_evaluations.job_names:
                cancel_all_jobs(commands, self.reactor, label)
            return self.sandbox
        check_shared_directory(self.configuration, directories.state)
        return SlurmSandbox.create(
            self.configuration.runner,
            self.sandbox,
            commands,
            self.file_tree_threads,
            self.reactor,
            label,
            self.left_evaluations.job_names,
        )

    @cached_property
    def keyring(self) -> GitKeyring:
        """The secrets for git servers."""
        return GitKeyring(
            self.configuration.repositories.credentials,
            self.credentials_directory,
            self.directories.identifier_mac_key,
        )

    @cached_property
    def repositories(self) -> RepositoryCache:
        """The cache of repositories, with git and its rules for hosts."""
        settings, directories = self.configuration.repositories, self.directories
        threads = self.file_tree_threads
        policy = HostPolicy(settings.allow_hosts, settings.deny_hosts, settings.private_networks)
        remotes = RemoteResolver(
            CheckedResolver(policy, self._make_resolver(12, "servers"), self.reactor),
            (directories.repositories, directories.uploads, directories.evaluations),
            settings.protocols,
        )
        git = GitRunner(
            self.reactor,
            self.spawner,
            settings.protocols,
            settings.memory,
            open_helper_sandbox(self.sandbox, directories.sandbox_files_directory),
            self.cgroups.git_procs_files,
            self.cgroups.evaluator_niceness,
        )
        limits = FetchLimits(
            self.reactor,
            timeout=settings.fetch_timeout,
            max_bytes=settings.fetch_bytes,
            tree_limits=TreeLimits(MAX_TREE_FILES, settings.tree_bytes, MAX_SUBMODULES),
        )
        tls_policy = CachedPolicyForHTTPS(BrowserLikePolicyForHTTPS())
        return RepositoryCache(
            directories.repositories,
            git,
            threads,
            remotes,
            limits,
            self.keyring,
            capacity=settings.cache,
            lfs=LfsClient(self.reactor, tls_policy, threads, remotes, settings.fetch_timeout),
        )

    @cached_property
    def archive(self) -> EvaluationArchive | None:
        """The archive, None if `archive.enabled` is not set."""
        settings = self.configuration.archive
        if not settings.enabled:
            return None
        return EvaluationArchive(
            locate_archive(settings, self.directories.state),
            settings,
            # More than the daemon needs to be ready.
            self.configuration.limits.free_disk_for_readiness * 9 // 8,
            self.store,
            self._make_threads(1, "archive", abandons_running_calls=True),
            self._make_threads(READER_THREADS, "archived", abandons_running_calls=True),
            format_rfc3339_time,
        )

    @cached_property
    def context(self) -> EvaluationContext:
        """What all evaluations share."""
        configuration, reactor = self.configuration, self.reactor
        fetches = configuration.repositories.fetches
        return EvaluationContext(
            configuration=configuration,
            clock=reactor,
            generate_random_bytes=os.urandom,
            worker_threads=self.file_tree_threads,
            spawner=self.spawner,
            checkout_source=self.repositories,
            sandbox=self.runner,
            limit_monitor=LimitMonitor(
                reactor, self._make_threads(1, "watch"), self._make_threads(2, "count")
            ),
            # The servers of one caller may be slow, so a caller has half of the slots at most.
            fetch_slots=FairQueue(
                fetches,
                UNLIMITED_WAITERS,
                0 if self.authentication.is_token_optional else (fetches + 1) // 2,
            ),
            event_memory=EventMemory(configuration.buffers.total),
            unread_events=make_unread_events_share(configuration.buffers.disk),
            segment_loader=SegmentLoader(self.file_tree_threads),
            store=self.store,
            archive=self.archive,
        )

    @cached_property
    def callbacks(self) -> CallbackQueue:
        """The webhooks on their way."""
        return make_callback_queue(
            self.configuration.callbacks,
            os.environ,
            self._make_resolver(8, "receivers"),
            self.reactor,
            os.urandom,
            time,
            has_one_caller=self.authentication.is_token_optional,
        )

    @cached_property
    def registry(self) -> EvaluationRegistry:
        """All evaluations."""
        evaluations, callers = self.configuration.evaluations, self.configuration.callers
        has_callers = not self.authentication.is_token_optional
        bounds = (
            resolve_run_slot_count(evaluations.running),
            evaluations.queued,
            callers.running if has_callers else 0,
            callers.queued if has_callers else 0,
        )
        identities = IdentifierIssuer(
            self.directories.identifier_mac_key, os.urandom, self.configuration.service.name
        )
        return EvaluationRegistry(
            self.context, identities, bounds, self.directories.evaluations, self.callbacks
        )

    @cached_property
    def readiness(self) -> Readiness:
        """Whether the daemon takes evaluations."""
        directories, threads = self.directories, self.disk_check_threads
        disks = [
            DiskCheck("state", directories.evaluations, threads, self.reactor),
            DiskCheck("cache", directories.repositories, threads, self.reactor),
        ]
        limits = self.configuration.limits
        counters = self.context.counters
        return Readiness(self.registry, counters, disks, limits.free_disk_for_readiness)

    @cached_property
    def sandbox_probe(self) -> SandboxProbe:
        """The probe of a sandbox that has failed."""
        places = ProbeDirectories(self.directories.repositories, self.directories.evaluations)
        return SandboxProbe(
            self.context.counters,
            partial(reprobe_sandbox, self.runner, places),
            self.file_tree_threads,
            self.reactor,
        )

    @cached_property
    def health_and_metrics(self) -> HealthAndMetrics:
        """What the API tells of the daemon itself."""
        return HealthAndMetrics(
            self.readiness.find_unreadiness_reasons,
            partial(generate_latest, self.metrics),
            open_metrics_authentication(self.configuration, self.reactor),
        )

    @cached_property
    def application(self) -> KleinApplication:
        """The API."""
        links = EvaluationLinks(
            self.store,
            LinkSigner(self.directories.identifier_mac_key),
            self.authentication,
            self.reactor,
            time,
            os.urandom,
        )
        context = WebContext(
            self.registry,
            upload_directory=self.directories.uploads,
            random_bytes=os.urandom,
            authentication=self.authentication,
            clock=self.reactor,
            upload_threads=self._make_threads(8, "upload"),
            peer_lists=make_peer_evaluation_lists(self._make_resolver(2, "peers"), self.reactor),
            links=links,
            health_and_metrics=self.health_and_metrics,
            request_log=self.request_log,
        )
        return KleinApplication(context)

    @cached_property
    def site(self) -> ApiSite:
        """The web server."""
        return make_site(self.application, self.reactor)

    @cached_property
    def startup(self) -> StartupChecks:
        """The service that starts first and stops last."""
        return StartupChecks(
            self.directories,
            self.cgroups,
            self.sandbox,
            self.pools,
            self.configuration,
            self.left_evaluations,
        )

    @cached_property
    def evaluations(self) -> EvaluationService:
        """The service of the evaluations."""
        return EvaluationService(
            self.registry,
            self.repositories,
            self.callbacks,
            self.left_evaluations.rows,
            self.directories.uploads,
            self.sandbox.writable_trees,
            is_lasting=self.is_lasting,
        )

    def register_metrics(self, log_writer: LogWriter | None) -> None:
        """Register the metrics of all parts; `log_writer` is None if twistd writes the log."""
        ProcessCollector(registry=self.metrics)
        metrics = DaemonMetrics(
            registry=self.registry,
            repository_cache=self.repositories,
            callbacks=self.callbacks,
            request_log=self.request_log,
            route_table=self.application.routes,
            connection_limits=self.site.connection_limits,
            reactor_lag=self.reactor_lag,
            find_unreadiness_reasons=self.readiness.find_unreadiness_reasons,
            line_writer=log_writer.line_writer if log_writer else None,
        )
        self.metrics.register(metrics)

    def make_timers(self) -> Iterator[Service]:
        """Yield the services that make periodic calls."""
        sync = DiskSync(self.store, self.directories.state, self.disk_check_threads, self.reactor)
        calls = (
            self.registry.expire_evaluations,
            self.orphans.reap_ended_orphans,
            self.context.cleanup_queue.retry_next_calls,
            self.repositories.start_removal_of_leftovers,
            self.readiness.check_disks,
            sync.sync_if_due,
        )
        yield make_periodic_timer(calls, self.reactor)
        probe = self.sandbox_probe.start_probe_if_needed
        yield make_periodic_timer((probe,), self.reactor, SANDBOX_PROBE_PERIOD)
        if self.archive is not None:
            yield make_periodic_timer((self.archive.begin_removal,), self.reactor, _REMOVAL_PERIOD)

    def make_reload_services(
        self, daemon: Daemon, file: ConfigurationFile, notifier: SystemdNotifier
    ) -> Iterator[Service]:
        """Yield the services that reload `file` and the files that it names."""
        on_reload = (daemon.apply_log_level, self.startup.lock_environments)
        sources = (
            ReloadableConfiguration(file, self.context, on_reload),
            self.callbacks,
            self.authentication,
            self.health_and_metrics.metrics_authentication,
            self.keyring,
        )
        reloader = ReloadService(sources, self.credentials_directory, notifier, self.reactor)
        yield reloader
        path = find_control_socket(os.environ)
        if path is not None:
            yield ControlSocket(path, reloader.reload_files, self.reactor)

    def make_watchdog(self, notifier: SystemdNotifier) -> Watchdog:
        """Return the service that reports to systemd."""
        queue = self.registry.run_queue
        return Watchdog(
            notifier,
            lambda: (queue.taken_slot_count, queue.waiter_count),
            self.readiness.find_unreadiness_reasons,
            lambda: compute_stop_timeout(self.context.configuration),
            self.reactor,
        )


def build_daemon(
    configuration: Configuration,
    directories: DaemonDirectories,
    reactor: Any,
    cgroups: CgroupManager,
    file: ConfigurationFile | None = None,
    log_writer: LogWriter | None = None,
) -> Daemon:
    """Build the daemon.

    `file` is the configuration file for a reload, `log_writer` as for `Daemon`. Raises:
    ConfigurationError, for an invalid endpoint, unreadable tokens or secrets, an exposed endpoint
    without tokens, or a missing sandbox.
    """
    parts = DaemonBuilder(configuration, directories, reactor, cgroups)
    daemon = Daemon(parts.startup, parts.evaluations, parts.site, reactor, log_writer)
    parts.register_metrics(log_writer)
    notifier = find_notifier(os.environ)
    endpoints = dict.fromkeys(configuration.listen)  # without duplicates
    services = chain(
        parts.make_reload_services(daemon, file or ConfigurationFile(), notifier),
        (parts.reactor_lag,),
        parts.make_timers(),
        (make_listener(each, parts.site, reactor, configuration.http) for each in endpoints),
        (parts.make_watchdog(notifier),),
    )
    for each in services:
        each.setServiceParent(daemon)
    if parts.authentication.is_token_optional:
        for problem in find_exposed_endpoints(configuration):
            log.warn("{problem}", problem=str(problem))
    return daemon
