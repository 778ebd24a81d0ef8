"""The daemon put together: from configuration and directories to services that listen."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import Any

from twisted.application.internet import StreamServerEndpointService
from twisted.application.service import MultiService, Service
from twisted.internet.defer import Deferred, DeferredQueue, gatherResults, maybeDeferred
from twisted.internet.error import CannotListenError
from twisted.internet.task import deferLater
from twisted.logger import ILogObserver, Logger

from tawebeval.admission import UNBOUNDED, Queue, count_places
from tawebeval.config import Configuration
from tawebeval.core.budget import Budget
from tawebeval.core.identifiers import Identities
from tawebeval.daemon.adapting import Adapting, bounds, host_policy
from tawebeval.daemon.control import TakingOrders, find_socket
from tawebeval.daemon.housekeeping import keep_house
from tawebeval.daemon.interrupts import Interrupts
from tawebeval.daemon.linewriter import LineWriter
from tawebeval.daemon.listening import listen
from tawebeval.daemon.logging import LogWriter
from tawebeval.daemon.observing import Observing
from tawebeval.daemon.preload import find_unreadable
from tawebeval.daemon.reconfiguring import ConfigurationFile, Reconfiguring
from tawebeval.daemon.reload import Reloading
from tawebeval.daemon.reporting import Reporting, longest_stop
from tawebeval.daemon.startup import StartupChecks, find_exposure, open_access
from tawebeval.daemon.state import Directories
from tawebeval.daemon.systemd import find_supervisor
from tawebeval.deferreds import Threads
from tawebeval.evaluations.context import Surroundings
from tawebeval.evaluations.registry import Registry
from tawebeval.evaluations.telling import Telling
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
from tawebeval.sandbox.monitor import Watch
from tawebeval.sandbox.probe import open_box, open_sandbox
from tawebeval.web.context import Api
from tawebeval.web.routes import KleinApplication, make_site
from tawebeval.web.server.request import ApiSite
from tawebeval.webhooks.deliveries import Callbacks, open_callbacks

_LAST_LINES = 2.0  # seconds for which the end waits for the log
_FAREWELL = 0.5  # seconds in which clients can still fetch the end that the stop has brought
_COUNTS = 2  # runs with many files whose files are counted at the same time
_THREADS = 20  # for what blocks: checking out, counting, removing
_CHECKS = 3  # for a trial of each of two disks, and for a look at the directories, which may hang
_UPLOADS = 8  # for writing what is uploaded; a slow disk is in the way of nothing else
_LOOKUPS = 12  # threads to look up git's servers; a silent name server takes one for a minute
_CALLBACK_LOOKUPS = 8  # threads to look up receivers of callbacks

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
        self._registry.hurry()
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
        for part in (startup, evaluations, Interrupts(evaluations.hurry, reactor)):
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
        self._privileges.step_down()
        for part in self:
            try:
                part.privilegedStartService()
            except (CannotListenError, OSError, OverflowError, ValueError) as error:
                raise SystemExit(f"tawebeval: listen: {part.name}: {error}") from None
        self._privileges.renounce()

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


def make_service(
    configuration: Configuration,
    directories: Directories,
    reactor: Any,
    privileges: Privileges,
    cgroups: Cgroups,
    file: ConfigurationFile | None = None,
    log_writer: LogWriter | None = None,
) -> Daemon:
    """Return the whole daemon, which has given up `privileges` before it runs anything.

    A reload reads the `file` again from which the configuration is. It logs by `log_writer`.
    Raises ConfigurationError for what is no endpoint, for tokens and secrets that cannot be read,
    where strangers could reach a daemon without tokens, and without a sandbox.
    """
    access = open_access(configuration, reactor)
    threads = Threads.own(reactor, _THREADS, "work")
    watching = Threads.own(reactor, 1, "watch")  # so that limits wait for nobody's work
    counting = Threads.own(reactor, _COUNTS, "count")
    uploading = Threads.own(reactor, _UPLOADS, "upload")
    checking = Threads.own(reactor, _CHECKS, "check")
    spawn = Spawner(reactor)
    servers = SystemResolver(Threads.own(reactor, _LOOKUPS, "servers"))
    receivers = SystemResolver(Threads.own(reactor, _CALLBACK_LOOKUPS, "receivers"))
    settings = configuration.repositories
    orphans = Orphans(reactor, spawn)
    sandbox = open_sandbox(configuration, directories.accounts, cgroups, orphans)
    copies = os.environ.get("CREDENTIALS_DIRECTORY", "")
    keyring = Keyring(settings.credentials, copies, directories.key)
    remotes = Remotes(
        host_policy(settings),
        servers,
        reactor,
        (directories.repositories, directories.uploads, directories.evaluations),
    )
    repositories = RepositoryCache(
        directories.repositories,
        Git(
            reactor,
            spawn,
            settings.protocols,
            settings.memory,
            open_box(sandbox, directories.accounts),
            cgroups.git_entry,
            cgroups.niceness,
        ),
        threads,
        remotes,
        FetchLimits(
            reactor,
            timeout=settings.fetch_timeout,
            size=settings.fetch_bytes,
            tree=TreeLimits(settings.tree_files, settings.tree_bytes),
        ),
        keyring,
        capacity=settings.cache,
    )
    running = count_places(configuration.evaluations.running)
    surroundings = Surroundings(
        configuration=configuration,
        clock=reactor,
        random=os.urandom,
        threads=threads,
        spawn=spawn,
        repositories=repositories,
        sandbox=sandbox,
        watch=Watch(reactor, watching, counting),
        # Half of the places at most are one caller's, whose servers may be slow.
        fetches=Queue(
            settings.fetches, UNBOUNDED, 0 if access.open else (settings.fetches + 1) // 2
        ),
        budget=Budget(
            configuration.buffers.total,
            configuration.buffers.evaluation,
            running,
            lambda call: reactor.callLater(0, call),
            configuration.callers.buffers,
        ),
        quota_directories=_queue(directories.quotas) if directories.quotas else None,
    )
    callbacks = open_callbacks(
        *(configuration.callbacks, os.environ, receivers, reactor, os.urandom, time),
        alone=access.open,
    )
    registry = Registry(
        surroundings,
        Identities(directories.key, os.urandom, configuration.service.name),
        (running, *bounds(configuration, access)),
        directories.evaluations,
        Telling(callbacks),
    )
    observing = Observing.begin(directories, registry, surroundings, checking)
    api = Api(
        registry,
        configuration,
        directories.uploads,
        os.urandom,
        access,
        reactor,
        uploading,
        observing.operations,
        observing.traffic,
    )
    application = KleinApplication(api)
    site = make_site(application, reactor)
    observing.show(
        *(surroundings, repositories, registry, callbacks, application.routes, site.connections),
        log_writer,
    )
    crews = (threads, watching, counting, uploading, checking, servers, receivers)
    startup = StartupChecks(directories, cgroups, sandbox, crews, checking, configuration)
    evaluations = EvaluationService(registry, repositories, callbacks, configuration)
    daemon = Daemon(startup, evaluations, site, privileges, reactor, log_writer)
    supervisor = find_supervisor(os.environ)
    adapting = Adapting(
        *(surroundings, remotes, registry, access, observing, api), site.connections
    )
    takers = (adapting.take, daemon.log_by)
    reconfiguring = Reconfiguring(file or ConfigurationFile(), configuration, takers)
    sources = (reconfiguring, callbacks, access, observing.readers, keyring)
    reloading = Reloading(sources, copies, supervisor, reactor)
    reloading.setServiceParent(daemon)
    orders = find_socket(os.environ)
    if orders is not None:
        TakingOrders(orders, reloading.reload, reactor).setServiceParent(daemon)
    for part in (observing.lag, observing.retrial):
        part.setServiceParent(daemon)
    chores = (
        *(registry.expire, orphans.reap, startup.mend, surroundings.arrears.settle),
        *(repositories.note_uses, repositories.maintain, observing.readiness.look),
    )
    keep_house(chores, reactor).setServiceParent(daemon)
    for endpoint in dict.fromkeys(configuration.listen):
        listen(endpoint, site, reactor, configuration.http).setServiceParent(daemon)
    if access.open:
        for problem in find_exposure(configuration):
            log.warn("{problem}", problem=str(problem))
    Reporting(
        supervisor,
        lambda: (registry.queue.running, registry.queue.waiting),
        observing.operations.obstacles,
        lambda: longest_stop(surroundings.configuration),
        reactor,
    ).setServiceParent(daemon)
    return daemon


def _queue(directories: Sequence[Path]) -> DeferredQueue[Path]:
    """Return a queue of all quota directories."""
    queue: DeferredQueue[Path] = DeferredQueue()
    for directory in directories:
        queue.put(directory)
    return queue
