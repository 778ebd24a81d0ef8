"""Prometheus metrics of the daemon, its process and the reactor, collected on request."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import attrs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from tawebeval import __version__
from tawebeval.core.states import State
from tawebeval.core.tally import SHORT_BOUNDS, Histogram
from tawebeval.daemon.health import Disk, Readiness, SandboxProbe
from tawebeval.daemon.linewriter import LineWriter
from tawebeval.daemon.startup import open_metrics_access
from tawebeval.daemon.state import Directories
from tawebeval.deferreds import WorkerThreads
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.registry import Registry
from tawebeval.git.cache import RepositoryCache
from tawebeval.sandbox.probe import ProbeDirectories, probe_again
from tawebeval.web.access_log import RequestLog, Routes
from tawebeval.web.auth import Authentication
from tawebeval.web.context import Operations
from tawebeval.web.server.limits import ConnectionLimits
from tawebeval.webhooks.callback import CallbackState
from tawebeval.webhooks.deliveries import Callbacks

_LAG_PERIOD = 0.5  # seconds
_DESCRIPTORS = Path("/proc/self/fd")

_FORGOTTEN = (State.DRAINED, State.EXPIRED)
_DELIVERY_ENDS = (CallbackState.DELIVERED, CallbackState.REFUSED, CallbackState.GIVEN_UP)
_ALARMING = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)


@attrs.frozen
class Monitoring:
    """Metrics, readiness and access log of a daemon."""

    metrics: CollectorRegistry
    request_log: RequestLog
    lag: ReactorLag
    probe: SandboxProbe
    readers: Authentication | None
    readiness: Readiness
    operations: Operations

    @classmethod
    def create(
        cls,
        directories: Directories,
        registry: Registry,
        context: EvaluationContext,
        disk_threads: WorkerThreads,
    ) -> Monitoring:
        """Create the parts, with the process metrics registered; `DaemonMetrics` are not yet.

        `disk_threads` check the disks. Raises: ConfigurationError, if the tokens in
        `metrics.tokens` cannot be read.
        """
        configuration, clock = context.configuration, context.clock
        metrics = CollectorRegistry()
        metrics.register(ProcessMetrics())
        readers = open_metrics_access(configuration, clock)
        disks = [
            Disk("state", directories.evaluations, disk_threads, clock),
            Disk("cache", directories.repositories, disk_threads, clock),
        ]
        readiness = Readiness(registry, context.tally, disks, configuration.health.free_disk)
        places = ProbeDirectories(directories.repositories, directories.evaluations)
        probe_sandbox = partial(probe_again, context.sandbox, places)
        return cls(
            metrics,
            RequestLog(configuration.log.access),
            ReactorLag(clock),
            SandboxProbe(context.tally, probe_sandbox, context.threads, clock),
            readers,
            readiness,
            Operations(readiness.find_obstacles, partial(generate_latest, metrics), readers),
        )


@attrs.frozen(eq=False)
class DaemonMetrics(Collector):
    """Collector of the daemon's metrics. `log_lines` is None if twistd writes the log."""

    context: EvaluationContext
    repositories: RepositoryCache
    registry: Registry
    callbacks: Callbacks
    request_log: RequestLog
    routes: Routes
    connections: ConnectionLimits
    lag: ReactorLag
    log_lines: LineWriter | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield _gauge("info", "The version that runs.", {__version__: 1}, "version")
        yield from self._collect_evaluations()
        yield from self._collect_queue()
        yield from self._collect_buffers()
        yield from self._collect_cache()
        yield from self._collect_web()
        yield from self._collect_callbacks()
        lost = 0 if self.log_lines is None else self.log_lines.lost
        yield _counter("log_events_lost", "Events that the log did not take.", lost)
        children = self.context.spawn.running
        yield _gauge("child_processes", "Evaluators and git commands.", children)
        yield _histogram(
            "reactor_lag_seconds",
            "How late the reactor is, looked at twice a second.",
            self.lag.seconds,
        )

    def _collect_evaluations(self) -> Iterator[Metric]:
        tally = self.context.tally
        known = {state: tally.states[state] for state in State if state not in _FORGOTTEN}
        forgotten = {state: tally.states[state] for state in _FORGOTTEN}
        yield _counter("evaluations_accepted", "Forms that were accepted.", tally.accepted)
        yield _gauge("evaluations", "Evaluations that are known, by their state.", known, "state")
        yield _counter(
            "evaluations_ended",
            "Ends of evaluations, by the reason of a bad one.",
            tally.ended,
            "state",
            "reason",
        )
        yield _counter(
            "evaluations_forgotten",
            "Read to the end (drained), or not (expired).",
            forgotten,
            "fate",
        )
        yield _histogram(
            "stage_seconds",
            "How long evaluations were queued, fetching, running.",
            tally.durations,
            "stage",
        )

    def _collect_queue(self) -> Iterator[Metric]:
        queue, limit = self.registry.queue, self.context.configuration.evaluations.queued
        yield _gauge("queue_length", "Evaluations that wait.", queue.waiting)
        yield _gauge("queue_limit", "Evaluations that may wait.", limit)
        yield _gauge("places_taken", "Places to run that are taken.", queue.running)
        yield _gauge("places", "Places to run.", queue.slots)
        fetches = self.context.fetch_slots
        yield _gauge("fetches_running", "Evaluations that are fetched.", fetches.running)
        yield _gauge("fetches_waiting", "Evaluations that wait for that.", fetches.waiting)

    def _collect_buffers(self) -> Iterator[Metric]:
        settings = self.context.configuration
        spool, budget = self.registry.spool, self.context.budget
        said = "Events in memory, with what is kept of forms and stderr."
        yield _gauge("buffered_bytes", said, budget.used)
        yield _gauge("buffered_limit_bytes", "What they may take.", settings.buffers.total)
        said = "Evaluators that wait for their readers."
        yield _gauge("paused_evaluators", said, budget.waiting)
        yield _gauge("uploaded_bytes", "Uploads on the disk.", spool.stored)
        said = "Uploads on their way to the disk."
        yield _gauge("unwritten_upload_bytes", said, spool.in_memory)
        yield _gauge("uploaded_limit_bytes", "What they may take.", settings.limits.uploads)

    def _collect_cache(self) -> Iterator[Metric]:
        tally, limit = self.repositories.tally, self.context.configuration.repositories.cache
        said = "What was in the cache (hit), or was not (miss)."
        yield _counter("cache_lookups", said, tally.lookups, "of", "result")
        yield _counter("fetches", "Ends of fetches.", tally.fetches, "end")
        yield _histogram("fetch_seconds", "How long fetches took.", tally.durations)
        yield _counter("cache_evictions", "Repositories that had to go.", tally.evictions)
        yield _gauge("cache_bytes", "The cache on the disk.", self.repositories.sizes, "of")
        yield _gauge("cache_limit_bytes", "What they may take.", limit)

    def _collect_web(self) -> Iterator[Metric]:
        answers = {
            (*known, str(int(status))): 0
            for known in self.routes.list_all()
            for status in _ALARMING
        }
        for (method, route, status), number in self.request_log.count_answers().items():
            answers[method, route, str(status)] = number
        yield _counter(
            "requests", "Requests that were answered.", answers, "method", "route", "status"
        )
        yield _histogram(
            "request_seconds",
            "From a whole request to its whole answer, if that was not to wait.",
            self.request_log.seconds,
            "route",
        )
        limit = self.context.configuration.http.connections
        yield _gauge("connections", "Connections that are open.", self.connections.total)
        yield _gauge("connections_limit", "Connections that may be.", limit)
        yield _gauge("streams", "Streams of events.", len(self.registry.subscriptions))

    def _collect_callbacks(self) -> Iterator[Metric]:
        ended = {state.value: self.callbacks.ended[state] for state in _DELIVERY_ENDS}
        yield _counter("callbacks", "Ends of callbacks.", ended, "end")
        yield _gauge("callbacks_pending", "Callbacks on their way.", self.callbacks.pending)


