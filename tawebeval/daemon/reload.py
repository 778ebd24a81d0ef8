"""Reload on SIGHUP, and the reports to systemd by sd_notify(3).

A reload reads all files, then applies them all, or none. No library makes the reports: the protocol
is stable and short, and the libraries need a compiler or hide their errors.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
from twisted.application.service import Service
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from tawebeval.config import (
    Configuration,
    Section,
    check_problem_settings,
)
from tawebeval.daemon.configuration import check_sandbox_paths, read_configuration
from tawebeval.errors import ConfigurationError
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.run import KILL_GRACE_SECONDS
from tawebeval.linux.privileges import ReloadableFiles, ReloadableFilesOwner
from tawebeval.slurm.job import MAX_KILL_SECONDS

_REPORT_PERIOD = 1.0  # seconds between two reports at most
_END_MARGIN = 3.0  # seconds to parse what killed evaluators have printed, and to remove their files
_STOP_MARGIN = 8.0  # seconds of a stop in addition, for connections, threads and the log

log = Logger()


class ReloadService(Service):
    """Reload of the files of all `sources`, on SIGHUP and by `reload_files`.

    `credentials_directory` has systemd's copies of credentials (LoadCredential=); empty without.
    """

    def __init__(
        self,
        sources: Iterable[ReloadableFilesOwner | None],
        credentials_directory: str,
        notifier: SystemdNotifier,
        reactor: Any,
    ) -> None:
        self.reloadables = [
            reloadable
            for source in sources
            if source is not None
            for reloadable in source.list_reloadable_files()
        ]
        self._credentials_directory = Path(credentials_directory) if credentials_directory else None
        self._notifier = notifier
        self._reactor = reactor
        self._previous_handler: Any = None

    def startService(self) -> None:
        """Handle SIGHUP."""
        super().startService()
        self._previous_handler = signal.signal(
            signal.SIGHUP, lambda *_: self._reactor.callFromThread(self.reload_files)
        )

    def reload_files(self) -> tuple[list[str], list[str]]:
        """Read all files, then apply them all; apply none if one has a problem. Blocks.

        Return and log the problems, or notes such as settings that need a restart.
        """
        self._notifier.notify_reloading()
        found: list[tuple[ReloadableFiles[Any], Any]] = []
        problems: list[str] = []
        notes: list[str] = []
        try:
            for each in self.reloadables:
                try:
                    found.append((each, each.read_files()))
                except ConfigurationError as error:
                    problems.append(str(error))
            if problems:
                found = []
            for each, content in found:
                notes += each.make_operator_notes(content)
                each.apply_content(content)
                paths = ", ".join(map(str, each.paths))
                log.info("{name}: reloaded from {paths}", name=each.name, paths=paths)
                notes += [
                    f"{each.name}: {path} is a copy that systemd made at the start"
                    " (LoadCredential=); a changed original takes effect after a restart"
                    for path in each.paths
                    if path.parent == self._credentials_directory
                ]
        finally:
            self._notifier.notify_ready()
        if not self.reloadables:
            log.info("nothing to reload: the daemon was started without files")
        for problem in problems:
            log.error("reload refused, nothing is changed: {problem}", problem=problem)
        for note in notes:
            log.warn("{note}", note=note)
        return problems, notes

    def stopService(self) -> None:
        """Restore the previous handler of SIGHUP."""
        super().stopService()
        signal.signal(signal.SIGHUP, self._previous_handler)


@attrs.frozen
class ConfigurationFile:
    """The configuration file at `path`, None without one.

    `listen_options` replaces its endpoints unless it is empty. `initial_configuration` is its
    content at the start.
    """

    path: Path | None = None
    listen_options: Sequence[str] = ()
    initial_configuration: Configuration = attrs.field(factory=Configuration)


@attrs.define
class ReloadableConfiguration:
    """Reload of the configuration file, which replaces the configuration of `holder`.

    The configuration in force differs from the file if the daemon has too few descriptors: then it
    has fewer connections. Each of `on_reload` is called with the new one.
    """

    _file: ConfigurationFile
    _holder: EvaluationContext
    _on_reload: Sequence[Callable[[Configuration], None]]

    def list_reloadable_files(self) -> Sequence[ReloadableFiles[Configuration]]:
        """Return the configuration file, if there is one."""
        path = self._file.path
        if path is None:
            return ()
        problems = self._holder.configuration.evaluations.problems
        paths = (path, Path(problems)) if problems else (path,)
        return (ReloadableFiles("the configuration", paths, self._read, self._apply, self._notes),)

    def _read(self) -> Configuration:
        wanted = read_configuration(self._file.path, self._file.listen_options)
        following = merge_reloadable_settings(self._holder.configuration, wanted)
        check_sandbox_paths(following, self._file.path, os.environ)
        if following.environments and following.sandbox.kind == "none":
            raise ConfigurationError(
                "environments: an environment needs a sandbox; restart the daemon for sandbox.kind"
            )
        if following != wanted:  # else the file was checked: a thousand problems take 20 ms
            try:  # by the settings in force, such as limits
                check_problem_settings(following, following.problems)
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"{error}; the daemon's settings differ from the file's", "restart the daemon"
                ) from None
        return wanted

    def _apply(self, wanted: Configuration) -> None:
        running = merge_reloadable_settings(self._holder.configuration, wanted)
        self._holder.configuration = running
        for callback in self._on_reload:
            callback(running)

    def _notes(self, wanted: Configuration) -> Sequence[str]:
        before = merge_reloadable_settings(self._file.initial_configuration, wanted)
        return [
            f"{setting}: changed; takes effect after a restart"
            for setting in find_changed_settings(before, wanted)
        ]


def find_changed_settings(old: Section, new: Section, path_prefix: str = "") -> Iterator[str]:
    """Yield the path of each setting that differs, in the order of the configuration.

    `path_prefix` is the path of both sections with a dot at its end, empty for the whole.
    """
    for name in old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, Section):
            yield from find_changed_settings(before, after, f"{path_prefix}{name}.")
        elif before != after:
            yield path_prefix + name


def merge_reloadable_settings(running: Configuration, wanted: Configuration) -> Configuration:
    """Return `running` with the `wanted` values of the settings that a reload changes.

    The others need a restart; so do the peers, if the daemon's name has changed.
    """
    replace = msgspec.structs.replace
    is_renamed = running.service.name != wanted.service.name
    peers = (running if is_renamed else wanted).service.peers
    return replace(
        running,
        service=replace(running.service, peers=peers),
        evaluations=replace(running.evaluations, problems=wanted.evaluations.problems),
        log=replace(running.log, level=wanted.log.level),
        environments=wanted.environments,
        problems=wanted.problems,
    )


@attrs.frozen
class SystemdNotifier:
    """Sender of datagrams to the socket at `socket_address`; None without systemd.

    `watchdog_seconds` is the number of seconds without `WATCHDOG=1` after which systemd ends the
    daemon, None without a watchdog. A datagram that cannot be sent is logged.
    """

    socket_address: str | None = None
    watchdog_seconds: float | None = None

    def send_notices(self, *notices: str) -> None:
        """Send assignments such as `READY=1` in one datagram, without blocking."""
        if self.socket_address is None:
            return
        name = self.socket_address
        if name.startswith("@"):  # an abstract socket, unix(7)
            name = "\0" + name[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
                datagrams.setblocking(False)
                datagrams.sendto("\n".join(notices).encode(), name)
        except OSError as error:
            log.warn(
                "cannot notify systemd of {notices}: {error}",
                notices=", ".join(notices),
                error=error,
            )

    def notify_ready(self) -> None:
        """Report that the start, or a reload, has ended."""
        self.send_notices("READY=1")

    def notify_reloading(self) -> None:
        """Report that a reload begins; `notify_ready` has to follow."""
        # systemd tells several reloads apart by this time.
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.send_notices("RELOADING=1", f"MONOTONIC_USEC={now}")

    def notify_stopping(self, seconds: float) -> None:
        """Report that the daemon stops within `seconds`, which overrides TimeoutStopSec=."""
        self.send_notices("STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")


def find_notifier(environment: Mapping[str, str]) -> SystemdNotifier:
    """Return the notifier for the variables that systemd has set in the environment."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return SystemdNotifier()
    period = environment.get("WATCHDOG_USEC", "")
    whose = environment.get("WATCHDOG_PID", str(os.getpid()))
    watched = period.isascii() and period.isdigit() and int(period) and whose == str(os.getpid())
    return SystemdNotifier(address, int(period) / 1e6 if watched else None)


