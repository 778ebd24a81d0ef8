"""Traces of evaluations by OpenTelemetry, if the environment asks for them (docs/operate.md).

An evaluation has a span, the child of that in the header `traceparent` of its form (W3C Trace
Context), and below it a span for each state, its build and its archiving. No span is held: each is
made when it ends. The row in the store has the identifiers for the next process of the daemon.

A thread of the SDK exports spans; beyond its queue (OTEL_BSP_MAX_QUEUE_SIZE) they are dropped.
Callbacks go to strangers, so `tracestate` is not handed on (Trace Context, section 5.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Thread
from typing import Any

from twisted.logger import Logger

from tawebeval.core.evaluations import EvaluationState
from tawebeval.evaluations.store import EvaluationDetails

_VARIABLES = ("TRACES_EXPORTER", "EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_TRACES_ENDPOINT")
_ATTRIBUTES = {"evaluation", "caller", "commit", "state", "reason", "events", "cpu_seconds"}
_MAX_HEADER = 128  # bytes; later versions may have more than the 55 of this one
_MAX_FAILURE = 256  # characters
_STOP_SECONDS = 0.5  # for which the shutdown waits for the collector

log = Logger()


class EvaluationTracer:
    """Maker of spans, which `processor` exports, by default to a collector by OTLP over HTTP.

    Times are in seconds since the epoch. Starts a thread. Raises: ImportError, without the SDK;
    ValueError, for a wrong variable of the environment.
    """

    def __init__(self, processor: Any = None) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider, export, id_generator
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        class Identifiers(id_generator.RandomIdGenerator):
            """Those of `chosen`, the span of an evaluation; otherwise random ones.

            By nothing else the SDK lets a caller choose the identifier of a new span.
            """

            chosen: Any = None

            def generate_span_id(self) -> int:
                return self.chosen.span_id if self.chosen else super().generate_span_id()

            def generate_trace_id(self) -> int:
                return self.chosen.trace_id if self.chosen else super().generate_trace_id()

        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        self._identifiers = Identifiers()
        provider = TracerProvider(id_generator=self._identifiers, shutdown_on_exit=False)
        provider.add_span_processor(processor or export.BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer, self._shutdown = provider.get_tracer("tawebeval"), provider.shutdown

    def stop(self) -> None:
        """Export what is left. Blocks, for up to `_STOP_SECONDS`."""
        thread = Thread(target=self._shutdown, name="traces", daemon=True)
        thread.start()
        thread.join(_STOP_SECONDS)

    def begin_trace(self, headers: Sequence[bytes]) -> tuple[str, str]:
        """Return the `traceparent` of a new evaluation, and that of its request, "" without one.

        `headers` are those of the request; without a single valid one the trace begins here.
        """
        given = b",".join(headers)
        parent = self._read(given.decode("latin-1") if len(given) <= _MAX_HEADER else "")
        span = self._tracer.start_span("evaluation", parent)  # never ended, so never exported
        return self._write(self._trace.set_span_in_context(span)), self._write(parent)

    def record_phase(self, details: EvaluationDetails, name: str, begin: float, end: float) -> None:
        """Make the span of a part of an evaluation."""
        if details.trace is not None:
            parent = self._read(details.trace[0])
            self._tracer.start_span(name, parent, start_time=_to_ns(begin)).end(_to_ns(end))

    def record_end(self, details: EvaluationDetails, fields: Mapping[str, Any]) -> None:
        """Make the span of an evaluation that has ended, with `fields` of its line in the log."""
        if details.trace is None:
            return
        own, parent = map(self._read, details.trace)
        shown = {f"tawebeval.{name}": fields[name] for name in _ATTRIBUTES & fields.keys()}
        begin = _to_ns(details.state_times["created"])
        self._identifiers.chosen = self._trace.get_current_span(own).get_span_context()
        kind = self._trace.SpanKind.SERVER
        span = self._tracer.start_span("evaluation", parent, kind, shown, start_time=begin)
        self._identifiers.chosen = None
        if details.state is EvaluationState.FAILED and details.failure is not None:
            words = details.failure.message[:_MAX_FAILURE]
            span.set_status(self._trace.StatusCode.ERROR, words)
        span.end(_to_ns(details.state_times[details.state.value]))

    def _read(self, traceparent: str) -> Any:
        return self._propagator.extract({"traceparent": traceparent})

    def _write(self, context: Any) -> str:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context)
        return carrier.get("traceparent", "")


def _to_ns(seconds: float) -> int:
    return int(seconds * 1e9)


def open_tracer(environment: Mapping[str, str]) -> EvaluationTracer | None:
    """Return a tracer; None if none is asked for or, with a warning, none is possible."""
    asked = [f"OTEL_{name}" for name in _VARIABLES if environment.get(f"OTEL_{name}")]
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not asked or is_disabled or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    exporter = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    try:
        if exporter != "otlp":
            raise ValueError(f"OTEL_TRACES_EXPORTER is {exporter!r}; allowed: otlp, none")
        return EvaluationTracer()
    except (ImportError, ValueError) as error:
        words = "no traces: {error}; {name} is set: install tawebeval[traces], or correct OTEL_*"
        log.warn(words, name=asked[0], error=error)
        return None
