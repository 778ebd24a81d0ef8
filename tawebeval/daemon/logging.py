"""The daemon's log: one text line or JSON object for each event.

Control characters are written as escapes, so text from evaluators and clients can neither start a
line of its own nor control a terminal. `LineWriter` writes the file in a thread: a write to a full
pipe blocks until somebody reads it, a write to a file as long as the disk takes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from queue import SimpleQueue
from threading import RLock, Thread
from typing import IO, Any

import attrs
from twisted.logger import (
    ILogObserver,
    LogEvent,
    Logger,
    LogLevel,
    STDLibLogObserver,
    formatEvent,
)
from zope.interface import implementer

from tawebeval import __version__
from tawebeval.config import LogSettings
from tawebeval.core.evaluations import IDENTIFIER_PATTERN

_LEVELS = {"debug": 0, "info": 1, "warn": 2, "error": 3, "critical": 4}
_PRIORITIES = {"debug": 7, "info": 6, "warn": 4, "error": 3, "critical": 2}  # sd-daemon(3)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_OWN_PREFIX = "tawebeval."  # other loggers have whole objects as fields

# Prefixes of the events that Twisted's ports log for each connection without a descriptor.
_ACCEPT_FAILURES = ("EMFILE", "Re-reserving EMFILE", "Could not accept new connection")
_LOG_INTERVAL = 60.0  # seconds
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S%z"
_GATHERING = 0.05  # seconds until lines are written: each write switches threads

# Identifiers, tokens, secrets of callbacks, and logins in URLs.
_SECRET = re.compile(
    rf"{IDENTIFIER_PATTERN}|tawebeval_[\w-]{{43}}|whsec_[A-Za-z0-9+/]+=*|(?<=://)[^/@\s\"]+(?=@)"
)
_FLUSH_SECONDS = 0.5  # for which the shutdown waits for Sentry

MAX_LINE_QUEUE_BYTES = 2**20
"""Maximum memory of the lines that are not written yet, in bytes."""

LineFormatter = Callable[[LogEvent], str]

log = Logger()


@implementer(ILogObserver)
@attrs.define(eq=False)
class LogWriter:
    """Log observer that writes events of at least `level` to `file`, formatted by `format`.

    With `has_priorities` each line begins with its priority (sd-daemon(3)). `line_writer` counts
    lost events. Each error is also given to `on_error_logged`.

    Without free descriptors Twisted logs three events for each connection that it closes, and
    clients reconnect at once. One message a minute replaces these events.
    """

    _file: IO[Any]
    _format: LineFormatter
    level: str
    _has_priorities: bool = False
    line_writer: LineWriter = attrs.field(init=False)
    _read_clock: Callable[[], float] = time.monotonic
    _next_warning: float = 0.0  # clock time from which accept failures are logged again
    on_error_logged: Callable[[LogEvent], object] = lambda event: None

    def __attrs_post_init__(self) -> None:
        self.line_writer = LineWriter(self._file)

    def __call__(self, event: LogEvent) -> None:
        """Write one event. Raises nothing, because the error could not be logged."""
        if _LEVELS[get_level_name(event)] < _LEVELS[self.level]:
            return
        if _is_accept_failure(event):
            self._warn_of_descriptors()
            return
        text = self._format(event)
        if text and self._has_priorities:
            prefix = f"<{_PRIORITIES[get_level_name(event)]}>"
            text = prefix + text.replace("\n", f"\n{prefix}")
        if text:
            self.line_writer.write_line(text)
        is_error = _LEVELS[get_level_name(event)] >= _LEVELS["error"]
        if is_error and event.get("log_namespace") != "stderr":  # where handlers may write to
            self.on_error_logged(event)

    def _warn_of_descriptors(self) -> None:
        now = self._read_clock()
        if now >= self._next_warning:
            self._next_warning = now + _LOG_INTERVAL
            log.error(
                "connections are closed unanswered: no file descriptor is free; raise LimitNOFILE="
                " in the unit or ulimit -n, or lower http.connections (logged once a minute)"
            )


def _is_accept_failure(event: LogEvent) -> bool:
    by_twisted = event.get("log_namespace", "").startswith("twisted.internet.")
    return by_twisted and (event.get("log_format") or "").startswith(_ACCEPT_FAILURES)


def get_level_name(event: LogEvent) -> str:
    """Return the name of an event's level."""
    level = event.get("log_level", LogLevel.info)
    return str(level.name)


def format_text(event: LogEvent) -> str:
    """Format an event as text with its time; empty for an event without a message."""
    line, made = format_text_without_time(event), event.get("log_time")
    shown = "-" if made is None else time.strftime(_TIME_FORMAT, time.localtime(made))
    return line and f"{shown} {line}"


