"""What the operator sees of a daemon, put together: metrics, readiness, requests."""

from __future__ import annotations

from functools import partial

import attrs

from tawebeval.access import Access
from tawebeval.admission import Queue
from tawebeval.callbacks import Callbacks
from tawebeval.directories import Directories
from tawebeval.doors import open_readers
from tawebeval.lag import Lag
from tawebeval.metrics import Exposition, Figures
from tawebeval.readiness import Readiness
from tawebeval.registry import Registry
from tawebeval.repositories import Repositories
from tawebeval.retrial import Retrial
from tawebeval.sandboxes import Places, try_again
from tawebeval.surroundings import Surroundings
from tawebeval.web.operations import Operations
from tawebeval.web.site import ApiSite
from tawebeval.web.traffic import Traffic


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
    ) -> Observing:
        """Return what web and services need of it.

        Raises ConfigurationError for tokens of the metrics that cannot be read.
        """
        configuration, clock = surroundings.configuration, surroundings.clock
        readers = open_readers(configuration, clock)
        readiness = Readiness(
            registry,
            surroundings.tally,
            (("state", directories.evaluations), ("cache", directories.repositories)),
            configuration.health.free_disk,
        )
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
        repositories: Repositories,
        queue: Queue,
        registry: Registry,
        callbacks: Callbacks,
        site: ApiSite,
    ) -> None:
        """Have these among the metrics."""
        self._exposition.add(
            Figures(
                surroundings,
                repositories,
                queue,
                registry,
                callbacks,
                self.traffic,
                site.routes,
                site.connections,
                self.lag,
            )
        )
