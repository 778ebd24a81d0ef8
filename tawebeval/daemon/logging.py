"""The daemon's log: one text line or JSON object for each event.

Control characters are written as escapes, so text from evaluators and clients can neither start a
line of its own nor control a terminal. A thread writes the file (`linewriter`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import IO, Any

import attrs
from twisted.logger import ILogObserver, LogEvent, Logger, LogLevel, formatEvent, formatTime
from twisted.python.logfile import LogFile
from zope.interface import implementer

from tawebeval.config import LogSettings
from tawebeval.daemon.linewriter import LineWriter

_LEVELS = {"debug": 0, "info": 1, "warn": 2, "error": 3, "critical": 4}
_PRIORITIES = {"debug": 7, "info": 6, "warn": 4, "error": 3, "critical": 2}  # sd-daemon(3)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_OWN_PREFIX = "tawebeval."  # other loggers have whole objects as fields

# Prefixes of the events that Twisted's ports log for each connection without a descriptor.
_ACCEPT_FAILURES = ("EMFILE", "Re-reserving EMFILE", "Could not accept new connection")
_LOG_INTERVAL = 60.0  # seconds

LineFormatter = Callable[[LogEvent], str]

log = Logger()


@attrs.define
class RateLimitedLog:
    """A message logged by `log` at most once a minute."""

    log: Callable[[str], object]
    message: str
    _seconds: Callable[[], float] = time.monotonic
    _last: float | None = None

    def __call__(self) -> None:
        """Log the message, unless it was logged within the last minute."""
        now = self._seconds()
        if self._last is None or now - self._last > _LOG_INTERVAL:
            self._last = now
            self.log(self.message)


def _make_descriptors_log() -> RateLimitedLog:
    return RateLimitedLog(
        log.error,
        "connections are closed unanswered: no file descriptor is free; raise LimitNOFILE= in the"
        " unit or ulimit -n, or lower http.connections (logged once a minute)",
    )


@implementer(ILogObserver)
@attrs.define(eq=False)
class LogWriter:
    """Log observer that writes events of at least `level` to `file`, formatted by `format`.

    With `has_priorities` each line begins with its priority (sd-daemon(3)). `line_writer` counts
    lost events, and writes their number before the next one.

    Without free descriptors Twisted logs three events for each connection that it closes, and
    clients reconnect at once. One message a minute replaces these events.
    """

    _file: IO[Any]
    _format: LineFormatter
    level: str
    _has_priorities: bool = False
    line_writer: LineWriter = attrs.field(init=False)
    _no_descriptors: RateLimitedLog = attrs.field(factory=_make_descriptors_log)

    def __attrs_post_init__(self) -> None:
        self.line_writer = LineWriter(
            self._file, lambda missing: self._format_event(_make_gap_event(missing))
        )

    def __call__(self, event: LogEvent) -> None:
        """Write one event. Raises nothing, because the error could not be logged."""
        if _LEVELS[get_level_name(event)] < _LEVELS[self.level]:
            return
        if _is_accept_failure(event):
            self._no_descriptors()
            return
        text = self._format_event(event)
        if text:
            self.line_writer.write_line(text)

    def _format_event(self, event: LogEvent) -> str:
        text = self._format(event)
        if text and self._has_priorities:
            prefix = f"<{_PRIORITIES[get_level_name(event)]}>"
            text = prefix + text.replace("\n", f"\n{prefix}")
        return text


def _is_accept_failure(event: LogEvent) -> bool:
    by_twisted = event.get("log_namespace", "").startswith("twisted.internet.")
    return by_twisted and (event.get("log_format") or "").startswith(_ACCEPT_FAILURES)


def _make_gap_event(missing: int) -> LogEvent:
    words = "up to {missing} earlier log events were lost"
    return {
        "log_format": words,
        "log_level": LogLevel.warn,
        "log_namespace": __name__,
        "log_time": time.time(),
        "missing": missing,
    }


def get_level_name(event: LogEvent) -> str:
    """Return the name of an event's level."""
    level = event.get("log_level", LogLevel.info)
    return str(level.name)