def format_text_without_time(event: LogEvent) -> str:
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
    """Return the message. Twisted's formatter takes ten times as long as Python's own."""
    if event.get("log_namespace", "").startswith(_OWN_PREFIX):
        # Such as a call in the format, which only Twisted's makes, or a value that fails.
        with suppress(Exception):
            return escape_control_characters(event["log_format"].format_map(event))
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
) -> LogWriter | None:
    """Return the writer of the log to the file that the options of twistd name, or to stdout.

    None without options, with `--syslog` or `--logger`, and for stdout of a background daemon,
    which twistd refuses.
    """
    if options is None or options.get("logger") or options.get("syslog"):
        return None
    name = options.get("logfile") or ("-" if options["nodaemon"] else "twistd.log")
    if name == "-":
        if not options["nodaemon"]:
            return None
        return make_stream_log_writer(settings, sys.stdout, environment)
    file = open(name, "a", encoding="utf-8")
    line = format_json if settings.format == "json" else format_text
    return LogWriter(file, line, settings.level)


def make_stream_log_writer(
    settings: LogSettings, stream: IO[str], environment: Mapping[str, str]
) -> LogWriter:
    """Return the writer of the log to a stream, with priorities if that is systemd's journal."""
    journal = is_systemd_journal(stream, environment.get("JOURNAL_STREAM", ""))
    line = format_text_without_time if journal else format_text
    return LogWriter(
        stream, format_json if settings.format == "json" else line, settings.level, journal
    )


def make_error_reporter(
    environment: Mapping[str, str], reactor: Any
) -> Callable[[LogEvent], object]:
    """Return what passes errors on to the logger "tawebeval" of `logging`.

    With SENTRY_DSN a thread of Sentry's SDK sends them, without secrets and values of variables.
    """
    logging.getLogger("tawebeval").addHandler(logging.NullHandler())  # else they go to stderr, too
    if environment.get("SENTRY_DSN"):
        try:
            import sentry_sdk
            from sentry_sdk.integrations.logging import LoggingIntegration

            sentry_sdk.init(
                environment["SENTRY_DSN"],
                release=f"tawebeval@{__version__}",
                default_integrations=False,  # they have requests, commands and programs
                integrations=[LoggingIntegration(level=None, event_level=logging.ERROR)],
                include_local_variables=False,
                before_send=lambda event, _: _remove_secrets(event),
            )
            reactor.addSystemEventTrigger("after", "shutdown", sentry_sdk.flush, _FLUSH_SECONDS)
        except (ImportError, ValueError) as error:
            words = (
                "no reports: {error}; SENTRY_DSN is set: install tawebeval[sentry], or correct it"
            )
            log.warn(words, error=error)
    return STDLibLogObserver("tawebeval")


def _remove_secrets(value: Any) -> Any:
    """Return a JSON value without secrets in its strings."""
    # Not in its JSON: an identifier after a line feed would take the n of the escape with it.
    if isinstance(value, str):
        return _SECRET.sub("...", value)
    if isinstance(value, Mapping):
        return {_remove_secrets(name): _remove_secrets(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_remove_secrets(each) for each in value]
    return value


def is_systemd_journal(stream: IO[str], journal_stream: str) -> bool:
    """Return whether a stream is that of JOURNAL_STREAM (systemd.exec(5))."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return journal_stream == f"{status.st_dev}:{status.st_ino}"


class LineWriter:
    """Writer of lines to `file`: directly at first, by a thread from `start` to `stop`.

    With the thread no call waits for the file. Lines are lost if the queue is full or the write
    fails; `lost_lines` counts them.
    """

    def __init__(self, file: IO[Any]) -> None:
        self._file = file
        self.lost_lines = 0
        # Without a lock of its own: a signal handler may log while the same thread is in here.
        self._queue: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
        self._size = 0  # of the queue, in bytes of memory
        self._lock = RLock()  # of the two numbers
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start the thread. Raises: RuntimeError, if none can be started."""
        thread = Thread(target=self._run, name="log", daemon=True)
        thread.start()
        self._thread = thread

    def write_line(self, text: str) -> None:
        """Write a line, given without a line terminator. Raises nothing."""
        if self._thread is None:
            self._write_lines([text])
            return
        size = sys.getsizeof(text)
        with self._lock:
            if self._size + size > MAX_LINE_QUEUE_BYTES:
                self.lost_lines += 1
                return
            self._size += size
        self._queue.put((text, size))

    def stop(self, timeout: float) -> None:
        """Wait for up to `timeout` seconds until all lines are written, and end the thread.

        Later lines are written directly, unless the file hangs: then they may be lost.
        """
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self._thread = None

    def _run(self) -> None:
        is_running = True
        while is_running:
            taken = [self._queue.get()]
            time.sleep(_GATHERING)
            while not self._queue.empty():  # nobody else takes lines
                taken.append(self._queue.get())
            entries = [entry for entry in taken if entry is not None]
            is_running = len(entries) == len(taken)
            with self._lock:
                self._size -= sum(size for _, size in entries)
            self._write_lines([line for line, _ in entries])

    def _write_lines(self, lines: Sequence[str]) -> None:
        """Write lines in one call, because each call switches threads. Blocks."""
        try:
            self._file.write("".join(f"{line}\n" for line in lines))
            self._file.flush()
        except Exception:  # noqa: BLE001  (an error of the log cannot be logged)
            with self._lock:
                self.lost_lines += len(lines)
