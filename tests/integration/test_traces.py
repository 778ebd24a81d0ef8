"""Traces and reports of errors, which real daemons export to real receivers."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tawebeval.sandbox.workspace import derive_directory_name
from tests.integration.harness import CONFIGURATION, RepositoryTestCase, until
from tests.integration.receivers import Receiver
from tests.integration.starters import KeptDaemon, start_kept

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def decode_spans(receiver: Receiver) -> dict[str, Any]:
    """Return the spans that a collector has received, by their names."""
    found = {}
    for post in receiver.posts:
        assert post.path == "/v1/traces", post.path
        for resource in ExportTraceServiceRequest.FromString(post.body).resource_spans:
            for scope in resource.scope_spans:
                found.update({span.name: span for span in scope.spans})
    return found


def decode_reports(receiver: Receiver) -> list[dict[str, Any]]:
    """Return the events in the envelopes that Sentry has received."""
    found = []
    for post in receiver.posts:
        lines = gzip.decompress(post.body).splitlines()
        assert json.loads(lines[1])["type"] == "event", lines[1]
        found.append(json.loads(lines[2]))
    return found


class ReceiverTests(RepositoryTestCase):
    daemon: KeptDaemon

    def receive(self, status: int) -> Receiver:
        receiver = Receiver(status)
        self.addCleanup(receiver.stop)
        return receiver

    async def test_trace_continues_from_request_to_callback_across_a_killed_daemon(self) -> None:
        collector, hook = self.receive(200), self.receive(204)
        url = f"http://127.0.0.1:{collector.port}"
        configuration = f"{CONFIGURATION}\n{self.configure_callbacks()}"
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        await start_kept(self, KeptDaemon(configuration, **variables))
        identifier = await self.begin_and_wait(
            "echo ready; sleep 600", headers={"traceparent": PARENT}, callback_url=hook.url
        )
        await until(lambda: {"queued", "fetching"} <= decode_spans(collector).keys(), "two phases")
        await self.daemon.restart(signal.SIGKILL)
        await self.client.cancel(identifier)
        await until(lambda: hook.posts, "the callback arrives")
        await self.daemon.stop()
        spans = decode_spans(collector)
        root = spans.pop("evaluation")
        self.assertEqual(set(spans), {"queued", "fetching", "running"})
        self.assertEqual(root.trace_id.hex(), PARENT[3:35])
        self.assertEqual(root.parent_span_id.hex(), PARENT[36:52])
        self.assertEqual({span.parent_span_id for span in spans.values()}, {root.span_id})
        expected = f"00-{root.trace_id.hex()}-{root.span_id.hex()}-01"
        self.assertEqual(hook.posts[0].headers["traceparent"], expected)
        self.assertNotIn(identifier.encode(), b"".join(post.body for post in collector.posts))

    async def test_errors_reach_sentry_without_identifiers(self) -> None:
        sentry = self.receive(200)
        dsn = f"http://public@127.0.0.1:{sentry.port}/1"
        await start_kept(self, KeptDaemon(SENTRY_DSN=dsn))
        identifier = await self.begin_and_wait("echo ready; sleep 600")
        await self.daemon.end()
        # An error that the log has, with a path in it.
        place = self.daemon.state / "evaluations" / derive_directory_name(identifier) / "output"
        shutil.rmtree(place)
        place.symlink_to(f"/nowhere/{identifier}")
        self.daemon.start()
        await self.daemon.ready()
        await until(lambda: sentry.posts, "the report arrives")
        (report,) = decode_reports(sentry)
        self.assertEqual((report["level"], report["logger"]), ("error", "tawebeval"))
        self.assertIn("the evaluator cannot go on", report["logentry"]["message"])
        self.assertNotIn(identifier, json.dumps(report))
        await self.daemon.logged("the evaluator cannot go on")
