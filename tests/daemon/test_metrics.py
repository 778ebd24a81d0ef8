"""`daemon.metrics`: what Prometheus reads, and what in `etc` and the documents relies on it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import __version__
from tawebeval.daemon.metrics import DaemonMetrics, ReactorLag
from tawebeval.webhooks.records import CallbackState
from tests.cases.web import WebTestCase

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "etc" / "grafana-dashboard.json"
ALERTS = ROOT / "etc" / "prometheus-alerts.yml"
OPERATE = ROOT / "docs" / "operate.md"

# A metric, and the labels by which some of its series are meant.
_METRIC = re.compile(r"\b((?:tawebeval|process)_[a-z_]+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)=(~?)\"([^\"]*)\"")
_BY = re.compile(r"by \(([\w, ]+)\)")
_GROWTH = re.compile(r"\b(?:increase|rate)\((tawebeval_[a-z_]+)(?:\{([^}]*)\})?\[")
_LEGEND = re.compile(r"\{\{(\w+)\}\}")

# What Prometheus adds by itself.
_ADDED = frozenset({"job", "instance"})

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def family(name: str) -> str:
    """Return the metric that a series belongs to."""
    return re.sub(r"_(bucket|count|sum)$", "", name)


class MetricsTestCase(WebTestCase):
    callbacks: Any = SimpleNamespace(pending_count=0, ended_counts_by_state=Counter())

    def setUp(self) -> None:
        super().setUp()
        self.lag = ReactorLag(self.service.reactor, self.service.reactor.seconds)
        self.obstacles: list[str] = []
        self.metrics = CollectorRegistry()
        ProcessCollector(registry=self.metrics)
        self.service.context.health_and_metrics.find_unreadiness_reasons = lambda: self.obstacles
        self.metrics.register(
            DaemonMetrics(
                self.service.application,
                self.service.world.repositories,  # type: ignore[arg-type]
                self.callbacks,
                self.service.site,
                self.lag,
            )
        )

    def series(self) -> Series:
        families = text_string_to_metric_families(generate_latest(self.metrics).decode())
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self.series()[f"tawebeval_{name}", tuple(sorted(labels.items()))]


class MetricsTests(MetricsTestCase):
    def test_evaluations_are_counted_by_state_place_and_queue(self) -> None:
        self.service.world.repositories.gate.shut = True
        for _ in range(4):
            self.evaluate()
        self.assertEqual(self.value("evaluations_accepted_total"), 4)
        self.assertEqual(self.value("evaluations", state="fetching"), 2)
        self.assertEqual(self.value("evaluations", state="queued"), 2)
        self.assertEqual((self.value("queue_length"), self.value("queue_limit")), (2, 1000))
        self.assertEqual((self.value("places_taken"), self.value("places")), (2, 2))
        self.assertEqual((self.value("fetches_running"), self.value("fetches_waiting")), (0, 0))
        self.service.reactor.advance(5)
        self.service.world.repositories.gate.open()
        self.service.world.turn()
        self.assertEqual(self.value("stage_seconds_count", stage="fetching"), 2)
        self.assertEqual(self.value("stage_seconds_sum", stage="fetching"), 10)
        self.assertEqual(self.value("stage_seconds_bucket", stage="fetching", le="3"), 0)
        self.assertEqual(self.value("stage_seconds_bucket", stage="fetching", le="10"), 2)
        first, second = self.service.world.spawn.children
        first.end(3)
        second.end()
        self.service.world.turn()
        self.assertEqual(self.value("evaluations_ended_total", state="failed", reason="exit"), 1)
        self.assertEqual(self.value("evaluations_ended_total", state="finished", reason=""), 1)
        self.assertEqual(self.value("evaluations", state="finished"), 1)

    def test_buffered_and_uploaded_bytes_are_shown_with_their_limits(self) -> None:
        self.evaluate()
        self.assertGreater(self.value("uploaded_bytes"), 0)
        self.assertEqual(self.value("buffered_bytes"), 0)
        self.child.print(b"x" * 9000 + b"\n")
        self.service.world.turn()
        self.assertGreater(self.value("buffered_bytes"), 9000)
        self.assertGreater(self.value("event_disk_bytes"), 9000)
        settings = self.configuration
        self.assertEqual(self.value("event_disk_limit_bytes"), settings.buffers.disk)
        self.assertEqual(self.value("buffered_limit_bytes"), settings.buffers.total)
        self.assertEqual(self.value("uploaded_limit_bytes"), settings.limits.uploads)

    def test_fetches_and_cache_sizes_are_shown(self) -> None:
        repositories = self.service.world.repositories
        repositories.disk_bytes_by_kind = {"repositories": 77, "checkouts": 88}
        tally = repositories.counters
        tally.fetch_counts.update(fetched=2, failed=1, cancelled=3)
        tally.fetch_durations.record_value(2.0)
        ends = [self.value("fetches_total", end=end) for end in ("fetched", "failed", "cancelled")]
        self.assertEqual(ends, [2, 1, 3])
        self.assertEqual(self.value("fetch_seconds_sum"), 2)
        self.assertEqual(self.value("cache_bytes", of="repositories"), 77)
        self.assertEqual(self.value("cache_bytes", of="checkouts"), 88)
        limit = self.configuration.repositories.cache
        self.assertEqual(self.value("cache_limit_bytes"), limit)

    def test_requests_connections_and_streams_are_shown(self) -> None:
        self.request("GET", "/health")
        identifier = self.evaluate()
        connection = self.connect()
        head = f"GET /evaluation/{identifier}/events HTTP/1.1\r\nHost: a\r\n"
        connection.send(f"{head}Accept: application/jsonl\r\n\r\n".encode())
        connection.settle()
        answered = {"method": "GET", "route": "/health", "status": "200"}
        self.assertEqual(self.value("requests_total", **answered), 1)
        self.assertEqual(self.value("request_seconds_count", route="/health"), 1)
        self.assertEqual(self.value("streams"), 1)
        self.assertEqual(self.value("connections"), self.service.site.connection_count)
        self.assertGreater(self.value("connections"), 0)
        self.assertEqual(self.value("connections_limit"), self.configuration.http.connections)
        connection.lose()
        self.assertEqual(self.value("streams"), 0)

    def test_outcomes_of_callbacks_are_shown(self) -> None:
        states = CallbackState.DELIVERED, CallbackState.REFUSED, CallbackState.GIVEN_UP
        counts = dict(zip(states, (5, 2, 1), strict=True))
        self.patch(self.callbacks, "pending_count", 3)
        self.patch(self.callbacks, "ended_counts_by_state", counts)
        names = ("delivered", "refused", "given_up")
        ends = [self.value("callbacks_total", end=end) for end in names]
        self.assertEqual(ends, [5, 2, 1])
        self.assertEqual(self.value("callbacks_pending"), 3)

    def test_process_reactor_lag_and_version_are_shown(self) -> None:
        self.lag.delays.record_value(0.2)
        series = self.series()
        for name in ("open_fds", "max_fds", "resident_memory_bytes", "cpu_seconds_total"):
            self.assertGreater(series[f"process_{name}", ()], 0)
        self.assertEqual(self.value("reactor_lag_seconds_sum"), 0.2)
        self.assertEqual(self.value("info", version=__version__), 1)


class FirstEventTests(MetricsTestCase):
    def test_counters_of_alerts_begin_with_0(self) -> None:
        series, selected = self.series(), 0
        for name, selectors in _GROWTH.findall(ALERTS.read_text()):
            wanted = {
                label: re.compile(value if is_pattern else re.escape(value))
                for label, is_pattern, value in _LABEL.findall(selectors)
            }
            found = {
                number
                for (own, labels), number in series.items()
                if own == name
                and all(wanted[each].fullmatch(dict(labels).get(each, "")) for each in wanted)
            }
            self.assertEqual(found, {0}, (name, selectors))
            selected += bool(wanted)
        self.assertGreater(selected, 3)

    def test_metric_of_ends_has_each_possible_end_from_the_start(self) -> None:
        before = self.ends()
        self.assertEqual(set(before.values()), {0})
        self.evaluate()
        self.finish(3)
        Deferred.fromCoroutine(self.service.registry.cancel_evaluation(self.evaluate()))
        self.finish()
        after = self.ends()
        self.assertEqual(set(after), set(before))
        self.assertEqual(sum(after.values()), 2)

    def ends(self) -> Series:
        return {
            each: number
            for each, number in self.series().items()
            if each[0] == "tawebeval_evaluations_ended_total"
        }


class RelianceTests(MetricsTestCase):
    """The dashboard, the alerts and the documents, held against what there really is."""

    def setUp(self) -> None:
        super().setUp()
        for status in (0, 3):
            self.evaluate()
            self.finish(status)
        self.request("GET", "/health")
        self.labels: dict[str, set[str]] = {}
        for name, labels in self.series():
            self.labels.setdefault(name, set()).update(label for label, _ in labels)

    def check_query(self, query: str) -> None:
        """Hold that a query is of metrics and labels that there are."""
        found = _METRIC.findall(query)
        known = set()
        for name, selected in found:
            self.assertIn(name, self.labels, query)
            known |= self.labels[name]
            for label, *_ in _LABEL.findall(selected):
                self.assertIn(label, self.labels[name] | _ADDED, query)
        for labels in _BY.findall(query):
            self.assertLessEqual(set(labels.split(", ")), known | _ADDED, query)

    def families(self) -> set[str]:
        """Return our metrics, of which a histogram is one."""
        return {family(name) for name in self.labels if name.startswith("tawebeval_")}

    def panels(self) -> Iterator[dict[str, Any]]:
        yield from json.loads(DASHBOARD.read_text())["panels"]

    def test_queries_and_legends_of_the_dashboard_have_their_metrics(self) -> None:
        queries = 0
        for panel in self.panels():
            for target in panel["targets"]:
                queries += 1
                self.check_query(target["expr"])
                metrics = {name for name, _ in _METRIC.findall(target["expr"])}
                self.assertTrue(metrics, target)
                for label in _LEGEND.findall(target["legendFormat"]):
                    self.assertTrue(any(label in self.labels[name] for name in metrics), target)
        self.assertGreater(queries, len(list(self.panels())))

    def test_dashboard_has_all_metrics_and_no_two_panels_in_one_place(self) -> None:
        shown = {name for name, _ in _METRIC.findall(DASHBOARD.read_text())}
        self.assertEqual(self.families() - set(map(family, shown)), set())
        taken: set[tuple[int, int]] = set()
        for panel in self.panels():
            at = panel["gridPos"]
            places = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            self.assertFalse(places & taken, panel["title"])
            self.assertLessEqual(at["x"] + at["w"], 24)
            taken |= places

    def test_each_alert_has_its_metrics_and_its_remedy(self) -> None:
        text = ALERTS.read_text()
        alerts = re.findall(r"- alert: (\w+)\n +expr: ((?:.|\n)*?)\n +(?:for|annotations):", text)
        self.assertEqual(len(alerts), text.count("- alert:"))
        for _, query in alerts:
            self.check_query(" ".join(query.split()))
            self.assertTrue(_METRIC.findall(query) or query.startswith("up{"), query)
        self.assertEqual(len(re.findall(r"\n +description: \"\w", text)), len(alerts))

    def test_documents_name_existing_metrics(self) -> None:
        told = set(re.findall(r"\btawebeval_[a-z_]+\b", OPERATE.read_text()))
        self.assertGreater(len(told), 2)
        self.assertLessEqual(told, self.families())


class LagTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.lag = ReactorLag(self.clock, self.clock.seconds)

    @property
    def looks(self) -> int:
        return list(self.lag.delays.list_buckets())[-1][1]

    def test_reactor_lag_is_the_delay_of_a_call_each_half_second(self) -> None:
        self.lag.startService()
        self.clock.pump([0.5] * 4)
        self.assertEqual((self.looks, self.lag.delays.sum), (4, 0))
        self.clock.advance(2.0)
        self.assertEqual((self.looks, self.lag.delays.sum), (5, 1.5))
        self.clock.rightNow = -10.0  # a clock that is put back
        call: Any
        (call,) = self.clock.getDelayedCalls()
        call.func(*call.args)
        self.assertEqual((self.looks, self.lag.delays.sum), (6, 1.5))
        self.lag.stopService()
        ReactorLag(self.clock).stopService()  # also if it never began
