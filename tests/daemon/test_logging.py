"""`daemon.logging`: the log as it is written."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st
from twisted.application.service import Application, Service
from twisted.internet.task import Clock
from twisted.logger import ILogObserver, Logger, LogLevel, capturedLogs, formatEvent
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from tawebeval import __version__
from tawebeval.config import LogSettings
from tawebeval.daemon.assembly import Daemon
from tawebeval.daemon.logging import (
    LogWriter,
    escape_control_characters,
    format_json,
    format_text,
    format_text_without_time,
    is_systemd_journal,
    make_error_reporter,
    make_stream_log_writer,
    open_log,
)

# As twisted.internet.tcp has them.
TWISTEDS = (
    "EMFILE encountered; releasing reserved file descriptor.",
    "EMFILE recovery: Closed socket from {address}",
    "Re-reserving EMFILE recovery file descriptor.",
    "Could not accept new connection ({acceptError})",
)

# Prints the reports that Sentry would get.
REPORTING = r"""
import io, json, sys
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import Logger
import sentry_sdk
from tawebeval.daemon.logging import LogWriter, format_text, make_error_reporter

class Transport(sentry_sdk.Transport):
    def capture_envelope(self, envelope):
        print(json.dumps(envelope.get_event()))

initialise = sentry_sdk.init
sentry_sdk.init = lambda dsn, **options: initialise(dsn, transport=Transport, **options)
sys.argv.append("--secret")
writer = LogWriter(io.StringIO(), format_text, "info")
dsn = "http://a@127.0.0.1:1/1"
writer.on_error_logged = make_error_reporter({"SENTRY_DSN": dsn}, MemoryReactorClock())
log = Logger(namespace="tawebeval.x", observer=writer)
log.info("hidden")

def fail(variable):
    words = ["a2b3" * 10, "tawebeval_" + "hidden-" * 6 + "x", "whsec_" + "aGlkZGVu" * 4]
    words.append("https://me:hidden@host/x.git in 'here'\n" + words[0])
    raise ValueError(" ".join(words))

try:
    fail("hidden")
except ValueError:
    log.failure("it broke")