def format_text(event: LogEvent) -> str:
    """Format an event as text with its time; empty for an event without a message."""
    line = format_plain(event)
    when = event.get("log_time")
    return line and f"{_format_time(None if when is None else int(when))} {line}"


@lru_cache(1)
def _format_time(seconds: int | None) -> str:
    """Format a time. Cached, because many events have the same second."""
    return formatTime(seconds)


def format_plain(event: LogEvent) -> str:
    """Format an event as text without the time, which the journal adds."""
    message, trace = _format_message(event), _format_traceback(event)
    if not message and not trace:
        return ""
    named = event.get("log_system") or f"{event.get('log_namespace', '-')}#{get_level_name(event)}"
    lines = [
        f"[{named}] {message}",
        *(f"\t{escape_control_characters(line)}" for line in trace.splitlines()),
    ]
    return "\n".join(lines)


def format_json(event: LogEvent) -> str:
    """Format an event as a JSON object; empty for an event without a message.

    Its keys are `time`, `level`, `logger`, `message`, `traceback` (after an error), and the fields
    of events of tawebeval.
    """
    message, trace = _format_message(event), _format_traceback(event)
    if not message and not trace:
        return ""
    namespace = event.get("log_namespace") or "-"
    made = datetime.fromtimestamp(event.get("log_time") or 0.0, UTC)
    line: dict[str, Any] = {
        "time": made.isoformat(timespec="milliseconds"),
        "level": get_level_name(event),
        "logger": namespace,
        "message": message,
    }
    if trace:
        line["traceback"] = trace
    if namespace.startswith(_OWN_PREFIX):
        for name, value in event.items():
            if not name.startswith("log_"):
                line.setdefault(name, value)
    return json.dumps(line, default=str)


def _format_message(event: LogEvent) -> str:
    """Return the message of an event.

    `str.format_map` formats the simple formats of this package, in a tenth of the time of Twisted's
    `formatEvent`, which also handles calls and broken formats.
    """
    words = event.get("log_format")
    if isinstance(words, str):
        with suppress(Exception):
            return escape_control_characters(words.format_map(event))
    return escape_control_characters(formatEvent(event))


def _format_traceback(event: LogEvent) -> str:
    failure = event.get("log_failure")
    return failure.getTraceback() if failure is not None else ""


def escape_control_characters(text: str) -> str:
    """Return a text as one line, with control characters as escapes."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def open_log(
    settings: LogSettings,
    options: Mapping[str, Any] | None,
    environment: Mapping[str, str],
    reactor: Any,
) -> LogWriter | None:
    """Return the writer of the log to the file that the options of twistd name, or to stdout.

    None without options, with `--syslog` or `--logger`, and for stdout of a background daemon. A
    file is rotated on SIGUSR1, as twistd does.
    """
    if options is None or options.get("logger") or options.get("syslog"):
        return None
    name = options.get("logfile") or ""
    if options["nodaemon"] and name in ("", "-"):
        return open_stream_log(settings, sys.stdout, environment)
    if name == "-":
        return None
    file = LogFile.fromFullPath(name or "twistd.log")
    line = format_json if settings.format == "json" else format_text
    writer = LogWriter(file, line, settings.level)
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        rotate = partial(writer.line_writer.call_in_order, file.rotate)
        signal.signal(signal.SIGUSR1, lambda *_: reactor.callFromThread(rotate))
    return writer


def open_stream_log(
    settings: LogSettings, stream: IO[str], environment: Mapping[str, str]
) -> LogWriter:
    """Return the writer of the log to a stream, with priorities if that is systemd's journal."""
    journal = is_journal(stream, environment.get("JOURNAL_STREAM", ""))
    line = format_plain if journal else format_text
    return LogWriter(
        stream, format_json if settings.format == "json" else line, settings.level, journal
    )


def is_journal(stream: IO[str], journal: str) -> bool:
    """Return whether a stream is the `journal` of JOURNAL_STREAM (systemd.exec(5))."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return journal == f"{status.st_dev}:{status.st_ino}"
