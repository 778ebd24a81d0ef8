"""Assembly of the daemon: construction of all parts, and their tree of services."""

from __future__ import annotations

import atexit
import os
import platform
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from time import time
from types import FrameType
from typing import Any

import attrs
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from twisted.application.internet import StreamServerEndpointService, TimerService
from twisted.application.service import MultiService, Service
from twisted.internet.defer import Deferred, gatherResults, maybeDeferred
from twisted.internet.error import CannotListenError
from twisted.internet.task import deferLater
from twisted.logger import ILogObserver, Logger
from twisted.web.client import BrowserLikePolicyForHTTPS

from tawebeval import __version__
from tawebeval.archive.archive import READER_THREADS, WRITER_THREADS, EvaluationArchive
from tawebeval.config import MAX_SUBMODULES, MAX_TREE_FILES, Configuration
from tawebeval.core.evaluations import IdentifierIssuer
from tawebeval.core.events import EventMemory
from tawebeval.core.hosts import HostPolicy
from tawebeval.core.tokens import LinkSigner
from tawebeval.daemon.endpoints import (
    build_page_url,
    explain_listen_error,
    find_exposed_endpoints,
    make_listener,
)
from tawebeval.daemon.logging import LineWriter, LogWriter, make_error_reporter
from tawebeval.daemon.metrics import (
    SANDBOX_PROBE_PERIOD,
    DaemonMetrics,
    DiskCheck,
    ReactorLag,
    Readiness,
    SandboxProbe,
)
from tawebeval.daemon.reload import (
    ConfigurationFile,
    ReloadableConfiguration,
    ReloadService,
    Watchdog,
    compute_evaluation_end_timeout,
    compute_stop_timeout,
    find_notifier,
)
from tawebeval.daemon.startup import (
    STORE_FILENAME,
    DaemonDirectories,
    DiskSync,
    StartupChecks,
    derive_daemon_label,
    describe_limits_on_starter,
    open_authenticator,
    open_metrics_authenticator,
    open_starter,
)
from tawebeval.deferreds import FairQueue, WorkerThreads, resolve_run_slot_count
from tawebeval.errors import SetupProblem
from tawebeval.evaluations.context import EvaluationContext, make_unread_events_budget
from tawebeval.evaluations.lifecycle import STARTER_FAILURE
from tawebeval.evaluations.service import EvaluationRegistry
from tawebeval.evaluations.starting import InheritedResources
from tawebeval.evaluations.store import EvaluationDetails, EvaluationStore, format_rfc3339_time
from tawebeval.evaluations.traces import open_tracer
from tawebeval.git.cache import RepositoryCache
from tawebeval.git.command import GitRunner
from tawebeval.git.fetch_limits import FetchLimits, TreeLimits
from tawebeval.git.lfs import LfsClient
from tawebeval.git.remotes import GitKeyring, RemoteResolver
from tawebeval.linux.cgroups import CgroupManager, open_starter_cgroups
from tawebeval.linux.child import spawn_child
from tawebeval.linux.daemon_limits import PROCESS_LIMIT_REMEDY
from tawebeval.linux.privileges import drop_capabilities
from tawebeval.pinned_agent import CachedPolicyForHTTPS, CheckedResolver, SystemResolver
from tawebeval.sandbox.base import LimitMonitor, Sandbox
from tawebeval.sandbox.probe import (
    ProbeDirectories,
    open_git_sandbox,
    open_sandbox,
    reprobe_sandbox,
)
from tawebeval.sandbox.workspace import WorkspaceLauncher
from tawebeval.slurm.commands import SlurmCommands, check_shared_directory
from tawebeval.slurm.job import SlurmSandbox
from tawebeval.web.auth import Authenticator, EvaluationLinks
from tawebeval.web.lists import make_evaluation_lists
from tawebeval.web.routes import HealthAndMetrics, KleinApplication, WebContext
from tawebeval.web.server.channel import DRAIN_TIMEOUT, ApiSite
from tawebeval.web.upload import FormReceiverFactory
from tawebeval.webhooks.deliveries import CallbackQueue, make_callback_queue

