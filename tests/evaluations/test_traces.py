"""`evaluations.traces`: spans, their identifiers over a restart, and no cost without them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any
from unittest.mock import patch

import attrs
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.evaluations import traces
from tawebeval.evaluations.service import EvaluationRegistry
from tawebeval.evaluations.store import pack_row
from tawebeval.evaluations.traces import EvaluationTracer, open_tracer
from tawebeval.linux.filetree import remove_tree
from tests.cases.evaluations import CANCELLED, EvaluationTestCase
from tests.evaluations.test_restoring import RestoringTestCase
from tests.fakes.archive import FakeArchive
from tests.fakes.world import EPOCH, OID

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
ALL_MODULES = """
import importlib, pkgutil, sys
import tawebeval
for found in pkgutil.walk_packages(tawebeval.__path__, "tawebeval."):
    importlib.import_module(found.name)
from tawebeval.evaluations.traces import open_tracer
assert open_tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": "", "OTEL_SERVICE_NAME": "x"}) is None
assert open_tracer({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "x"}) is None
assert open_tracer({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}) is None
print([name for name in sys.modules if name.startswith(("opentelemetry", "sentry_sdk"))])
"""


def make_tracer(exporter: Any) -> EvaluationTracer:
    """Return a tracer that exports each span at once."""
    return EvaluationTracer(SimpleSpanProcessor(exporter))


def times(span: ReadableSpan) -> tuple[float, float]:
    """Return when a span has begun and ended, in seconds of the test's Clock."""
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9 - EPOCH, span.end_time / 1e9 - EPOCH


