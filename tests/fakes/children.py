"""Fake children: what runs keep an eye on, with no process behind it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from resource import struct_rusage
from typing import Any

from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from tawebeval.evaluations.eventlog import EventFiles
from tawebeval.evaluations.run import Run
from tawebeval.linux.starter import LaunchSpec

NO_PROCESS = 2**22 + 1
"""A process identifier that Linux never gives out (proc(5), pid_max)."""

NOTHING = LaunchSpec([], {}, "")
"""What is started where nobody asks for it."""

STDOUT, STDERR = 1, 2

_USAGE = struct_rusage((0.25, 0.125, *[0] * 14))  # as of wait4(2)


class _StdoutFile:
    """The file of stdout on a disk, to which a child appends."""

    def __init__(self, files: EventFiles) -> None:
        self._files = files

    def extend(self, chunk: bytes) -> None:
        descriptor = self._files._open("stdout")
        os.pwrite(descriptor, chunk, os.fstat(descriptor).st_size)


class FakeChild:
    """A child as `tawebeval.linux.child.ChildProcess` shows it, and the test drives it.

    `signals` are those sent while it ran, `group_signals` those sent to its group at
    any time. Of the signals in `obeys` it dies, in the next turn of the clock. `stdout_file` has
    what was printed.
    """

    def __init__(
        self,
        clock: IReactorTime,
        protocol: ProcessProtocol,
        launch: LaunchSpec = NOTHING,
    ) -> None:
        self.pid = NO_PROCESS
        self.start_time_ticks = 1
        self.argv, self.environment = launch.argv, dict(launch.environment)
        self.directory, self.descriptors = launch.directory, launch.descriptors
        self.is_running = True
        self.has_exited = False
        self.on_slow_reads: Callable[[], object]
        self.lost_reason: str | None = None
        self.resource_usage: struct_rusage | None = None
        self.signals: list[int] = []
        self.group_signals: list[int] = []
        self.obeys: tuple[int, ...] = ()
        self.paused = False
        self.rest_wanted = False
        self.stdout_file: bytearray | _StdoutFile = bytearray()
        self._clock = clock
        self._protocol = protocol
        self._pipe = self._unread = b""
        self._closed = False
        self._open = {STDOUT, STDERR}
        self._reason: Failure

    # What the child does

    def make_data_block(self, *lines: str) -> bytes:
        """Return a block of data as evaluators print it."""
        begin, end = (self.environment[f"EVALUATION_DATA_{name}"] for name in ("BEGIN", "END"))
        return "".join(f"{line}\n" for line in ("", begin, *lines, end)).encode()

    def print(self, data: bytes) -> None:
        """Write to stdout; it is read unless that is paused."""
        self._pipe += data
        self._read()

    def deliver_later(self, unread: bytes) -> None:
        """Deliver in the next turn what the file of stdout has already."""
        if unread:
            self._unread = unread
            self._clock.callLater(0, self._read)

    def complain(self, data: bytes) -> None:
        self._protocol.childDataReceived(STDERR, data)

    def exit(self, status: int = 0, signal: int | None = None) -> None:
        """Exit, while others still hold its stdout and stderr."""
        self.is_running = False
        self.has_exited = True
        self.resource_usage = _USAGE
        how: Exception = ProcessTerminated(status, signal) if status or signal else ProcessDone(0)
        if signal is not None:
            how = ProcessTerminated(None, signal)
        self._reason = Failure(how)
        self._protocol.processExited(self._reason)
        self._check_end()

    def close(self) -> None:
        self._closed = True
        self.lose(STDERR)
        self._read()

    def lose(self, name: int) -> None:
        if name in self._open:
            self._open.remove(name)
            self._protocol.childConnectionLost(name)
            self._check_end()

    def end(self, status: int = 0, signal: int | None = None) -> None:
        """Exit as programs usually do: nobody else holds stdout or stderr."""
        self.close()
        self.exit(status, signal)

    # What is done to it

    def signal_group(self, number: int) -> None:
        """Take a signal, also after its own end."""
        if self.is_running:
            self.signals.append(number)
        self.group_signals.append(number)
        if self.is_running and number in self.obeys:
            self.obeys = ()
            self._clock.callLater(0, self.end, signal=number)

    def pauseProducing(self) -> None:
        """Let what is printed stay in the pipe."""
        self.paused = True

    def resumeProducing(self) -> None:
        """Let the pipe be read again, in the next turn of the clock."""
        self.paused = False
        self._clock.callLater(0, self._read)

    def read_remaining_output(self) -> None:
        """Read what the pipe holds, and close it although somebody still holds it."""
        self.rest_wanted = True
        self._clock.callLater(0, self._read)

    def detach(self) -> None:
        """Deliver nothing any more; it goes on."""
        self.is_running = False
        self._protocol, self._reason = ProcessProtocol(), Failure(ProcessDone(0))

    def _read(self) -> None:
        while self._unread and not self.paused:
            chunk, self._unread = self._unread[: 2**16], self._unread[2**16 :]
            self._protocol.childDataReceived(STDOUT, chunk)
        while self._pipe and not self.paused:
            chunk, self._pipe = self._pipe[: 2**16], self._pipe[2**16 :]
            self.stdout_file.extend(chunk)
            self._protocol.childDataReceived(STDOUT, chunk)
        if self.rest_wanted:
            self.lose(STDERR)
        if (self._closed and not self.paused) or (
            self.rest_wanted and not (self._pipe or self._unread)
        ):
            self.lose(STDOUT)

    def _check_end(self) -> None:
        if not self.is_running and not self._open:
            self._protocol.processEnded(self._reason)


class FakeSpawner:
    """Starts fake children; `error`, if set, is raised instead."""

    def __init__(self, clock: IReactorTime) -> None:
        self.children: list[FakeChild] = []
        self.error: OSError | None = None
        self.obeys: tuple[int, ...] = ()
        self._clock = clock

    def __call__(
        self,
        protocol: ProcessProtocol,
        argv: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        *,
        descriptors: Sequence[int] = (),
    ) -> FakeChild:
        """Return a new child, which runs."""
        if self.error is not None:
            raise self.error
        launch = LaunchSpec(argv, environment, directory, descriptors)
        return self.adopt_child(protocol, launch)

    def adopt_child(self, protocol: ProcessProtocol, started: LaunchSpec | None) -> FakeChild:
        """Return a new child, which was started so, or in a way that nobody asks for."""
        child = FakeChild(self._clock, protocol, started or NOTHING)
        child.obeys = self.obeys
        if isinstance(protocol, Run):
            files: Any = protocol._stdout._files
            child.stdout_file = (
                _StdoutFile(files) if isinstance(files, EventFiles) else files.stdout
            )
        self.children.append(child)
        protocol.makeConnection(child)
        return child

    @property
    def child(self) -> FakeChild:
        """The child that was started last."""
        return self.children[-1]
