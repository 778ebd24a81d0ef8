"""Assembly of the daemon: its parts, its tree of services, and what a reload changes of them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import time
from typing import Any

import attrs
from twisted.application.internet import StreamServerEndpointService, TimerService
from twisted.application.service import MultiService, Service
from twisted.application.strports import service
from twisted.internet.defer import Deferred, DeferredQueue, gatherResults, maybeDeferred
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IProtocolFactory
from twisted.internet.task import deferLater
from twisted.logger import ILogObserver, Logger

from tawebeval.config import Configuration, HttpSettings
from tawebeval.config import RepositorySettings as RepositorySettings
from tawebeval.core.budget import Budget
from tawebeval.core.hosts import HostPolicy
from tawebeval.core.identifiers import Identifiers
from tawebeval.daemon.control import ControlSocket, find_socket
from tawebeval.daemon.linewriter import LineWriter
from tawebeval.daemon.logging import LogWriter
from tawebeval.daemon.metrics import DaemonMetrics, Monitoring
from tawebeval.daemon.reload import ConfigurationFile, ConfigurationReload, Reloader
from tawebeval.daemon.runtime import ShutdownSignals, find_unreadable
from tawebeval.daemon.startup import Crew, StartupChecks, find_exposure, open_access
from tawebeval.daemon.state import Directories
from tawebeval.daemon.systemd import Notifier, Watchdog, find_notifier, longest_stop
from tawebeval.deferreds import UNBOUNDED, FairQueue, WorkerThreads, count_slots
from tawebeval.errors import ConfigurationError
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
from tawebeval.linux.reaper import Orphans, become_subreaper
from tawebeval.linux.rlimits import MORE_PROCESSES
from tawebeval.resolver import SystemResolver
from tawebeval.sandbox.base import Sandbox
from tawebeval.sandbox.monitor import LimitMonitor
from tawebeval.sandbox.probe import open_command_sandbox, open_sandbox
from tawebeval.web.auth import Authentication
from tawebeval.web.context import WebContext
from tawebeval.web.routes import KleinApplication, make_site
from tawebeval.web.server.request import ApiSite
from tawebeval.web.server.transport import PromptEndpoint
from tawebeval.webhooks.deliveries import Callbacks, open_callbacks

_CHORES_PERIOD = 1.0  # seconds
_UNREACHABLE = 120.0  # seconds for which a client may be unreachable
_ANSWER = 256 * 1024  # bytes of an answer, for which a slow client has as long as the settings say
_LAST_LINES = 2.0  # seconds for which the end waits for the log
_FAREWELL = 0.5  # seconds in which clients can still fetch the end that the stop has brought
log = Logger()


class EvaluationService(Service):
    """The evaluations' part of the daemon's life: nothing of them outlives it."""

    name = "evaluations"

    def __init__(
        self,
        registry: Registry,
        repositories: RepositoryCache,
        callbacks: Callbacks,
        settings: Configuration,
    ) -> None:
        self._registry = registry
        self._repositories = repositories
        self._callbacks = callbacks
        self._drain = settings.service.drain

    def startService(self) -> None:
        """Take over the cache, and the responsibility for all descendants."""
        become_subreaper()
        self._repositories.load()
        super().startService()

    def stopService(self) -> Deferred[bool]:
        """Let evaluations end, for so many seconds by themselves; tell whether there were any."""
        super().stopService()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> bool:
        self._callbacks.hasten()
        had_any = await self._registry.close(self._drain)
        await self._repositories.close()
        await self._callbacks.close()
        return had_any

    def hurry(self) -> None:
        """Let none of them run any longer."""
        self._registry.stop_now()
        self._callbacks.hurry()


class Daemon(MultiService):
    """All of it, which does not start where it cannot listen, nor as root.

    `log_writer` is what twistd is to log with; without one that is its own affair.
    """

    def __init__(
        self,
        startup: StartupChecks,
        evaluations: EvaluationService,
        site: ApiSite,
        privileges: Privileges,
        reactor: Any,
        log_writer: LogWriter | None = None,
    ) -> None:
        super().__init__()
        self.log_writer = log_writer
        self._site = site
        self._privileges = privileges
        self._evaluations = evaluations
        self._reactor = reactor
        for part in (startup, evaluations, ShutdownSignals(evaluations.hurry, reactor)):
            part.setServiceParent(self)

    def setServiceParent(self, parent: Any) -> None:
        """Belong to the application, and log in the way that is configured."""
        super().setServiceParent(parent)
        if self.log_writer is not None:
            parent.setComponent(ILogObserver, self.log_writer)

    def log_by(self, configuration: Configuration) -> None:
        """Log from the level on that is configured."""
        if self.log_writer is not None:
            self.log_writer.level = configuration.log.level

    def privilegedStartService(self) -> None:
        """Be nobody special and begin to listen; exits with a message where either fails."""
        self._privileges.become_user()
        for part in self:
            try:
                part.privilegedStartService()
            except (CannotListenError, OSError, OverflowError, ValueError) as error:
                raise SystemExit(f"tawebeval: listen: {part.name}: {error}") from None
        self._privileges.drop_privileges()

    def startService(self) -> None:
        """Start all parts, of which some run programs; exits with a message as root."""
        self._privileges.check()
        if self.log_writer is not None:
            self._log_by_thread(self.log_writer.lines)
        for problem in find_unreadable():
            log.warn("{problem}", problem=str(problem))
        super().startService()

    def _log_by_thread(self, lines: LineWriter) -> None:
        """Wait for the log no more, but at the very end; exits with a message without a thread."""
        try:
            lines.start()
        except RuntimeError as error:
            raise SystemExit(f"tawebeval: threads: {error}; {MORE_PROCESSES}") from None
        # Whether the reactor ends, in which case a signal may end the process, or Python does.
        self._reactor.addSystemEventTrigger("after", "shutdown", lines.finish, _LAST_LINES)
        atexit.register(lines.finish, _LAST_LINES)

    def stopService(self) -> Deferred[None]:
        """End the evaluations, let those be told who wait for them, and then all connections."""
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        stop = super().stopService
        self._site.presence.announce()
        # It leaves, for what it waits for would be waited for again when all parts are stopped.
        if await maybeDeferred(self._evaluations.disownServiceParent):
            await deferLater(self._reactor, _FAREWELL)
        await self._stop_listening()
        await self._site.presence.close()
        await maybeDeferred(stop)

    async def _stop_listening(self) -> None:
        """Let nobody connect any more; the rest goes on."""
        listening = [part for part in self if isinstance(part, StreamServerEndpointService)]
        await gatherResults([maybeDeferred(part.disownServiceParent) for part in listening])


@attrs.frozen
class ThreadPools:
    """Threads of the daemon, a pool for each kind of calls that must not wait for another kind."""

    work: WorkerThreads  # checking out, counting, removing
    watch: WorkerThreads  # limits of runs
    count: WorkerThreads  # files of runs that have many
    upload: WorkerThreads  # writing uploads
    check: (
        WorkerThreads  # a trial of each of two disks and a look at the directories, which may hang
    )
    servers: SystemResolver  # git's servers; a silent name server takes a thread for a minute
    receivers: SystemResolver  # receivers of callbacks

    @classmethod
    def open(cls, reactor: Any) -> ThreadPools:
        """Return the pools, not started yet."""
        return cls(
            work=WorkerThreads.create(reactor, 20, "work"),
            watch=WorkerThreads.create(reactor, 1, "watch"),
            count=WorkerThreads.create(reactor, 2, "count"),
            upload=WorkerThreads.create(reactor, 8, "upload"),
            check=WorkerThreads.create(reactor, 3, "check"),
            servers=SystemResolver(WorkerThreads.create(reactor, 12, "servers")),
            receivers=SystemResolver(WorkerThreads.create(reactor, 8, "receivers")),
        )

    def all(self) -> Sequence[Crew]:
        """Return all pools."""
        return attrs.astuple(self, recurse=False)


@attrs.frozen
class Foundation:
    """What the parts of several packages are built on."""

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
    """The parts of a daemon, some of which keep settings that a reload changes."""

    remotes: Remotes
    repositories: RepositoryCache
    surroundings: EvaluationContext
    registry: Registry
    callbacks: Callbacks
    access: Authentication
    monitoring: Monitoring
    application: KleinApplication
    site: ApiSite

    def apply(self, configuration: Configuration) -> None:
        """Put a configuration in force; what has begun keeps its limits."""
        self.surroundings.configuration = configuration
        self.surroundings.sandbox.limits = configuration.limits
        self.remotes.policy = _host_policy(configuration.repositories)
        queue = self.registry.queue
        queue.set_bounds(queue.places, *_queue_bounds(configuration, self.access))
        queue.dispatch()
        self.registry.spool.limit = configuration.limits.uploads
        self.access.rate.per_minute = configuration.callers.requests_per_minute
        self.monitoring.readiness.free = configuration.health.free_disk
        self.monitoring.traffic.logged = configuration.log.access
        self.application.api.configuration = configuration
        self.site.connections.limits = configuration.http

    def make_metrics(self, log_lines: LineWriter | None) -> DaemonMetrics:
        """Return the metrics of the parts, and of the lines of the log if the daemon writes it."""
        return DaemonMetrics(
            self.surroundings,
            self.repositories,
            self.registry,
            self.callbacks,
            self.monitoring.traffic,
            self.application.routes,
            self.site.connections,
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
    """Return the whole daemon, which gives up `privileges` before it runs anything.

    `file` is what a reload reads the configuration from. Raises: ConfigurationError, for an
    invalid endpoint, unreadable tokens and secrets, a daemon that strangers can reach without
    tokens, and a missing sandbox.
    """
    pools, spawn = ThreadPools.open(reactor), Spawner(reactor)
    access = open_access(configuration, reactor)
    orphans = Orphans(reactor, spawn)
    sandbox = open_sandbox(configuration, directories.accounts, cgroups, orphans)
    copies = os.environ.get("CREDENTIALS_DIRECTORY", "")
    keyring = Keyring(configuration.repositories.credentials, copies, directories.key)
    parts = _make_parts(
        Foundation(
            configuration, directories, reactor, cgroups, spawn, pools, access, sandbox, keyring
        )
    )
    registry, repositories, monitoring = parts.registry, parts.repositories, parts.monitoring
    startup = StartupChecks(directories, cgroups, sandbox, pools.all(), pools.check, configuration)
    evaluations = EvaluationService(registry, repositories, parts.callbacks, configuration)
    daemon = Daemon(startup, evaluations, parts.site, privileges, reactor, log_writer)
    lines = log_writer.lines if log_writer else None
    monitoring.metrics.register(parts.make_metrics(lines))
    notifier = find_notifier(os.environ)
    endpoints = dict.fromkeys(configuration.listen)  # each of them once
    takers = (parts.apply, daemon.log_by)
    reload = ConfigurationReload(file or ConfigurationFile(), configuration, takers)
    sources = (reload, parts.callbacks, access, monitoring.readers, keyring)
    reloader = Reloader(sources, copies, notifier, reactor)
    chores = (
        *(registry.expire, orphans.reap, startup.mend, parts.surroundings.cleanups.retry_next),
        *(repositories.note_uses, repositories.maintain, monitoring.readiness.check),
    )
    for part in (
        *_reload_services(reloader, reactor),
        *(monitoring.lag, monitoring.probe, call_each_second(chores, reactor)),
        *(listen(endpoint, parts.site, reactor, configuration.http) for endpoint in endpoints),
        _make_watchdog(notifier, parts, reactor),
    ):
        part.setServiceParent(daemon)
    if access.open:
        for problem in find_exposure(configuration):
            log.warn("{problem}", problem=str(problem))
    return daemon


def _make_parts(base: Foundation) -> Parts:
    configuration, directories, reactor = base.configuration, base.directories, base.reactor
    running = count_slots(configuration.evaluations.running)
    remotes = _make_remotes(base)
    repositories = _make_repositories(base, remotes)
    surroundings = _make_surroundings(base, repositories, running)
    callbacks = open_callbacks(
        *(configuration.callbacks, os.environ, base.pools.receivers, reactor, os.urandom, time),
        alone=base.access.open,
    )
    slots = (running, *_queue_bounds(configuration, base.access))
    identities = Identifiers(directories.key, os.urandom, configuration.service.name)
    registry = Registry(surroundings, identities, slots, directories.evaluations, callbacks)
    monitoring = Monitoring.open(directories, registry, surroundings, base.pools.check)
    application = _make_application(base, registry, monitoring)
    return Parts(
        remotes,
        repositories,
        surroundings,
        registry,
        callbacks,
        base.access,
        monitoring,
        application,
        make_site(application, reactor),
    )


def _make_remotes(base: Foundation) -> Remotes:
    directories = base.directories
    return Remotes(
        _host_policy(base.configuration.repositories),
        base.pools.servers,
        base.reactor,
        (directories.repositories, directories.uploads, directories.evaluations),
    )


def _make_repositories(base: Foundation, remotes: Remotes) -> RepositoryCache:
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


def _make_surroundings(
    base: Foundation, repositories: RepositoryCache, running: int
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
        # One caller, whose servers may be slow, has half of the slots at most.
        fetch_slots=FairQueue(fetches, UNBOUNDED, 0 if base.access.open else (fetches + 1) // 2),
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
    base: Foundation, registry: Registry, monitoring: Monitoring
) -> KleinApplication:
    api = WebContext(
        registry,
        base.configuration,
        base.directories.uploads,
        os.urandom,
        base.access,
        base.reactor,
        base.pools.upload,
        monitoring.operations,
        monitoring.traffic,
    )
    return KleinApplication(api)


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
        lambda: longest_stop(parts.surroundings.configuration),
        reactor,
    )


def _queue_bounds(configuration: Configuration, access: Authentication) -> tuple[int, int, int]:
    """Return how many may wait, and of one caller how many may run and wait; 0 is no limit."""
    callers, queued = configuration.callers, configuration.evaluations.queued
    return (queued, 0, 0) if access.open else (queued, callers.running, callers.queued)


def _host_policy(settings: RepositorySettings) -> HostPolicy:
    return HostPolicy(settings.allow_hosts, settings.deny_hosts, settings.private_networks)


def listen(
    endpoint: str, factory: IProtocolFactory, reactor: Any, settings: HttpSettings
) -> StreamServerEndpointService:
    """Return a service that listens at an endpoint.

    Its start raises what the endpoint raises. Raises: ConfigurationError, for an invalid endpoint.
    """
    try:
        listening = service(endpoint, factory, reactor=reactor)
    except LookupError:  # only of systemd's are some there, and others not
        raise ConfigurationError(
            f"listen: {endpoint!r}: there is no such socket from systemd; let a unit open it, as"
            ' tawebeval.socket does, or listen without: ["tcp:8080:interface=127.0.0.1"]'
        ) from None
    except (ValueError, TypeError, OSError) as error:
        raise ConfigurationError(f"listen: {endpoint!r} is no endpoint: {error}") from None
    # To the kernel a client that takes nothing is one that says nothing.
    silence = max(_UNREACHABLE, settings.window + _ANSWER / settings.rate)
    listening.endpoint = PromptEndpoint(listening.endpoint, silence)
    listening.setName(endpoint)
    return listening


def call_each_second(chores: Iterable[Callable[[], object]], reactor: Any) -> TimerService:
    """Return a service that makes all calls once a second, also those after one that fails.

    None of the calls may block.
    """
    chores = tuple(chores)

    def do_all() -> None:
        for chore in chores:
            try:
                chore()
            except Exception:  # noqa: BLE001  (a timer that fails once stops for good)
                log.failure("{chore} failed", chore=chore.__name__)

    timer = TimerService(_CHORES_PERIOD, do_all)
    timer.clock = reactor
    return timer
