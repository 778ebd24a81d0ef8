"""The log as it is written: lines for people, or objects of JSON, one for each event.

What strangers have a part in, such as the stderr of an evaluator, cannot begin a line of its own
or speak to a terminal: control characters are written as escapes. Nothing waits for the file.
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
_OWN = "tawebeval."  # the loggers of which fields are shown: Twisted's are whole objects

# Beginnings of the events of Twisted's ports that have no descriptor for a connection.
_OF_ACCEPTING = ("EMFILE", "Re-reserving EMFILE", "Could not accept new connection")
_SILENCE = 60.0  # seconds

Line = Callable[[LogEvent], str]

log = Logger()


@attrs.define
class RateLimitedLog:
    """A message that is logged by `log` at most once a minute."""

    log: Callable[[str], object]
    message: str
    _seconds: Callable[[], float] = time.monotonic
    _last: float | None = None

    def __call__(self) -> None:
        """Log the message, unless it was logged within the last minute."""
        now = self._seconds()
        if self._last is None or now - self._last > _SILENCE:
            self._last = now
            self.log(self.message)


def _make_descriptors_log() -> RateLimitedLog:
    return RateLimitedLog(
        log.error,
        "connections are closed unanswered: there are no more file descriptors "
        "(LimitNOFILE in the unit, or ulimit -n); this is said once a minute",
    )


@implementer(ILogObserver)
@attrs.define(eq=False)
class LogWriter:
    """Log observer that writes events of at least `level` to `file`, formatted by `line`.

    With `priorities` each line begins with its priority, as the journal of systemd wants. `lines`
    counts the events that cannot be written; a line says so before the next one that can.

    Without descriptors Twisted logs three events for each connection that it closes, and clients
    come back at once: one message a minute stands in their place.
    """

    _file: IO[Any]
    _line: Line
    level: str
    _priorities: bool = False
    lines: LineWriter = attrs.field(init=False)
    _no_descriptors: RateLimitedLog = attrs.field(factory=_make_descriptors_log)

    def __attrs_post_init__(self) -> None:
        self.lines = LineWriter(self._file, lambda missing: self._text(_gap(missing)))

    def __call__(self, event: LogEvent) -> None:
        """Write one event. Raises nothing: there is no other place to complain."""
        if _LEVELS[level_of(event)] < _LEVELS[self.level]:
            return
        if _is_of_accepting(event):
            self._no_descriptors()
            return
        text = self._text(event)
        if text:
            self.lines.write(text)

    def _text(self, event: LogEvent) -> str:
        text = self._line(event)
        if text and self._priorities:
            prefix = f"<{_PRIORITIES[level_of(event)]}>"
            text = prefix + text.replace("\n", f"\n{prefix}")
        return text


def _is_of_accepting(event: LogEvent) -> bool:
    by_twisted = event.get("log_namespace", "").startswith("twisted.internet.")
    return by_twisted and (event.get("log_format") or "").startswith(_OF_ACCEPTING)


def _gap(missing: int) -> LogEvent:
    words = "up to {missing} events before this one could not be written"
    return {
        "log_format": words,
        "log_level": LogLevel.warn,
        "log_namespace": __name__,
        "log_time": time.time(),
        "missing": missing,
    }


def level_of(event: LogEvent) -> str:
    """Return the name of an event's level."""
    level = event.get("log_level", LogLevel.info)
    return str(level.name)


def text_line(event: LogEvent) -> str:
    """Return an event as a line for people, with a time; empty for what says nothing."""
    line = plain_line(event)
    when = event.get("log_time")
    return line and f"{_time(None if when is None else int(when))} {line}"


@lru_cache(1)
def _time(seconds: int | None) -> str:
    """Return a time as the log shows it, which is to the second: many events have the same."""
    return formatTime(seconds)


def plain_line(event: LogEvent) -> str:
    """Return the same without the time, which the journal has already."""
    message, trace = _message(event), _traceback(event)
    if not message and not trace:
        return ""
    named = event.get("log_system") or f"{event.get('log_namespace', '-')}#{level_of(event)}"
    lines = [f"[{named}] {message}", *(f"\t{escaped(line)}" for line in trace.splitlines())]
    return "\n".join(lines)


def json_line(event: LogEvent) -> str:
    """Return an event as an object of JSON; empty for what says nothing.

    It has `time`, `level`, `logger`, `message`, where there is one a `traceback`, and the fields
    of what happened.
    """
    message, trace = _message(event), _traceback(event)
    if not message and not trace:
        return ""
    namespace = event.get("log_namespace") or "-"
    made = datetime.fromtimestamp(event.get("log_time") or 0.0, UTC)
    line: dict[str, Any] = {
        "time": made.isoformat(timespec="milliseconds"),
        "level": level_of(event),
        "logger": namespace,
        "message": message,
    }
    if trace:
        line["traceback"] = trace
    if namespace.startswith(_OWN):
        for name, value in event.items():
            if not name.startswith("log_"):
                line.setdefault(name, value)
    return json.dumps(line, default=str)


def _message(event: LogEvent) -> str:
    """Return what an event says.

    Twisted's way is for all formats, also those that call something or are broken. What one like
    ours comes to Python says itself, in a tenth of the time.
    """
    words = event.get("log_format")
    if isinstance(words, str):
        with suppress(Exception):
            return escaped(words.format_map(event))
    return escaped(formatEvent(event))


def _traceback(event: LogEvent) -> str:
    failure = event.get("log_failure")
    return failure.getTraceback() if failure is not None else ""


def escaped(text: str) -> str:
    """Return a text on one line, in which what controls terminals is written as escapes."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def open_log(
    settings: LogSettings,
    options: Mapping[str, Any] | None,
    environment: Mapping[str, str],
    reactor: Any,
) -> LogWriter | None:
    """Return what writes the log to where the options of twistd say: a file, or stdout.

    None where these name another way to log (`--syslog`, `--logger`), or one that there is not,
    or there are none. As is twistd's way, a file is begun anew on SIGUSR1.
    """
    if options is None or options.get("logger") or options.get("syslog"):
        return None
    name = options.get("logfile") or ""
    if options["nodaemon"] and name in ("", "-"):
        return to_stream(settings, sys.stdout, environment)
    if name == "-":
        return None
    file = LogFile.fromFullPath(name or "twistd.log")
    line = json_line if settings.format == "json" else text_line
    writer = LogWriter(file, line, settings.level)
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        rotate = partial(writer.lines.call, file.rotate)
        signal.signal(signal.SIGUSR1, lambda *_: reactor.callFromThread(rotate))
    return writer


def to_stream(settings: LogSettings, stream: IO[str], environment: Mapping[str, str]) -> LogWriter:
    """Return what writes to a stream; if that is the journal of systemd, as the journal likes."""
    journal = is_journal(stream, environment.get("JOURNAL_STREAM", ""))
    line = plain_line if journal else text_line
    return LogWriter(
        stream, json_line if settings.format == "json" else line, settings.level, journal
    )


def is_journal(stream: IO[str], named: str) -> bool:
    """Tell whether a stream is the one that JOURNAL_STREAM names (systemd.exec(5))."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return named == f"{status.st_dev}:{status.st_ino}"
