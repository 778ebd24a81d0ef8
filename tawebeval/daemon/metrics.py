"""Prometheus metrics, collected on request, and readiness.

Readiness is that of admission and disks, and of the sandbox: one that has failed is probed again.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, get_args

import attrs
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from tawebeval import __version__
from tawebeval.archive.archive import UnarchivedReason
from tawebeval.core.evaluations import (
    SHORT_DURATION_BUCKETS,
    EvaluationCounters,
    EvaluationState,
    Histogram,
)
from tawebeval.daemon.logging import LineWriter
from tawebeval.deferreds import WorkerThreads, run_in_background
from tawebeval.errors import ServerBusy, SetupProblem, format_size
from tawebeval.evaluations.service import EvaluationRegistry
from tawebeval.git.cache import RepositoryCache
from tawebeval.linux.filetree import is_disk_full_error
from tawebeval.slurm.commands import JobCounters
from tawebeval.slurm.job import SlurmSandbox
from tawebeval.web.routes import KleinApplication
from tawebeval.web.server.channel import ApiSite
from tawebeval.webhooks.deliveries import CallbackQueue
from tawebeval.webhooks.records import CallbackState

DISK_CHECK_PERIOD = 5.0
"""Seconds between two checks of a disk that works."""

DISK_CHECK_TIMEOUT = 5.0
"""Seconds that a check of a disk may take."""

SANDBOX_PROBE_PERIOD = 10.0
"""Seconds between two probes of a sandbox that has failed."""

DISK_PROBE_CONTENT = b"tawebeval\n"

_LAG_PERIOD = 0.5  # seconds
_FORGOTTEN = (EvaluationState.DRAINED, EvaluationState.EXPIRED)
_DELIVERY_ENDS = (CallbackState.DELIVERED, CallbackState.REFUSED, CallbackState.GIVEN_UP)
_ALARMING = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)

log = Logger()


@attrs.define(eq=False)
class DiskCheck:
    """The file system of the directory `path`, checked by one thread at a time."""

    name: str
    path: Path
    _threads: WorkerThreads
    _clock: IReactorTime
    _fault: str | None = None
    _started: float | None = None  # clock time at which the running check started
    _next_check: float = 0.0  # clock time of the next check

    def start_check_if_due(self, min_free_bytes: int) -> None:
        """Start a check if one is due; with a fault, one is due at each call.

        `min_free_bytes` must be free.
        """
        now = self._clock.seconds()
        if self._started is None and (self._fault is not None or now >= self._next_check):
            self._started, self._next_check = now, now + DISK_CHECK_PERIOD
            what = "defect: a disk could not be checked"
            run_in_background(self._run_check(min_free_bytes), log, what)

    async def _run_check(self, min_free_bytes: int) -> None:
        try:
            self._fault = await self._threads.run_in_thread(
                find_disk_fault, self.path, min_free_bytes
            )
        finally:
            self._started = None

    @property
    def fault(self) -> str | None:
        """The fault, as the predicate of a sentence about the disk; None if it works."""
        if self._started is not None and self._clock.seconds() - self._started > DISK_CHECK_TIMEOUT:
            return f"hangs: writing a small file took over {DISK_CHECK_TIMEOUT:g} seconds"
        return self._fault


@attrs.define
class Readiness:
    """Readiness for new evaluations: admission, and `min_free_bytes` bytes on each of the disks."""

    _registry: EvaluationRegistry
    _tally: EvaluationCounters
    _disks: Sequence[DiskCheck]
    min_free_bytes: int

    def check_disks(self) -> None:
        """Check the disks that are due. To be called once a second."""
        for disk in self._disks:
            disk.start_check_if_due(self.min_free_bytes)

    def find_unreadiness_reasons(self) -> list[str]:
        """Return the reasons why a new evaluation would be refused or lost, as sentences.

        Anonymous clients may read them: they contain no paths and no names of callers.
        """
        found = []
        try:
            self._registry.check_readiness()
        except ServerBusy as error:
            found.append(error.detail)
        found += [
            f"the file system of the {disk.name} {disk.fault}"
            for disk in self._disks
            if disk.fault is not None
        ]
        store = self._registry.context.store
        if store is not None and store.write_failure_reason is not None:
            found.append("evaluations cannot be stored; see the log")
        if self._tally.latest_machine_fault is not None:
            _, what = self._tally.latest_machine_fault
            found.append(f"the last evaluation was lost: {what}")
        return found


@attrs.define(eq=False)
class SandboxProbe:
    """Probe of the sandbox, repeated while the last evaluation has failed because of the daemon.

    `probe_sandbox` blocks and returns the problem, or None. Without the probe a daemon behind a
    proxy would never become ready again: the proxy sends evaluations to ready daemons only.
    """

    _tally: EvaluationCounters
    _probe_sandbox: Callable[[], SetupProblem | None]
    _threads: WorkerThreads
    _clock: IReactorTime
    _last_problem: SetupProblem | None = None
    _is_running: bool = False

    def start_probe_if_needed(self) -> None:
        """Start a probe. To be called every `SANDBOX_PROBE_PERIOD` seconds."""
        fault = self._tally.latest_machine_fault
        if fault is not None and not self._is_running:
            self._is_running = True
            run_in_background(self._probe(fault), log, "defect: the sandbox could not be probed")

    async def _probe(self, fault: tuple[float, str]) -> None:
        try:
            problem = await self._threads.run_in_thread(self._probe_sandbox)
        except OSError as error:
            log.warn("the sandbox could not be probed: {error}", error=error)
            return
        finally:
            self._is_running = False
        if self._tally.latest_machine_fault is not fault:
            return  # an evaluation has ended meanwhile: its result is newer
        if problem is None:
            log.info(
                "the sandbox works again; evaluations were lost because: {fault}", fault=fault[1]
            )
            self._tally.set_latest_machine_fault(None, self._clock.seconds())
        elif problem != self._last_problem:
            what, remedy = problem
            log.warn("the sandbox does not work: {what}; {remedy}", what=what, remedy=remedy)
        self._last_problem = problem


def find_disk_fault(path: Path, min_free_bytes: int) -> str | None:
    """Return the fault of a file system, None if it works and has `min_free_bytes` left. Blocks."""
    try:
        status = os.statvfs(path)
    except FileNotFoundError:
        return "cannot be used: its directory was removed; restart the daemon"
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    # File systems without a fixed number of inodes report 0 of 0.
    full = status.f_files > 0 and status.f_favail == 0
    full = full or status.f_bavail * status.f_frsize < min_free_bytes
    try:
        probe_disk_write(path)
    except OSError as error:
        if not is_disk_full_error(error):
            return f"cannot be written to: {error.strerror}"
        full = True
    if not full:
        return None
    least = format_size(min_free_bytes)
    return f"has less than {least} free (twice limits.free_disk), or no free inode"


def probe_disk_write(directory: Path) -> None:
    """Write a small unnamed file and read it back. Blocks. Raises: OSError.

    statvfs(3) does not always show that the kernel has shut a file system down after an error.
    """
    with TemporaryFile(dir=directory, buffering=0) as file:
        file.write(DISK_PROBE_CONTENT)
        file.seek(0)
        if file.read() != DISK_PROBE_CONTENT:
            raise OSError(errno.EIO, "the bytes read back differ from those written")


@attrs.frozen(eq=False)
class DaemonMetrics(Collector):
    """Collector of the daemon's metrics.

    `line_writer` is None if twistd writes the log.
    """

    application: KleinApplication
    repository_cache: RepositoryCache
    callback_queue: CallbackQueue
    site: ApiSite
    reactor_lag: ReactorLag
    line_writer: LineWriter | None = None

    @property
    def _registry(self) -> EvaluationRegistry:
        return self.application.context.registry

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield _gauge("info", "The version that runs.", {__version__: 1}, "version")
        find_reasons = self.application.context.health_and_metrics.find_unreadiness_reasons
        ready = 0 if find_reasons() else 1
        yield _gauge("ready", "Whether the daemon takes work, as /health/ready says.", ready)
        lost = 0 if self.line_writer is None else self.line_writer.lost_lines
        yield _counter("log_events_lost", "Events that the log did not take.", lost)
        said = "How late the reactor is, looked at twice a second."
        yield _histogram("reactor_lag_seconds", said, self.reactor_lag.delays)
        yield from self._collect_evaluations()
        yield from self._collect_sizes()
        yield from self._collect_web()
        yield from self._collect_archive_and_jobs()

    def _collect_evaluations(self) -> Iterator[Metric]:
        context, queue = self._registry.context, self._registry.run_queue
        tally, fetches = context.counters, context.fetch_slots
        counts = tally.counts_by_state
        known = {state: counts[state] for state in EvaluationState if state not in _FORGOTTEN}
        yield _counter("evaluations_accepted", "Forms that were accepted.", tally.admitted_count)
        yield _gauge("evaluations", "Evaluations that are known, by their state.", known, "state")
        said, ended = "Ends, by the reason of a bad one.", tally.ended_counts_by_state_and_reason
        yield _counter("evaluations_ended", said, ended, "state", "reason")
        said = "How long evaluations were queued, fetching, running."
        yield _histogram("stage_seconds", said, tally.durations_by_state, "stage")
        yield _gauge("queue_length", "Evaluations that wait.", queue.waiter_count)
        limit = context.configuration.evaluations.queued
        yield _gauge("queue_limit", "Evaluations that may wait.", limit)
        yield _gauge("places_taken", "Places to run that are taken.", queue.taken_slot_count)
        yield _gauge("places", "Places to run.", queue.slot_count)
        yield _gauge("fetches_running", "Evaluations that are fetched.", fetches.taken_slot_count)
        yield _gauge("fetches_waiting", "Evaluations that wait for that.", fetches.waiter_count)
        cache = self.repository_cache.counters
        yield _counter("fetches", "Ends of fetches.", cache.fetch_counts, "end")
        yield _histogram("fetch_seconds", "How long fetches took.", cache.fetch_durations)
        callbacks = self.callback_queue
        outcomes = {state.value: callbacks.ended_counts_by_state[state] for state in _DELIVERY_ENDS}
        yield _counter("callbacks", "Ends of callbacks.", outcomes, "end")
        yield _gauge("callbacks_pending", "Callbacks on their way.", callbacks.pending_count)

    def _collect_sizes(self) -> Iterator[Metric]:
        """Yield the bytes in memory and on the disk, each with its limit."""
        context, uploads = self._registry.context, self._registry.submissions.budget
        settings, may = context.configuration, "What they may take."
        yield _gauge("buffered_bytes", "Events in memory.", context.event_memory.budget.used)
        yield _gauge("buffered_limit_bytes", may, settings.buffers.total)
        yield _gauge("event_disk_bytes", "Events on the disk.", context.unread_events_budget.used)
        yield _gauge("event_disk_limit_bytes", may, settings.buffers.disk)
        yield _gauge("uploaded_bytes", "Uploads on the disk.", uploads.used)
        yield _gauge("uploaded_limit_bytes", may, settings.limits.uploads)
        sizes = self.repository_cache.disk_bytes_by_kind
        yield _gauge("cache_bytes", "The cache on the disk.", sizes, "of")
        yield _gauge("cache_limit_bytes", may, settings.repositories.cache)

    def _collect_web(self) -> Iterator[Metric]:
        answers = {
            (*known, str(int(status))): 0
            for known in self.application.list_routes()
            for status in _ALARMING
        }
        request_log = self.site.request_log
        for (method, route, status), number in request_log.response_counts.items():
            answers[method, route, str(status)] = number
        yield _counter(
            "requests", "Requests that were answered.", answers, "method", "route", "status"
        )
        yield _histogram(
            "request_seconds",
            "From a whole request to its whole answer, if that was not to wait.",
            request_log.response_durations,
            "route",
        )
        limit = self._registry.context.configuration.http.connections
        yield _gauge("connections", "Connections that are open.", self.site.connection_count)
        yield _gauge("connections_limit", "Connections that may be.", limit)
        yield _gauge("streams", "Streams of events.", len(self._registry.events.subscriptions))

    def _collect_archive_and_jobs(self) -> Iterator[Metric]:
        archive = self._registry.context.archive
        losses = dict.fromkeys(get_args(UnarchivedReason), 0)
        if archive is not None:
            losses.update(archive.unarchived_counts_by_reason)
        done = archive.archival_count if archive else 0
        yield _counter("archived", "Evaluations that were archived.", done)
        yield _counter("not_archived", "Evaluations that were not.", losses, "reason")
        count = archive.evaluation_count if archive else 0
        yield _gauge("archive_evaluations", "Evaluations in the archive.", count)
        size = archive.total_bytes if archive else 0
        yield _gauge("archive_bytes", "The archive on the disk.", size)
        limit = archive.settings.size if archive else 0
        yield _gauge("archive_limit_bytes", "What they may take.", limit)
        runner = self._registry.context.sandbox
        jobs = runner.commands.counters if isinstance(runner, SlurmSandbox) else JobCounters()
        said = "Jobs that ended without the evaluator's end."
        yield _counter("cluster_jobs_lost", said, jobs.lost_jobs_by_reason, "reason")
        said = "Jobs in place of those that were lost before the evaluator printed anything."
        yield _counter("cluster_jobs_repeated", said, jobs.restarted_jobs)
        said = "Whether the cluster's controller does not answer."
        yield _gauge("cluster_unreachable", said, jobs.is_controller_unreachable)


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


@attrs.define(eq=False, slots=False)
class ReactorLag(Service):
    """Measurement, twice a second, of the delay of reactor calls, in `delays`."""

    name = "lag"

    _clock: IReactorTime
    _read_clock: Callable[[], float] = time.monotonic  # that of the reactor leaves pauses out
    delays: Histogram = attrs.field(factory=lambda: Histogram(SHORT_DURATION_BUCKETS))
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
        due = self._read_clock() + _LAG_PERIOD
        self._next = self._clock.callLater(_LAG_PERIOD, self._measure, due)

    def _measure(self, due: float) -> None:
        self.delays.record_value(max(0.0, self._read_clock() - due))
        self._schedule()