_TIMER_PERIOD = 1.0  # seconds
_REMOVAL_PERIOD = 60.0  # seconds
_LOG_TIMEOUT = 2.0  # seconds for which the shutdown waits for the log
_LASTING_PATIENCE = 0.5  # seconds for responses, if evaluations go on: streams do not end
_LAST_POLLS = 0.5  # seconds in which clients that read pages can fetch the last one
_STARTER_END = 0.5  # seconds from the end of the starter's connection to that of its process

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_Handler = Callable[[int, FrameType | None], Any]

log = Logger()


@attrs.define(eq=False, slots=False)
class EvaluationService(Service):
    """Service of the evaluations, their archive and the repository cache.

    Its stop drains them, and no process of an evaluation outlives it; if they are lasting, they go
    on. `rows` are those of an earlier process, whose files are in the directory `uploads` until
    they begin. `launcher` has the connection to the starter.
    """

    name = "evaluations"

    registry: EvaluationRegistry
    repositories: RepositoryCache
    _rows: Sequence[EvaluationDetails]
    _uploads: Path
    _launcher: WorkspaceLauncher
    _is_lasting: bool
    exit_status: int = attrs.field(default=0, init=False)  # of the process

    @property
    def context(self) -> EvaluationContext:
        """What all evaluations share."""
        return self.registry.context

    def startService(self) -> None:
        """Load the repository cache, and go on with the evaluations of an earlier process."""
        # Not before: its thread has the rights that others have dropped.
        if (tracer := open_tracer(os.environ)) is not None:
            self.context.tracer = tracer
            self.context.clock.addSystemEventTrigger("after", "shutdown", tracer.stop)
        self.repositories.load_from_disk(self._restore_evaluations)
        super().startService()

    def _restore_evaluations(self) -> None:
        context, registry = self.context, self.registry
        threads = context.worker_threads
        self._launcher.attach_reactor(context.clock, threads.run_in_thread, self._on_starter_lost)
        assert context.store is not None, "the daemon has one"
        # Also above the numbers of evaluations that are gone.
        now = int(context.read_wall_clock() * 1000)
        registry.records.last_sequence_number = max(context.store.find_last_sequence_number(), now)
        registry.restore_evaluations(self._rows, self._uploads, self.repositories.use_checkout_at)
        self._rows = ()
        if context.archive is not None:
            context.archive.enable_removal()

    @property
    def evaluations_outlast_daemon(self) -> bool:
        """Whether evaluations go on when the daemon ends."""
        is_on_cluster = self.context.configuration.runner.kind == "slurm"
        return self._is_lasting and (is_on_cluster or self._launcher.starter.is_starter_alive)

    def _on_starter_lost(self) -> None:
        self.registry.stop_accepting_evaluations()
        # A process that ends closes its connections first.
        self.context.clock.callLater(_STARTER_END, self._stop_without_starter)

    def _stop_without_starter(self) -> None:
        """Stop, after clients have read what is left: systemd starts the starter and the daemon."""
        if self.evaluations_outlast_daemon:
            self.registry.hand_all_to_next_daemon()
            log.error("stopping: the connection to the starter of evaluators is lost")
        else:
            what = "the starter of evaluators has ended, and with the starter all evaluators"
            log.error("stopping: {what}", what=what)
            self.registry.stop_lost_runs(STARTER_FAILURE)
        self.exit_status = 1
        self.context.clock.stop()

    def stopService(self) -> Deferred[bool]:
        """Drain for `service.drain` seconds; return whether evaluations were running or queued."""
        super().stopService()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> bool:
        had_any = False
        self._launcher.starter.ignore_connection_loss()
        if self.evaluations_outlast_daemon:
            self.registry.hand_all_to_next_daemon()
        else:
            configuration = self.context.configuration
            had_any = await self.registry.drain_and_close(
                configuration.service.drain, compute_evaluation_end_timeout(configuration)
            )
        if self.context.store is not None:
            await self.context.store.close()
        return had_any