class TraceTests(RestoringTestCase):
    running, queued = 1, 5

    def setUp(self) -> None:
        self.exporter = InMemorySpanExporter()
        super().setUp()

    def make(self, seed: int = 1) -> EvaluationRegistry:
        registry = super().make(seed)
        registry.context.tracer = make_tracer(self.exporter)
        return registry

    def begin(self, *headers: bytes, **changes: Any) -> tuple[str, tuple[str, str]]:
        """Begin an evaluation; return its identifier and its trace."""
        assert self.registry.context.tracer is not None
        trace = self.registry.context.tracer.begin_trace(headers)
        return self.registry.accept_form(self.upload(**changes), trace=trace), trace

    def spans(self) -> dict[str, ReadableSpan]:
        spans = self.exporter.get_finished_spans()
        self.assertEqual(len({span.name for span in spans}), len(spans), spans)
        return {span.name: span for span in spans}

    def assert_family(self, trace: tuple[str, str], *children: str) -> ReadableSpan:
        """Hold that the spans are these, with the identifiers of the trace; return the first."""
        spans = self.spans()
        root = spans.pop("evaluation")
        identifiers = (
            f"{format_trace_id(root.context.trace_id)}-{format_span_id(root.context.span_id)}"
        )
        self.assertEqual(trace[0][3:-3], identifiers)
        self.assertEqual(sorted(spans), sorted(children))
        self.assertEqual(len({span.context.span_id for span in spans.values()}), len(children))
        self.assertNotIn(root.context.span_id, {span.context.span_id for span in spans.values()})
        for span in spans.values():
            self.assertEqual(span.context.trace_id, root.context.trace_id)
            assert span.parent is not None
            self.assertEqual(span.parent.span_id, root.context.span_id)
        return root

    def test_evaluation_span_is_child_of_the_request_and_parent_of_state_spans(self) -> None:
        self.world.repositories.remote = self.world.repositories.gate.shut = True
        self.world.archive = FakeArchive()
        self.world.archive.gate.shut = True
        self.registry = self.make()
        identifier, trace = self.begin(TRACEPARENT.encode())
        self.world.clock.advance(2)
        self.world.repositories.gate.open()
        self.world.clock.advance(3)
        self.finish(self.world.child)
        self.world.clock.advance(1)
        self.world.archive.gate.open()
        root = self.assert_family(trace, "queued", "fetching", "running", "archiving")
        self.assertEqual(trace[1], TRACEPARENT)
        assert root.parent is not None
        self.assertEqual(format_trace_id(root.parent.trace_id), TRACE)
        self.assertEqual(format_span_id(root.parent.span_id), PARENT)
        self.assertIs(root.kind, SpanKind.SERVER)
        self.assertIs(root.status.status_code, StatusCode.UNSET)
        found = {name: times(span) for name, span in self.spans().items()}
        self.assertEqual(found["evaluation"], (0, 5))
        self.assertEqual(found["fetching"], (0, 2))
        self.assertEqual(found["running"], (2, 5))
        self.assertEqual(found["archiving"], (5, 6))
        assert root.attributes is not None
        shown = {name.partition(".")[2]: value for name, value in root.attributes.items()}
        log_name = self.registry.records[identifier].details.log_name
        shown.pop("cpu_seconds")
        self.assertEqual(
            shown,
            {"evaluation": log_name, "caller": "", "commit": OID, "state": "finished", "events": 0},
        )

    def test_spans_have_no_identifier_and_nothing_of_the_submission(self) -> None:
        secret = "make secret"
        identifier, _ = self.begin(evaluator_cmd=secret, metadata={"a": secret})
        self.world.child.print(b"secret")
        self.finish(self.world.child, 3)
        told = "".join(span.to_json() for span in self.exporter.get_finished_spans())
        self.assertIn("exited with status 3", told)
        for word in (identifier, "secret", "example.org"):
            self.assertNotIn(word, told)

    def test_span_is_an_error_if_the_evaluation_failed_but_not_if_it_was_cancelled(self) -> None:
        identifier, _ = self.begin()
        self.finish(self.world.child, 3)
        status = self.spans()["evaluation"].status
        self.assertIs(status.status_code, StatusCode.ERROR)
        self.assertIn("status 3", status.description or "")
        self.exporter.clear()
        identifier, trace = self.begin()
        self.registry.records[identifier].stop(CANCELLED)
        self.finish(self.world.child)
        root = self.assert_family(trace, "queued", "fetching", "running")
        self.assertIs(root.status.status_code, StatusCode.UNSET)

    def test_next_process_makes_the_span_with_the_same_identifiers_and_times(self) -> None:
        self.world.repositories.gate.shut = True
        first, trace = self.begin(TRACEPARENT.encode())
        second, waiting = self.begin()
        self.world.clock.advance(2)
        self.world.repositories.gate.open()
        self.exporter.clear()
        self.restart()
        self.world.clock.advance(1)
        self.finish(self.world.child)
        self.assertEqual(self.states(first, second), ["finished", "running"])
        ended = {span.name: span for span in self.exporter.get_finished_spans()}
        self.assertEqual(times(ended["evaluation"]), (0, 3))
        self.assertEqual(times(ended["running"]), (2, 3))
        parent = ended["evaluation"].parent
        assert parent is not None
        self.assertEqual(format_span_id(parent.span_id), PARENT)
        self.exporter.clear()
        self.finish(self.world.child)
        self.assert_family(waiting, "running")
        self.assertNotEqual(waiting[0][3:35], TRACE)
        self.assertEqual(waiting[1], "")
        self.assertEqual(self.row(first).trace, trace)

    def test_evaluation_with_a_trace_ends_in_a_process_without_traces(self) -> None:
        identifier, _ = self.begin()
        self.patch(TraceTests, "make", RestoringTestCase.make)
        self.restart()
        self.exporter.clear()
        self.finish(self.world.child)
        self.assertEqual(self.states(identifier), ["finished"])
        self.assertEqual(self.spans(), {})

    def test_callback_sends_the_evaluation_span_as_its_parent(self) -> None:
        identifier, trace = self.begin(TRACEPARENT.encode(), callback_url="https://a.org/")
        callback = self.registry.records[identifier].details.callback
        assert callback is not None
        self.assertEqual(callback.traceparent, trace[0])
        self.assertEqual(trace[0][:36], TRACEPARENT[:36])
        self.assertNotIn(PARENT, trace[0])
        self.restart()
        callback = self.registry.records[identifier].details.callback
        assert callback is not None
        self.assertEqual(callback.traceparent, trace[0])

    def test_request_that_is_not_sampled_makes_no_span(self) -> None:
        without = self.accept()  # of a process without traces
        self.finish(self.world.child)
        identifier, trace = self.begin(TRACEPARENT[:-1].encode() + b"0")
        self.finish(self.world.child)
        self.assertEqual(self.states(without, identifier), ["finished", "finished"])
        self.assertEqual(self.spans(), {})
        self.assertTrue(trace[0].endswith("-00"), trace)

    def test_invalid_traceparent_is_ignored_and_a_new_trace_begins(self) -> None:
        good = TRACEPARENT.encode()
        for headers in (
            (),
            (b"",),
            (b"\xff",),
            (good, good),
            (good + b"," + good,),
            (good[:-1],),
            (good + b"0",),
            (good + b"-x",),  # version 00 has nothing behind the flags
            (good.upper(),),
            (b"ff" + good[2:],),
            (good.replace(TRACE.encode(), b"0" * 32),),
            (good.replace(PARENT.encode(), b"0" * 16),),
            (b"01" + good[2:] + b"x",),
            (good + b" " * 100 + b"x",),
            (b"01" + good[2:] + b"-" + b"x" * 10**5,),
        ):
            with self.assertNoLogs("opentelemetry"):  # by which a stranger could fill the log
                _, trace = self.begin(*headers)
            self.assertEqual(trace[1], "", headers)
            self.assertRegex(trace[0], "^00-[0-9a-f]{32}-[0-9a-f]{16}-0[1-3]$")
            self.assertNotIn(TRACE, trace[0])
            self.registry = self.make()
        # That of a later version counts, and takes no more room.
        identifier, trace = self.begin(b"01" + good[2:] + b"-what.the-future")
        self.assertEqual(trace[1], TRACEPARENT)
        row = self.registry.records[identifier].make_row()
        self.assertLess(len(pack_row(row)) - len(pack_row(attrs.evolve(row, trace=None))), 128)


