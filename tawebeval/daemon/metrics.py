"""What the daemon counts, as Prometheus reads it: gathered from all parts when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus

import attrs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tawebeval import __version__
from tawebeval.admission import Queue
from tawebeval.core.states import State
from tawebeval.core.tally import Histogram
from tawebeval.daemon.lag import Lag
from tawebeval.daemon.linewriter import LineWriter
from tawebeval.daemon.vitals import Vitals
from tawebeval.evaluations.context import Surroundings
from tawebeval.evaluations.registry import Registry
from tawebeval.git.cache import RepositoryCache
from tawebeval.web.access_log import Routes, Traffic
from tawebeval.web.server.limits import Connections
from tawebeval.webhooks.callback import CallbackState
from tawebeval.webhooks.deliveries import Callbacks

_PREFIX = "tawebeval_"
_FORGOTTEN = (State.DRAINED, State.EXPIRED)
_ENDS = (CallbackState.DELIVERED, CallbackState.REFUSED, CallbackState.GIVEN_UP)

# Statuses by which the daemon says that something is wrong with it.
_ALARMING = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)

Samples = Iterable[tuple[tuple[str, ...], float]]
"""The values of a metric by those of its labels."""


@attrs.frozen(eq=False)
class Figures(Collector):
    """Reads the parts of a daemon."""

    surroundings: Surroundings
    repositories: RepositoryCache
    queue: Queue
    registry: Registry
    callbacks: Callbacks
    traffic: Traffic
    routes: Routes
    connections: Connections
    lag: Lag
    log_lines: LineWriter | None = None

    def describe(self) -> list[Metric]:
        """Return nothing: what there is shows when it is collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all of it."""
        yield _gauge("info", "The version that runs.", [((__version__,), 1)], "version")
        yield from self._evaluations()
        yield from self._queue()
        yield from self._buffers()
        yield from self._cache()
        yield from self._web()
        yield from self._callbacks()
        lost = 0 if self.log_lines is None else self.log_lines.lost
        yield _counter("log_events_lost", "Events that the log did not take.", one(lost))
        yield _gauge(
            "child_processes", "Evaluators and git commands.", one(self.surroundings.spawn.running)
        )
        yield _histogram(
            "reactor_lag_seconds",
            "How late the reactor is, looked at twice a second.",
            {(): self.lag.seconds},
        )

    def _evaluations(self) -> Iterator[Metric]:
        tally = self.surroundings.tally
        yield _counter("evaluations_accepted", "Forms that were accepted.", one(tally.accepted))
        yield _gauge(
            "evaluations",
            "Evaluations that are known, by their state.",
            [((state,), tally.states[state]) for state in State if state not in _FORGOTTEN],
            "state",
        )
        yield _counter(
            "evaluations_ended",
            "Ends of evaluations, by the reason of a bad one.",
            tally.ended.items(),
            "state",
            "reason",
        )
        yield _counter(
            "evaluations_forgotten",
            "Read to the end (drained), or not (expired).",
            [((fate,), tally.states[fate]) for fate in _FORGOTTEN],
            "fate",
        )
        yield _histogram(
            "stage_seconds",
            "How long evaluations were queued, fetching, running.",
            {(state,): seconds for state, seconds in tally.stages.items()},
            "stage",
        )

    def _queue(self) -> Iterator[Metric]:
        settings = self.surroundings.configuration.evaluations
        yield _gauge("queue_length", "Evaluations that wait.", one(self.queue.waiting))
        yield _gauge("queue_limit", "Evaluations that may wait.", one(settings.queued))
        yield _gauge("places_taken", "Places to run that are taken.", one(self.queue.running))
        yield _gauge("places", "Places to run.", one(self.queue.places))
        fetches = self.surroundings.fetches
        yield _gauge("fetches_running", "Evaluations that are fetched.", one(fetches.running))
        yield _gauge("fetches_waiting", "Evaluations that wait for that.", one(fetches.waiting))

    def _buffers(self) -> Iterator[Metric]:
        settings = self.surroundings.configuration
        spool, budget = self.registry.spool, self.surroundings.budget
        said = "Events in memory, with what is kept of forms and stderr."
        yield _gauge("buffered_bytes", said, one(budget.used))
        yield _gauge("buffered_limit_bytes", "What they may take.", one(settings.buffers.total))
        yield _gauge(
            "paused_evaluators", "Evaluators that wait for their readers.", one(budget.waiting)
        )
        yield _gauge("uploaded_bytes", "Uploads on the disk.", one(spool.held))
        yield _gauge(
            "unwritten_upload_bytes", "Uploads on their way to the disk.", one(spool.in_memory)
        )
        yield _gauge("uploaded_limit_bytes", "What they may take.", one(settings.limits.uploads))

    def _cache(self) -> Iterator[Metric]:
        tally = self.repositories.tally
        yield _counter(
            "cache_lookups",
            "What was in the cache (hit), or was not (miss).",
            tally.lookups.items(),
            "of",
            "result",
        )
        yield _counter(
            "fetches",
            "Ends of fetches.",
            [((end,), number) for end, number in tally.fetches.items()],
            "end",
        )
        yield _histogram("fetch_seconds", "How long fetches took.", {(): tally.seconds})
        yield _counter("cache_evictions", "Repositories that had to go.", one(tally.evictions))
        yield _gauge(
            "cache_bytes",
            "The cache on the disk.",
            [((what,), size) for what, size in self.repositories.sizes.items()],
            "of",
        )
        limit = self.surroundings.configuration.repositories.cache
        yield _gauge("cache_limit_bytes", "What they may take.", one(limit))

    def _web(self) -> Iterator[Metric]:
        answered = {
            (method, route, int(status)): 0
            for method, route in self.routes.known()
            for status in _ALARMING
        }
        yield _counter(
            "requests",
            "Requests that were answered.",
            [
                ((method, route, str(status)), number)
                for (method, route, status), number in {
                    **answered,
                    **self.traffic.counted(),
                }.items()
            ],
            "method",
            "route",
            "status",
        )
        yield _histogram(
            "request_seconds",
            "From a whole request to its whole answer, if that was not to wait.",
            {(route,): seconds for route, seconds in self.traffic.seconds.items()},
            "route",
        )
        yield _gauge("connections", "Connections that are open.", one(self.connections.total))
        limit = self.surroundings.configuration.http.connections
        yield _gauge("connections_limit", "Connections that may be.", one(limit))
        yield _gauge("streams", "Streams of events.", one(len(self.registry.followers)))

    def _callbacks(self) -> Iterator[Metric]:
        ended, pending = self.callbacks.ended, self.callbacks.pending
        yield _counter(
            "callbacks",
            "Ends of callbacks.",
            [((state.value,), ended[state]) for state in _ENDS],
            "end",
        )
        yield _gauge("callbacks_pending", "Callbacks on their way.", one(pending))


def one(value: float) -> Samples:
    """Return the only sample of a metric without labels."""
    return [((), value)]


def _gauge(name: str, help_: str, samples: Samples, *labels: str) -> Metric:
    return _with(GaugeMetricFamily(_PREFIX + name, help_, labels=labels), samples)


def _counter(name: str, help_: str, samples: Samples, *labels: str) -> Metric:
    return _with(CounterMetricFamily(_PREFIX + name, help_, labels=labels), samples)


def _with(
    family: GaugeMetricFamily | CounterMetricFamily, samples: Samples
) -> GaugeMetricFamily | CounterMetricFamily:
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _histogram(
    name: str, help_: str, histograms: Mapping[tuple[str, ...], Histogram], *labels: str
) -> Metric:
    family = HistogramMetricFamily(_PREFIX + name, help_, labels=labels)
    for values, histogram in histograms.items():
        buckets = [
            ("+Inf" if bound == float("inf") else f"{bound:g}", count)
            for bound, count in histogram.cumulative()
        ]
        family.add_metric(values, buckets, histogram.sum)
    return family


@attrs.frozen
class Exposition:
    """The figures of a daemon and of its process, as text. Those of the daemon are added to it."""

    _registry: CollectorRegistry = attrs.field(factory=CollectorRegistry)

    def __attrs_post_init__(self) -> None:
        self._registry.register(Vitals())

    def add(self, figures: Figures) -> None:
        """Have the figures of a daemon among them."""
        self._registry.register(figures)

    def render(self) -> bytes:
        """Return all of it in the text format, version 0.0.4."""
        return generate_latest(self._registry)