def _gauge(name: str, help_: str, samples: float | Mapping[Any, float], *labels: str) -> Metric:
    return _fill(GaugeMetricFamily(f"tawebeval_{name}", help_, labels=labels), samples)


def _counter(name: str, help_: str, samples: float | Mapping[Any, float], *labels: str) -> Metric:
    return _fill(CounterMetricFamily(f"tawebeval_{name}", help_, labels=labels), samples)


def _histogram(
    name: str, help_: str, samples: Histogram | Mapping[Any, Histogram], *labels: str
) -> Metric:
    return _fill(HistogramMetricFamily(f"tawebeval_{name}", help_, labels=labels), samples)


def _fill(family: Any, samples: Any) -> Metric:
    """Add samples to a family: a value, or values by label or by tuple of labels."""
    metric: Metric = family
    for labels, value in (samples if isinstance(samples, Mapping) else {(): samples}).items():
        values = (labels,) if isinstance(labels, str) else labels
        if isinstance(value, Histogram):
            *finite, (_, total) = value.list_buckets()
            buckets = [*((f"{bound:g}", count) for bound, count in finite), ("+Inf", total)]
            family.add_metric(values, buckets, value.sum)
        else:
            family.add_metric(values, value)
    return metric


@attrs.frozen(eq=False)
class ProcessMetrics(Collector):
    """Collector of process metrics, under the names of Prometheus's client libraries.

    The library's own collector lists all descriptors, which blocks the reactor if there are
    thousands. Since Linux 6.2 the kernel tells their number. `started` is in seconds since the
    epoch.
    """

    _descriptors: Callable[[], int] = attrs.field(default=lambda: count_descriptors(_DESCRIPTORS))
    _started: float = attrs.field(factory=time.time)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        page = resource.getpagesize()
        virtual, resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[:2]
        yield CounterMetricFamily(
            "process_cpu_seconds", "Processor time.", used.ru_utime + used.ru_stime
        )
        for name, help_, value in (
            ("open_fds", "File descriptors that are open.", self._descriptors()),
            ("max_fds", "File descriptors that may be.", limit),
            ("virtual_memory_bytes", "Memory, with what is not there yet.", int(virtual) * page),
            ("resident_memory_bytes", "Memory that is there.", int(resident) * page),
            ("start_time_seconds", "When it was started, since the epoch.", self._started),
        ):
            yield GaugeMetricFamily(f"process_{name}", help_, value)


def count_descriptors(directory: Path) -> int:
    """Return the number of open descriptors by a directory such as `/proc/self/fd`."""
    # Before Linux 6.2 the size is 0.
    return directory.stat().st_size or len(os.listdir(directory))


@attrs.define(eq=False, slots=False)
class ReactorLag(Service):
    """Measurement, twice a second, of the delay of reactor calls, in `seconds`."""

    name = "lag"

    _clock: IReactorTime
    seconds: Histogram = attrs.field(factory=lambda: Histogram(SHORT_BOUNDS))
    _next: IDelayedCall | None = None

    def startService(self) -> None:
        """Start measuring."""
        super().startService()
        self._schedule()

    def stopService(self) -> None:
        """Stop measuring."""
        super().stopService()
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _schedule(self) -> None:
        due = self._clock.seconds() + _LAG_PERIOD
        self._next = self._clock.callLater(_LAG_PERIOD, self._measure, due)

    def _measure(self, due: float) -> None:
        self.seconds.observe(max(0.0, self._clock.seconds() - due))
        self._schedule()