class BuildTests(EvaluationTestCase):
    def test_build_has_one_span_and_its_run_adds_none(self) -> None:
        exporter = InMemorySpanExporter()
        remove_tree(self.root / "upload")
        self.evaluation = self.make(problem_name="sum", build_command="make")
        tracer = self.evaluation.context.tracer = make_tracer(exporter)
        self.evaluation.details.trace = tracer.begin_trace([])
        self.begin()
        self.slot.open()
        self.world.clock.advance(4)
        self.finish()
        (building,) = (one for one in exporter.get_finished_spans() if one.name == "building")
        self.assertEqual(times(building), (0, 4))
        names = [span.name for span in exporter.get_finished_spans()]
        self.assertEqual(names, ["queued", "building", "fetching"])


class CollectorTests(SynchronousTestCase):
    def test_spans_beyond_the_queue_are_dropped_if_the_collector_hangs(
        self,
    ) -> None:
        self.patch(traces, "_STOP_SECONDS", 0.01)
        released, exported = threading.Event(), []

        class Exporter(InMemorySpanExporter):
            def export(self, spans: Any) -> Any:
                released.wait()
                exported.extend(spans)
                return super().export(spans)

        self.addCleanup(released.set)
        processor = BatchSpanProcessor(Exporter(), 8, 1, 4)
        tracer = EvaluationTracer(processor)
        details: Any = type("Details", (), {"trace": tracer.begin_trace([])})
        for number in range(1000):
            tracer.record_phase(details, "running", number, number + 1)
        tracer.stop()
        self.assertIn("traces", {thread.name for thread in threading.enumerate()})
        self.assertEqual(exported, [])
        released.set()
        processor.shutdown()
        self.assertLessEqual(len(exported), 8 + 2 * 4)

    def test_missing_sdk_and_wrong_variable_are_logged_at_the_start(self) -> None:
        for variable, what, why in (
            ("OTEL_TRACES_EXPORTER", patch.dict(sys.modules, {"opentelemetry": None}), "import"),
            (
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
                patch.dict(os.environ, {"OTEL_BSP_MAX_QUEUE_SIZE": "-1"}),
                "max_queue_size",
            ),
        ):
            with capturedLogs() as captured, what:
                self.assertIsNone(open_tracer({variable: "otlp"}))
            (event,) = captured
            self.assertEqual(event["name"], variable)
            self.assertIn(why, formatEvent(event))
            self.assertIn("install tawebeval[traces]", formatEvent(event))

    def test_exporter_that_is_not_supported_is_logged_at_the_start(self) -> None:
        for exporter in ("console", "otlp,console"):
            with capturedLogs() as captured:
                self.assertIsNone(open_tracer({"OTEL_TRACES_EXPORTER": exporter}))
            (event,) = captured
            said = f"no traces: OTEL_TRACES_EXPORTER is '{exporter}'; allowed: otlp, none;"
            self.assertIn(said, formatEvent(event))

    def test_nothing_is_imported_unless_traces_or_reports_are_wanted(self) -> None:
        done = subprocess.run(
            [sys.executable, "-c", ALL_MODULES], capture_output=True, check=True, text=True
        )
        self.assertEqual(done.stdout, "[]\n")