"""

TOLD = {"time", "level", "logger", "message"}


def events(call: Any, namespace: str = "tawebeval.x") -> list[dict[str, Any]]:
    """Return the events that a call makes of a logger."""
    found: list[dict[str, Any]] = []
    call(Logger(namespace=namespace, observer=found.append))  # type: ignore[arg-type]
    return found


class LineTests(SynchronousTestCase):
    def test_text_line_has_time_source_level_and_message(self) -> None:
        (event,) = events(lambda log: log.warn("{who} is late", who="bob"))
        self.assertRegex(
            format_text(event), r"^\d{4}-\d\d-\d\dT\S+ \[tawebeval\.x#warn\] bob is late$"
        )
        self.assertEqual(format_text_without_time(event), "[tawebeval.x#warn] bob is late")

    def test_json_line_has_the_fields_of_the_event(self) -> None:
        (event,) = events(lambda log: log.info("{a}", a=1, path=Path("/x"), time="late", b=None))
        event["log_time"] = 1_700_000_000.5
        self.assertEqual(
            json.loads(format_json(event)),
            {
                "time": "2023-11-14T22:13:20.500+00:00",
                "level": "info",
                "logger": "tawebeval.x",
                "message": "1",
                "a": 1,
                "path": "/x",
                "b": None,
            },
        )

    def test_events_of_twisted_have_the_message_only(self) -> None:
        (event,) = events(lambda log: log.info("{a}", a=1), "twisted.web")
        self.assertEqual(set(json.loads(format_json(event))), TOLD)

    def test_traceback_is_a_field_or_indented_below_the_line(self) -> None:
        def fail(log: Logger) -> None:
            log.failure("it broke", Failure(ValueError("why\x1b")))

        (event,) = events(fail)
        first, *trace = format_text_without_time(event).split("\n")
        self.assertEqual(first, "[tawebeval.x#critical] it broke")
        self.assertTrue(trace and all(line.startswith("\t") for line in trace), trace)
        self.assertIn("why\\x1b", trace[-1])
        self.assertIn("ValueError", json.loads(format_json(event))["traceback"])

    def test_empty_event_makes_no_line(self) -> None:
        for line in (format_text, format_text_without_time, format_json):
            self.assertEqual(line({"log_time": 0.0}), "")

    @given(st.text())
    def test_any_text_is_logged_on_one_line_without_control_characters(self, text: str) -> None:
        (event,) = events(lambda log: log.info("{text}", text=text))
        for line in (
            escape_control_characters(text),
            format_text_without_time(event),
            format_json(event),
        ):
            self.assertEqual(len(line.splitlines() or [""]), 1)
            self.assertFalse(any(ord(each) < 32 or 127 <= ord(each) < 160 for each in line))
            line.encode()

    @given(st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp"))))
    def test_printable_text_stays_unchanged(self, text: str) -> None:
        self.assertEqual(escape_control_characters(text), text)


class WriterTests(SynchronousTestCase):
    def written(
        self, settings: LogSettings, environment: dict[str, str], stream: Any = None
    ) -> list[str]:
        """Return the lines that one event of each level makes."""
        stream = stream or io.StringIO()
        writer = make_stream_log_writer(settings, stream, environment)
        verifyObject(ILogObserver, writer)
        log = Logger(namespace="tawebeval.x", observer=writer)
        for level in ("debug", "info", "warn", "error", "critical"):
            log.emit(LogLevel.lookupByName(level), "{what} it is", what=level)
        if isinstance(stream, io.StringIO):
            return stream.getvalue().splitlines()
        return Path(stream.name).read_text().splitlines()

    def test_events_at_or_above_the_level_are_logged_as_text_or_json(self) -> None:
        for level, count in (("debug", 5), ("info", 4), ("warn", 3), ("error", 2)):
            lines = self.written(LogSettings(level=level), {})  # type: ignore[arg-type]
            self.assertEqual(len(lines), count)
        self.assertIn("[tawebeval.x#info] info it is", self.written(LogSettings(), {})[0])
        (line, *_) = self.written(LogSettings(format="json"), {})
        self.assertEqual(json.loads(line)["message"], "info it is")

    def test_journal_gets_priorities_instead_of_times(self) -> None:
        with open(self.mktemp(), "w+", encoding="utf-8") as stream:
            status = os.fstat(stream.fileno())
            journal = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
            self.assertTrue(is_systemd_journal(stream, journal["JOURNAL_STREAM"]))
            self.assertFalse(is_systemd_journal(stream, f"{status.st_dev}:{status.st_ino + 1}"))
            self.assertFalse(is_systemd_journal(stream, ""))
            lines = self.written(LogSettings(level="debug"), journal, stream)
        self.assertEqual([line[:3] for line in lines], ["<7>", "<6>", "<4>", "<3>", "<2>"])
        self.assertEqual(lines[0], "<7>[tawebeval.x#debug] debug it is")

    def test_each_line_of_a_traceback_has_its_priority(self) -> None:
        stream = io.StringIO()
        log = Logger(
            namespace="x", observer=LogWriter(stream, format_text_without_time, "info", True)
        )
        log.failure("it broke", Failure(ValueError("why")))
        lines = stream.getvalue().splitlines()
        self.assertGreater(len(lines), 2)
        self.assertEqual({line[:3] for line in lines}, {"<2>"})


class NoDescriptorsTests(SynchronousTestCase):
    """Events of Twisted's ports without descriptors, and others."""

    def write(self, text: str, namespace: str, level: str = "info") -> tuple[str, list[str]]:
        """Return what is written, and what is logged instead, for three such events."""
        stream = io.StringIO()
        log = Logger(
            namespace=namespace, observer=LogWriter(stream, format_text_without_time, level)
        )
        with capturedLogs() as ours:
            for _ in range(3):
                log.info(text, address="a", acceptError="e")
        return stream.getvalue(), [str(formatEvent(event)) for event in ours]

    def test_one_line_about_descriptors_replaces_the_lines_of_twisted(self) -> None:
        for text in TWISTEDS:
            written, (said,) = self.write(text, "twisted.internet.tcp.Port")
            self.assertEqual(written, "", text)
            self.assertIn("no file descriptor is free", said)

    def test_line_about_descriptors_is_repeated_after_a_minute_at_the_earliest(self) -> None:
        clock = Clock()
        writer = LogWriter(io.StringIO(), format_text, "info", read_clock=clock.seconds)
        log = Logger(namespace="twisted.internet.tcp.Port", observer=writer)
        for seconds, count in ((0, 1), (59, 0), (1, 1), (1, 0)):
            clock.advance(seconds)
            with capturedLogs() as ours:
                log.info(TWISTEDS[0], address="a", acceptError="e")
            self.assertEqual(len(ours), count)

    def test_events_of_other_text_or_namespace_are_not_replaced(self) -> None:
        for text, namespace in (
            ("Received SIGTERM, shutting down.", "twisted.internet.base"),
            ("ApiSite starting on 8080", "tawebeval.evaluations.lifecycle"),
            (TWISTEDS[0], "tawebeval.evaluations.lifecycle"),
        ):
            written, logged = self.write(text, namespace)
            self.assertEqual((written.count(text), logged), (3, []))