class Daemon(MultiService):
    """Parent service of all parts. The start fails if an endpoint cannot be opened.

    `log_writer` is the log observer for twistd, None to keep the observer of twistd.
    """

    def __init__(
        self,
        startup: StartupChecks,
        evaluations: EvaluationService,
        site: ApiSite,
        reactor: Any,
        log_writer: LogWriter | None = None,
    ) -> None:
        super().__init__()
        self.log_writer = log_writer
        self._site = site
        self._evaluations = evaluations
        self._reactor = reactor
        for part in (
            startup,
            evaluations,
            ShutdownSignals(evaluations.registry.end_drain_early, reactor),
        ):
            part.setServiceParent(self)

    def get_exit_status(self) -> int:
        """Return the exit status of the process, unless a signal ends it."""
        return self._evaluations.exit_status

    def setServiceParent(self, parent: Any) -> None:
        """Attach to the application and install the log observer."""
        super().setServiceParent(parent)
        if self.log_writer is not None:
            parent.setComponent(ILogObserver, self.log_writer)

    def apply_log_level(self, configuration: Configuration) -> None:
        """Set the lowest level that is logged (`log.level`)."""
        if self.log_writer is not None:
            self.log_writer.level = configuration.log.level

    def privilegedStartService(self) -> None:
        """Open the endpoints and drop all privileges.

        Raises: SystemExit, with a message, if an endpoint cannot be opened.
        """
        log.info(
            "starting tawebeval {version} on Python {python}",
            version=__version__,
            python=platform.python_version(),
        )
        for part in self:
            try:
                part.privilegedStartService()
            except (CannotListenError, OSError, OverflowError, ValueError) as error:
                why = explain_listen_error(error)
                raise SystemExit(f"tawebeval: listen: {part.name}: {why}") from None
        drop_capabilities()

    def startService(self) -> None:
        """Start all parts. Raises: SystemExit, with a message."""
        if self.log_writer is not None:
            self._start_log_thread(self.log_writer.line_writer)
            self.log_writer.on_error_logged = make_error_reporter(os.environ, self._reactor)
        super().startService()
        for part in self._list_listeners():
            if part.endpoint.port is not None:
                page = build_page_url(
                    part.name or "", part.endpoint.port.getHost(), self._site.settings.base_path
                )
                log.info("ready: {page} (page), API at {page}evaluate", page=page)

    def _start_log_thread(self, lines: LineWriter) -> None:
        """Write the log in a thread, and wait for the thread at shutdown only.

        Raises: SystemExit, with a message, if no thread can be started.
        """
        try:
            lines.start()
        except RuntimeError as error:
            raise SystemExit(f"tawebeval: threads: {error}; {PROCESS_LIMIT_REMEDY}") from None
        # Both: after the reactor has stopped, a signal may end the process before atexit runs.
        self._reactor.addSystemEventTrigger("after", "shutdown", lines.stop, _LOG_TIMEOUT)
        atexit.register(lines.stop, _LOG_TIMEOUT)

    def stopService(self) -> Deferred[None]:
        """Drain the evaluations, close the listeners and connections, then stop all other parts."""
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        stop = super().stopService
        self._site.close_idle_connections()
        is_lasting = self._evaluations.evaluations_outlast_daemon
        if is_lasting:
            # Clients that wait get answers now, and repeat their requests: for the next daemon.
            await self._stop_listening()
        # Disowned, because stopping all parts would stop the service a second time.
        if await maybeDeferred(self._evaluations.disownServiceParent):
            await deferLater(self._reactor, _LAST_POLLS)
        await self._stop_listening()
        await self._site.drain_connections(_LASTING_PATIENCE if is_lasting else DRAIN_TIMEOUT)
        await maybeDeferred(stop)

    async def _stop_listening(self) -> None:
        """Close the listening ports; open connections stay."""
        listening = self._list_listeners()
        await gatherResults([maybeDeferred(part.disownServiceParent) for part in listening])

    def _list_listeners(self) -> list[StreamServerEndpointService]:
        return [part for part in self if isinstance(part, StreamServerEndpointService)]