def compute_stop_timeout(configuration: Configuration) -> float:
    """Return the maximum duration of an orderly stop, in seconds."""
    return (
        configuration.service.drain + compute_evaluation_end_timeout(configuration) + _STOP_MARGIN
    )


def compute_evaluation_end_timeout(configuration: Configuration) -> float:
    """Return the seconds in which an orderly stop ends evaluations, after the drain."""
    seconds = KILL_GRACE_SECONDS + _END_MARGIN
    if configuration.runner.kind == "slurm":
        seconds += MAX_KILL_SECONDS
    return seconds


@attrs.define(eq=False, slots=False)
class Watchdog(Service):
    """Reports to systemd: readiness, then watchdog and status once a second. To be started last.

    `count_evaluations` returns the numbers of running and of queued evaluations,
    `find_unreadiness_reasons` the reasons why no more would be accepted, `get_stop_timeout` the
    seconds that a stop may take. The reactor makes the reports: if it hangs, they stop and systemd
    restarts the daemon.
    """

    name = "watchdog"

    _notifier: SystemdNotifier
    _count_evaluations: Callable[[], tuple[int, int]]
    _find_unreadiness_reasons: Callable[[], Sequence[str]]
    _get_stop_timeout: Callable[[], float]
    _reactor: Any
    _is_stopping: bool = False
    _status: str = ""
    _reports: LoopingCall = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._reports = LoopingCall(self._report)
        self._reports.clock = self._reactor

    def startService(self) -> None:
        """Report readiness as soon as the reactor runs, and the status from then on."""
        super().startService()
        if self._notifier.socket_address is None:
            return
        self._reactor.callWhenRunning(self._on_running)
        # `stopService` would be too late: by then all evaluations have ended.
        self._reactor.addSystemEventTrigger("before", "shutdown", self._on_shutdown)

    def stopService(self) -> None:
        """Stop the reports."""
        super().stopService()
        if self._reports.running:
            self._reports.stop()

    def _on_running(self) -> None:
        self._notifier.notify_ready()
        self._reports.start(
            min(_REPORT_PERIOD, (self._notifier.watchdog_seconds or _REPORT_PERIOD) / 2)
        )

    def _on_shutdown(self) -> None:
        self._is_stopping = True
        self._notifier.notify_stopping(self._get_stop_timeout())
        self._report()

    def _report(self) -> None:
        """Report that the reactor runs, and the status if it has changed."""
        running, queued = self._count_evaluations()
        status = f"{running} running, {queued} queued"
        if self._is_stopping:
            status = f"stopping: {status}"
        elif obstacles := self._find_unreadiness_reasons():
            status += f"; not ready: {'; '.join(obstacles)}"
        notices = ["WATCHDOG=1"] if self._notifier.watchdog_seconds else []
        if status != self._status:
            notices.append(f"STATUS={status}")
            self._status = status
        if notices:
            self._notifier.send_notices(*notices)
