"""What the operator sees of a daemon, put together: metrics, readiness, requests."""

from __future__ import annotations

from functools import partial

import attrs

from tawebeval.daemon.health import Disk, Readiness
from tawebeval.daemon.lag import Lag
from tawebeval.daemon.logging import LogWriter
from tawebeval.daemon.metrics import Exposition, Figures
from tawebeval.daemon.retrial import Retrial
from tawebeval.daemon.startup import open_readers
from tawebeval.daemon.state import Directories
from tawebeval.deferreds import Threads
from tawebeval.evaluations.context import Surroundings
from tawebeval.evaluations.registry import Registry
from tawebeval.git.cache import RepositoryCache
from tawebeval.sandbox.probe import Places, try_again
from tawebeval.web.access_log import Routes, Traffic
from tawebeval.web.auth import Access
from tawebeval.web.context import Operations
from tawebeval.web.server.limits import Connections
from tawebeval.webhooks.deliveries import Callbacks


@attrs.frozen
class Observing:
    """What is counted apart from the work itself, and who is told."""

    traffic: Traffic
    lag: Lag
    retrial: Retrial
    readers: Access | None
    readiness: Readiness
    operations: Operations
    _exposition: Exposition

    @classmethod
    def begin(
        cls,
        directories: Directories,
        registry: Registry,
        surroundings: Surroundings,
        checking: Threads,
    ) -> Observing:
        """Return what web and services need of it; the threads `checking` try the disks.

        Raises ConfigurationError for tokens of the metrics that cannot be read.
        """
        configuration, clock = surroundings.configuration, surroundings.clock
        readers = open_readers(configuration, clock)
        disks = [
            Disk(name, path, checking, clock)
            for name, path in (
                ("state", directories.evaluations),
                ("cache", directories.repositories),
            )
        ]
        readiness = Readiness(registry, surroundings.tally, disks, configuration.health.free_disk)
        places = Places(directories.repositories, directories.evaluations)
        trial = partial(try_again, surroundings.sandbox, places)
        exposition = Exposition()
        return cls(
            Traffic(configuration.log.access),
            Lag(clock),
            Retrial(surroundings.tally, trial, surroundings.threads, clock),
            readers,
            readiness,
            Operations(readiness.obstacles, exposition.render, readers),
            exposition,
        )

    def show(
        self,
        surroundings: Surroundings,
        repositories: RepositoryCache,
        registry: Registry,
        callbacks: Callbacks,
        routes: Routes,
        connections: Connections,
        log_writer: LogWriter | None,
    ) -> None:
        """Have these among the metrics."""
        self._exposition.add(
            Figures(
                surroundings,
                repositories,
                registry.queue,
                registry,
                callbacks,
                self.traffic,
                routes,
                connections,
                self.lag,
                log_writer.lines if log_writer else None,
            )
        )