@attrs.define(eq=False, slots=False)
class ShutdownSignals(Service):
    """Handler of SIGTERM and SIGINT: the first stops the daemon, later ones call `on_repeat`.

    Twisted's handlers would call `reactor.stop` again for each signal, which fails with a
    traceback. The handlers stay installed after the service has stopped, until the process ends.
    """

    name = "signals"

    _on_repeat: Callable[[], object]
    _reactor: Any
    _is_stopping: bool = False

    def startService(self) -> None:
        """Handle the signals as soon as the reactor has installed its own handlers."""
        super().startService()
        self._reactor.callWhenRunning(self._install)
        self._reactor.addSystemEventTrigger("before", "shutdown", self._on_shutdown)

    def _install(self) -> None:
        for number in _STOP_SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):  # an ignored signal stays ignored
                signal.signal(number, self._wrap(handler))

    def _wrap(self, handler: _Handler) -> _Handler:
        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._is_stopping:
                self._reactor.callFromThread(self._on_repeat)
            else:
                self._on_shutdown()
                handler(number, frame)

        return on_signal

    def _on_shutdown(self) -> None:
        self._is_stopping = True


def make_periodic_timer(
    calls: Iterable[Callable[[], object]], reactor: Any, period: float = _TIMER_PERIOD
) -> TimerService:
    """Return a service that makes all `calls` every `period` seconds, also after one that fails.

    No call may block.
    """
    calls = tuple(calls)

    def make_calls() -> None:
        for call in calls:
            try:
                call()
            except Exception:  # noqa: BLE001  (a timer that fails once stops for good)
                log.failure("defect: {chore} failed", chore=call.__name__)

    timer = TimerService(period, make_calls)
    timer.clock = reactor
    return timer