class OptionTests(SynchronousTestCase):
    def open(self, **options: Any) -> LogWriter | None:
        return open_log(LogSettings(format="json"), {"nodaemon": True, **options}, {})

    def test_other_observers_of_twistd_are_kept(self) -> None:
        self.assertIsNone(self.open(logger=object()))
        self.assertIsNone(self.open(syslog=True))
        self.assertIsNone(self.open(nodaemon=False, logfile="-"))
        self.assertIsNone(open_log(LogSettings(), None, {}))

    def test_foreground_logs_to_stdout_unless_a_file_is_named(self) -> None:
        stream = io.StringIO()
        self.patch(sys, "stdout", stream)
        for options in ({}, {"logfile": "-"}, {"logfile": None}):
            writer = self.open(**options)
            assert writer is not None
            writer({"log_format": "hello", "log_namespace": "x"})
        self.assertEqual(len(stream.getvalue().splitlines()), 3)

    def test_background_logs_to_the_usual_file_of_twistd(self) -> None:
        folder = Path(self.mktemp())
        folder.mkdir()
        here = Path.cwd()
        self.addCleanup(os.chdir, here)
        os.chdir(folder)
        self.assertIsNotNone(self.open(nodaemon=False))
        self.assertEqual([path.name for path in Path().iterdir()], ["twistd.log"])

    def test_log_writer_is_the_observer_of_the_application(self) -> None:
        for writer in (make_stream_log_writer(LogSettings(), io.StringIO(), {}), None):
            none: Any = None
            evaluations: Any = Service()
            evaluations.registry = SimpleNamespace(end_drain_early=none)
            daemon = Daemon(Service(), evaluations, none, none, writer)
            application = Application("tawebeval")
            daemon.setServiceParent(application)
            self.assertIs(application.getComponent(ILogObserver, None), writer)


class ErrorReportTests(SynchronousTestCase):
    """Errors as `logging` and Sentry get them."""

    def setUp(self) -> None:
        self.records: list[logging.LogRecord] = []
        self.writer = LogWriter(io.StringIO(), format_text, "error")
        handler = logging.Handler()
        handler.emit = self.records.append  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        self.addCleanup(logging.getLogger().removeHandler, handler)

    def test_handlers_of_python_logging_get_errors_with_their_tracebacks(self) -> None:
        self.writer.on_error_logged = make_error_reporter({}, Clock())
        for event in [
            *events(lambda log: log.info("{a}", a=1)),
            *events(lambda log: log.warn("{a}", a=2)),
            *events(lambda log: log.error("{a}", a=3)),
            *events(lambda log: log.failure("{a}", Failure(ValueError("why")), a=4)),
            *events(lambda log: log.error("{a}", a=5), "stderr"),
            *events(
                lambda log: log.error("Could not accept new connection"), "twisted.internet.tcp"
            ),
        ]:
            self.writer(event)
        told = [(record.name, record.levelname, record.getMessage()) for record in self.records]
        name = "tawebeval"
        self.assertEqual(told, [(name, "ERROR", "3"), (name, "CRITICAL", "4")])
        assert self.records[1].exc_info is not None
        self.assertIs(self.records[1].exc_info[0], ValueError)

    def test_missing_sdk_of_sentry_is_logged(self) -> None:
        for what, dsn in (
            (patch.dict(sys.modules, {"sentry_sdk": None}), "https://a@b.org/1"),
            (patch.dict(sys.modules), "no URL"),
        ):
            with what, capturedLogs() as captured:
                make_error_reporter({"SENTRY_DSN": dsn}, Clock())
            self.assertIn("install tawebeval[sentry]", formatEvent(captured[0]))

    def test_reports_have_neither_secrets_nor_variables(self) -> None:
        done = subprocess.run(
            [sys.executable, "-c", REPORTING], capture_output=True, check=True, text=True
        )
        (report,) = map(json.loads, done.stdout.splitlines())
        (error,) = report["exception"]["values"]
        self.assertEqual(error["type"], "ValueError")
        self.assertEqual(error["value"], "... ... ... https://...@host/x.git in 'here'\n...")
        self.assertEqual(report["logentry"]["message"], "it broke")
        self.assertEqual(report["level"], "fatal")
        self.assertEqual(report["release"], f"tawebeval@{__version__}")
        self.assertEqual(report["breadcrumbs"], {"values": []})
        self.assertFalse(report.keys() & {"request", "modules", "user"}, report)
        for word in ("hidden", "vars", "--secret"):
            self.assertNotIn(word, done.stdout)
