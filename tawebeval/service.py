"""The daemon put together: from configuration and directories to services that listen."""

from __future__ import annotations

import os
from typing import Any

from twisted.application.internet import TimerService
from twisted.application.service import IService, MultiService, Service
from twisted.application.strports import service as listening
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from tawebeval.admission import Queue
from tawebeval.config import Configuration
from tawebeval.directories import Directories
from tawebeval.evaluation import Surroundings
from tawebeval.git import Git
from tawebeval.identity import Identities
from tawebeval.orphans import Orphans, become_subreaper
from tawebeval.process import Spawner
from tawebeval.registry import Registry
from tawebeval.repositories import Repositories
from tawebeval.sandbox import NoSandbox
from tawebeval.signals import Threads
from tawebeval.web.api import Api
from tawebeval.web.routes import make_app
from tawebeval.web.site import ApiSite

_EXPIRE = 1.0  # seconds between two looks for abandoned evaluations

log = Logger()


class EvaluationService(Service):
    """The evaluations' part of the daemon's life: nothing of them outlives it."""

    name = "evaluations"

    def __init__(self, registry: Registry, repositories: Repositories) -> None:
        self._registry = registry
        self._repositories = repositories

    def startService(self) -> None:
        """Take over the cache, and the responsibility for all descendants."""
        become_subreaper()
        self._repositories.load()
        super().startService()

    def stopService(self) -> Deferred[None]:
        """End all evaluations, and wait for that."""
        super().stopService()
        return Deferred.fromCoroutine(self._registry.close())


def make_service(
    configuration: Configuration, directories: Directories, reactor: Any
) -> MultiService:
    """Return the whole daemon. Raises ValueError for an endpoint that cannot be understood."""
    threads = Threads(reactor, reactor.getThreadPool())
    spawn = Spawner(reactor)
    repositories = Repositories(
        directories.repositories,
        Git(reactor, spawn, configuration.repositories.protocols),
        threads,
        capacity=configuration.repositories.cache,
        timeout=configuration.repositories.fetch_timeout,
    )
    surroundings = Surroundings(
        configuration=configuration,
        clock=reactor,
        random=os.urandom,
        threads=threads,
        spawn=spawn,
        orphans=Orphans(reactor, spawn),
        repositories=repositories,
        sandbox=NoSandbox(),
    )
    running = configuration.evaluations.running or len(os.sched_getaffinity(0))
    registry = Registry(
        surroundings,
        Identities(directories.key, os.urandom),
        Queue(running, configuration.evaluations.queued),
        directories.evaluations,
    )
    api = Api(registry, configuration, directories.uploads, threads, os.urandom)
    site = ApiSite(make_app(api), api, reactor)
    service = MultiService()
    parts: list[IService] = [
        EvaluationService(registry, repositories),
        TimerService(_EXPIRE, registry.expire),
        *(listening(description, site, reactor=reactor) for description in configuration.listen),
    ]
    for part in parts:
        part.setServiceParent(service)
    return service