@attrs.define
class ThreadPools:
    """The thread pools of the daemon, each for calls that no other kind of calls must delay."""

    _reactor: Any
    pools: list[WorkerThreads] = attrs.field(factory=list)

    def make_pool(self, count: int, name: str, **options: bool) -> WorkerThreads:
        """Return a pool of `count` threads."""
        threads = WorkerThreads.create(self._reactor, count, name, **options)
        self.pools.append(threads)
        return threads

    def make_resolver(self, count: int, name: str) -> SystemResolver:
        """Return a resolver. A silent name server blocks one of its threads for a minute."""
        threads = self.make_pool(count, name, abandons_running_calls=True)
        return SystemResolver(threads, FairQueue(count, running_per_caller=(count + 1) // 2))


def open_starter_and_cgroups(
    configuration: Configuration, directories: DaemonDirectories, cgroups: CgroupManager
) -> tuple[WorkspaceLauncher, CgroupManager, bool]:
    """Return what starts evaluators, their cgroups, and whether they outlive the daemon.

    `cgroups` are those of the daemon; the starter may have those of evaluators.
    """
    launcher, is_lasting = open_starter(configuration, os.environ, directories.state_directory)
    if is_lasting:
        for found in describe_limits_on_starter(configuration, launcher.starter):
            if isinstance(found, SetupProblem):
                log.warn("the starter's {problem}", problem=str(found))
        if launcher.starter.cgroups:
            cgroups = open_starter_cgroups(cgroups, launcher.starter.cgroups)
    # A job of a cluster goes on without the daemon, its starter and srun.
    return launcher, cgroups, is_lasting or configuration.runner.kind == "slurm"


@attrs.frozen
class AssemblyContext:
    """What the functions that build the parts of the daemon share.

    `configuration` is that of the start. `inherited_resources` is what an earlier daemon has left.
    """

    configuration: Configuration
    directories: DaemonDirectories
    reactor: Any
    thread_pools: ThreadPools
    file_tree_threads: WorkerThreads  # they check out, measure and remove trees
    disk_threads: WorkerThreads  # they check and sync disks and directories, any of which may hang
    store: EvaluationStore
    inherited_resources: InheritedResources
    cgroups: CgroupManager
    sandbox: Sandbox  # of this machine


def open_evaluator_sandbox(base: AssemblyContext) -> Sandbox:
    """Return what evaluators run in: the sandbox of this machine, or the nodes of a cluster.

    The jobs of an earlier daemon are cancelled if the runner is no longer the cluster.
    """
    state, runner = base.directories.state_directory, base.configuration.runner
    if runner.kind == "local" and not base.inherited_resources.job_names:
        return base.sandbox
    threads = base.thread_pools.make_pool(1, "slurm", abandons_running_calls=True)
    commands = SlurmCommands(base.reactor, threads, derive_daemon_label(state))
    base.reactor.callWhenRunning(commands.poll_queue)  # for jobs that no evaluation has
    if runner.kind == "local":
        return base.sandbox
    check_shared_directory(base.configuration, state)
    return SlurmSandbox.create(runner, base.sandbox, commands, base.file_tree_threads, base.reactor)


def build_repositories(base: AssemblyContext, keyring: GitKeyring) -> RepositoryCache:
    """Return the cache of repositories, whose fetches hold the rules of `[repositories]`."""
    settings, directories = base.configuration.repositories, base.directories
    policy = HostPolicy(settings.allow_hosts, settings.private_networks)
    remotes = RemoteResolver(
        CheckedResolver(policy, base.thread_pools.make_resolver(12, "servers"), base.reactor),
        (directories.repositories, directories.uploads, directories.evaluations),
        settings.protocols,
    )
    git = GitRunner(
        base.reactor,
        partial(spawn_child, base.reactor),
        settings.protocols,
        settings.memory,
        open_git_sandbox(base.sandbox, directories.sandbox_files_directory),
        base.cgroups.git_procs_files,
        base.cgroups.evaluator_niceness,
    )
    limits = FetchLimits(
        base.reactor,
        timeout=settings.fetch_timeout,
        max_bytes=settings.fetch_bytes,
        tree_limits=TreeLimits(MAX_TREE_FILES, settings.tree_bytes, MAX_SUBMODULES),
    )
    tls_policy = CachedPolicyForHTTPS(BrowserLikePolicyForHTTPS())
    threads = base.file_tree_threads
    lfs = LfsClient(base.reactor, tls_policy, threads, remotes, settings.fetch_timeout)
    return RepositoryCache(
        directories.repositories, git, threads, remotes, limits, keyring, lfs, settings.cache
    )


def build_archive(base: AssemblyContext) -> EvaluationArchive | None:
    """Return the archive of ended evaluations, None unless it is enabled."""
    settings = base.configuration.archive
    if not settings.enabled:
        return None
    return EvaluationArchive(
        base.directories.state_directory / "archive",
        settings,
        # More than the daemon needs to be ready.
        base.configuration.limits.free_disk_for_readiness * 9 // 8,
        base.store,
        base.thread_pools.make_pool(WRITER_THREADS, "archive", abandons_running_calls=True),
        base.thread_pools.make_pool(READER_THREADS, "archived", abandons_running_calls=True),
        format_rfc3339_time,
    )


def build_evaluation_registry(
    base: AssemblyContext, repositories: RepositoryCache, callbacks: CallbackQueue
) -> EvaluationRegistry:
    """Return the registry of evaluations, with its context."""
    configuration = base.configuration
    fetches = configuration.repositories.fetches
    context = EvaluationContext(
        configuration=configuration,
        clock=base.reactor,
        generate_random_bytes=os.urandom,
        worker_threads=base.file_tree_threads,
        checkout_source=repositories,
        sandbox=open_evaluator_sandbox(base),
        limit_monitor=LimitMonitor(
            base.reactor,
            base.thread_pools.make_pool(1, "watch"),
            base.thread_pools.make_pool(2, "count"),
        ),
        # The servers of one caller may be slow, so a caller has half of the slots at most.
        fetch_slots=FairQueue(fetches, running_per_caller=(fetches + 1) // 2),
        event_memory=EventMemory(configuration.buffers.total),
        unread_events_budget=make_unread_events_budget(configuration.buffers.disk),
        store=base.store,
        archive=build_archive(base),
    )
    bounds = (
        resolve_run_slot_count(configuration.evaluations.running),
        configuration.evaluations.queued,
        configuration.callers.running,
        configuration.callers.queued,
    )
    key, name = base.directories.mac_key_content, configuration.service.name
    identities = IdentifierIssuer(key, os.urandom, name)
    return EvaluationRegistry(context, identities, bounds, base.directories.evaluations, callbacks)


def build_application(
    base: AssemblyContext,
    registry: EvaluationRegistry,
    authenticator: Authenticator,
    health_and_metrics: HealthAndMetrics,
) -> KleinApplication:
    """Return the API over HTTP."""
    uploads, key = base.directories.uploads, base.directories.mac_key_content
    receivers = FormReceiverFactory(
        registry, uploads, base.thread_pools.make_pool(8, "upload"), os.urandom
    )
    signer = LinkSigner(key)
    resolver = base.thread_pools.make_resolver(2, "peers")
    return KleinApplication(
        WebContext(
            registry,
            authenticator,
            base.reactor,
            receivers,
            evaluation_lists=make_evaluation_lists(registry, resolver, base.reactor),
            evaluation_links=EvaluationLinks(
                base.store, signer, authenticator, base.reactor, time, os.urandom
            ),
            health_and_metrics=health_and_metrics,
        )
    )


def make_timers(
    base: AssemblyContext, registry: EvaluationRegistry, readiness: Readiness
) -> Sequence[Service]:
    """Return the services that call the parts once in a while."""
    context, directories = registry.context, base.directories
    disk_sync = DiskSync(base.store, directories.state_directory, base.disk_threads, base.reactor)
    chores = (
        registry.expire_evaluations,
        context.cleanup_queue.retry_next_calls,
        readiness.check_disks,
        disk_sync.sync_if_due,
    )
    places = ProbeDirectories(directories.repositories, directories.evaluations)
    reprobe = partial(reprobe_sandbox, base.sandbox, places)  # not by jobs of a cluster
    probe = SandboxProbe(context.counters, reprobe, base.file_tree_threads, base.reactor)
    timers = [
        make_periodic_timer(chores, base.reactor),
        make_periodic_timer((probe.start_probe_if_needed,), base.reactor, SANDBOX_PROBE_PERIOD),
    ]
    if context.archive is not None:
        removal = (context.archive.start_excess_removal,)
        timers.append(make_periodic_timer(removal, base.reactor, _REMOVAL_PERIOD))
    return timers


def build_daemon(
    configuration: Configuration,
    directories: DaemonDirectories,
    reactor: Any,
    cgroups: CgroupManager,
    file: ConfigurationFile | None = None,
    log_writer: LogWriter | None = None,
) -> Daemon:
    """Build the daemon, each part after those that it needs.

    `file` is the configuration file for a reload, which replaces the configuration in the context
    of evaluations; `log_writer` is as for `Daemon`. Raises: ConfigurationError, for an invalid
    endpoint, unreadable tokens or secrets, an exposed endpoint without tokens, or a missing
    sandbox.
    """
    threads = ThreadPools(reactor)
    authenticator = open_authenticator(configuration, reactor)
    store_thread = threads.make_pool(1, "store", abandons_running_calls=True)
    store = EvaluationStore.open(
        directories.state_directory / STORE_FILENAME, store_thread, reactor
    )
    inherited = InheritedResources(store.load_live_rows())
    launcher, cgroups, is_lasting = open_starter_and_cgroups(configuration, directories, cgroups)
    base = AssemblyContext(
        configuration=configuration,
        directories=directories,
        reactor=reactor,
        thread_pools=threads,
        file_tree_threads=threads.make_pool(20, "work"),
        disk_threads=threads.make_pool(4, "check"),
        store=store,
        inherited_resources=inherited,
        cgroups=cgroups,
        sandbox=open_sandbox(configuration, directories.sandbox_files_directory, cgroups, launcher),
    )

    credentials_directory = os.environ.get("CREDENTIALS_DIRECTORY", "")
    credentials = configuration.repositories.credentials
    keyring = GitKeyring(credentials, credentials_directory, directories.mac_key_content)
    repositories = build_repositories(base, keyring)
    receivers = threads.make_resolver(8, "receivers")
    callbacks = make_callback_queue(
        configuration.callbacks, os.environ, receivers, reactor, os.urandom, time
    )
    registry = build_evaluation_registry(base, repositories, callbacks)
    context = registry.context
    disks = [
        DiskCheck("state", directories.evaluations, base.disk_threads, reactor),
        DiskCheck("cache", directories.repositories, base.disk_threads, reactor),
    ]
    min_free_bytes = configuration.limits.free_disk_for_readiness
    readiness = Readiness(registry, context.counters, disks, min_free_bytes)
    collectors = CollectorRegistry()
    health_and_metrics = HealthAndMetrics(
        readiness.find_unreadiness_reasons,
        partial(generate_latest, collectors),
        open_metrics_authenticator(configuration, reactor),
    )
    application = build_application(base, registry, authenticator, health_and_metrics)
    site = ApiSite(application, context, reactor)
    is_permitted = application.is_still_permitted
    authenticator.on_reload.append(partial(site.abort_requests_unless, is_permitted))

    startup = StartupChecks(directories, cgroups, base.sandbox, threads.pools, inherited)
    evaluations = EvaluationService(
        registry, repositories, inherited.rows, directories.uploads, launcher, is_lasting=is_lasting
    )
    daemon = Daemon(startup, evaluations, site, reactor, log_writer)
    reactor_lag = ReactorLag(reactor)
    ProcessCollector(registry=collectors)
    collectors.register(
        DaemonMetrics(
            application=application,
            repository_cache=repositories,
            callback_queue=callbacks,
            site=site,
            reactor_lag=reactor_lag,
            line_writer=log_writer.line_writer if log_writer else None,
        )
    )
    notifier = find_notifier(os.environ)
    sources = (
        ReloadableConfiguration(file or ConfigurationFile(), context, (daemon.apply_log_level,)),
        callbacks,
        authenticator,
        health_and_metrics.metrics_authenticator,
        keyring,
    )
    queue = registry.run_queue
    for service in (
        ReloadService(sources, credentials_directory, notifier, reactor),
        reactor_lag,
        *make_timers(base, registry, readiness),
        *(
            make_listener(endpoint, site, reactor, configuration.http)
            for endpoint in dict.fromkeys(configuration.listen)  # without duplicates
        ),
        Watchdog(
            notifier,
            lambda: (queue.taken_slot_count, queue.waiter_count),
            readiness.find_unreadiness_reasons,
            lambda: compute_stop_timeout(context.configuration),
            reactor,
        ),
    ):
        service.setServiceParent(daemon)
    if authenticator.is_token_optional:
        for problem in find_exposed_endpoints(configuration):
            log.warn("{problem}", problem=str(problem))
    return daemon
