"""Those who keep a setting of their own are told of another one."""

from __future__ import annotations

import attrs

from tawebeval.config import Configuration, Repositories
from tawebeval.core.hosts import HostPolicy
from tawebeval.daemon.observing import Observing
from tawebeval.evaluations.context import Surroundings
from tawebeval.evaluations.registry import Registry
from tawebeval.git.remotes import Remotes
from tawebeval.web.auth import Access
from tawebeval.web.context import Api
from tawebeval.web.server.limits import Connections


@attrs.frozen
class Adapting:
    """Has a configuration hold from now on: what has begun keeps the limits that it began with."""

    surroundings: Surroundings
    remotes: Remotes
    registry: Registry
    access: Access
    observing: Observing
    api: Api
    connections: Connections

    def take(self, configuration: Configuration) -> None:
        """Tell all of them."""
        self.surroundings.configuration = configuration
        self.surroundings.sandbox.limits = configuration.limits
        self.remotes.policy = host_policy(configuration.repositories)
        queue = self.registry.queue
        queue.bound(queue.places, *bounds(configuration, self.access))
        queue.go_on()
        self.registry.spool.limit = configuration.limits.uploads
        self.access.rate.per_minute = configuration.callers.requests_per_minute
        self.observing.readiness.free = configuration.health.free_disk
        self.observing.traffic.logged = configuration.log.access
        self.api.configuration = configuration
        self.connections.limits = configuration.http


def bounds(configuration: Configuration, access: Access) -> tuple[int, int, int]:
    """Return how many may wait, and of one caller how many may run and wait: 0 is no limit."""
    callers, queued = configuration.callers, configuration.evaluations.queued
    return (queued, 0, 0) if access.open else (queued, callers.running, callers.queued)


def host_policy(settings: Repositories) -> HostPolicy:
    """Return from where may be fetched."""
    return HostPolicy(settings.allow_hosts, settings.deny_hosts, settings.private_networks)
