"""The program on the node: runs one evaluator, and ends with it.

    python -I -m tawebeval.slurm FILE
    python -I -m tawebeval.slurm --receive DIRECTORY

It reads the job description from the shared directory, or receives it and all files by stdin
(`job_transfer`) and keeps them below DIRECTORY until its end. It starts the evaluator in
bubblewrap, by a starter of its own, and watches its limits, as a daemon does. What the evaluator
prints is in files of the node first: a grant of the daemon bounds what is read of them.

stdout has the frames, stdin the daemon's lines. The end of stdin means that srun or the daemon is
gone: then the evaluator is killed, and the job cancelled, which Slurm would keep without srun. If
this program itself is killed, the starter ends with it, and all evaluators with the starter.

Limits are those of resources (setrlimit(2)) and of the disk. Where Slurm gives the job's cgroup of
memory to the job's user, the evaluator has a cgroup in it; elsewhere Slurm limits the whole job.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import msgspec
from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.error import ProcessTerminated
from twisted.internet.fdesc import readFromFD, setNonBlocking
from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from tawebeval.config import Configuration, LimitSettings, SandboxSettings
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import ConfigurationError, EvaluationFailure
from tawebeval.linux.cgroups import CgroupManager, open_cgroups
from tawebeval.linux.child import ProcessTransport, Spawner
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.reaper import OrphanReaper, become_subreaper
from tawebeval.linux.starter import MAX_SLOW_READ_SECONDS
from tawebeval.sandbox.base import SandboxedRun
from tawebeval.sandbox.bubblewrap import BubblewrapSandbox, write_sandbox_files
from tawebeval.sandbox.environments import Environment, find_environment_root_problem
from tawebeval.sandbox.limit_monitor import LimitMonitor
from tawebeval.sandbox.overlay import WritableTrees
from tawebeval.sandbox.probe import close_sandbox, open_bubblewrap, probe_bubblewrap
from tawebeval.sandbox.workspace import FileRefused, Workspace
from tawebeval.slurm.commands import COMMAND_TIMEOUT, build_command_environment
from tawebeval.slurm.frames import (
    END,
    GRANT,
    KILL,
    READ,
    STDOUT_WINDOW_BYTES,
    TERMINATE,
    UNLIMITED_OFFSET,
    DaemonLineParser,
    FrameKind,
    decode_file_request,
    encode_frame,
)
from tawebeval.slurm.job_description import JobDescription, WrongVersion, read_job_description
from tawebeval.slurm.job_transfer import check_free_disk, receive_job
from tawebeval.slurm.jobs import format_node_message
from tawebeval.slurm.pipe_writer import PipeClosed, PipeWriter
from tawebeval.slurm.tree_cache import TreeCache
from tawebeval.slurm.tree_stream import BrokenStream, StreamEnded

_THREADS = 3  # two of them poll limits
_PLACE = "tawebeval-node-"
_FRESH = 60.0  # seconds in which a new place may have no lock yet
_GATHER, _MOST_GATHER = 0.002, 0.016  # seconds between two frames of one stream
_GATHERED = 64 * 1024  # bytes that wait for no time
_FILE_PART = 256 * 1024  # bytes of a file in one frame
_DELAYED = EvaluationFailure(
    "output",
    "the evaluator was stopped: reading its stdout and stderr took the node over"
    f" {MAX_SLOW_READ_SECONDS} seconds of processor time; watch them with fewer instances of"
    " epoll(7)",
    {"value": MAX_SLOW_READ_SECONDS},
)


class FrameWriter(PipeWriter):
    """Writer of frames to stdout."""

    def write_frame(self, kind: FrameKind, content: bytes = b"") -> None:
        """Send a frame."""
        self.write(encode_frame(kind, content))

    async def send_frame(self, kind: FrameKind, content: bytes) -> None:
        """Send a frame; return once there is room for another one. Raises: PipeClosed."""
        await self.write_and_wait(encode_frame(kind, content))


@implementer(IReadDescriptor)
class CommandReader:
    """Reader of the daemon's lines from stdin; None is the end."""

    def __init__(self, reactor: Any, take: Callable[[bytes | None, bytes], object]) -> None:
        setNonBlocking(0)
        self._reactor = reactor
        self._take = take
        self._lines = DaemonLineParser()
        reactor.addReader(self)

    def fileno(self) -> int:
        """Return the descriptor of stdin."""
        return 0

    def logPrefix(self) -> str:
        """Return the name for log lines."""
        return type(self).__name__

    def doRead(self) -> Any:
        """Read what has arrived."""
        return readFromFD(0, self._feed)

    def _feed(self, data: bytes) -> None:
        for command, content in self._lines.feed(data):
            self._take(command, content)

    def connectionLost(self, reason: Failure) -> None:
        """Tell the end of stdin."""
        self._reactor.removeReader(self)
        self._take(None, b"")


class OutputGatherer:
    """Sender of one stream of the evaluator, in few frames.

    A frame takes the daemon 20 microseconds, whatever its size: evaluators that print each byte by
    itself would keep the daemon from everything else. The first bytes after a pause do not wait;
    without a pause the time between two frames doubles, so that a stream has 63 frames per second.
    """

    def __init__(self, clock: Any, send: Callable[[bytes], object]) -> None:
        self._clock = clock
        self._send = send
        self._data = bytearray()
        self._is_waiting = False
        self._pause = _GATHER

    def add(self, data: bytes) -> None:
        """Send bytes now or soon."""
        self._data += data
        if not self._is_waiting:
            self._on_time()
        elif len(self._data) >= _GATHERED:
            self.flush()

    def flush(self) -> None:
        """Send what waits."""
        if self._data:
            self._send(bytes(self._data))
            self._data.clear()

    def _on_time(self) -> None:
        self._is_waiting = bool(self._data)
        if self._is_waiting:
            self.flush()
            self._clock.callLater(self._pause, self._on_time)
            self._pause = min(2 * self._pause, _MOST_GATHER)
        else:
            self._pause = _GATHER


class NodeRun(ProcessProtocol):
    """The evaluator on the node: sends its output and its outcome."""

    def __init__(
        self,
        job: JobDescription,
        run: SandboxedRun,
        threads: WorkerThreads,
        reactor: Any,
        *,
        has_own_files: bool = False,
    ) -> None:
        self._job = job
        self._run = run
        self._threads = threads
        self._reactor = reactor
        self._has_own_files = has_own_files
        self._writer = FrameWriter(reactor, 1, self._on_reader_lost)
        self._stdout, self._stderr = (
            OutputGatherer(reactor, partial(self._writer.write_frame, kind))
            for kind in (FrameKind.STDOUT, FrameKind.STDERR)
        )
        self._sent = 0  # bytes of stdout
        self._granted = STDOUT_WINDOW_BYTES
        self._excess: EvaluationFailure | None = None
        self._file_lock = DeferredLock()  # so that two answers do not mix
        self._tree_ended = Deferred[None]()
        self._is_connected = False
        self._has_told = False
        self.is_deserted = False
        self._process: ProcessTransport

    def start_evaluator(self, monitor: LimitMonitor) -> None:
        """Start the evaluator. Blocks, as this program has nothing else to do."""
        environment = os.environ
        begun = {"job": environment.get("SLURM_JOB_ID"), "node": environment.get("SLURMD_NODENAME")}
        self._writer.write_frame(FrameKind.EVALUATOR_STARTING, json.dumps(begun).encode())
        job, run = self._job, self._run
        if job.environment is not None:
            check_environment(job.environment)
        started = run.launch.start_evaluator(job.command, job.variables, job.directory)
        run.launch.connect_process(self, started)
        monitor.add_run(run.run_limits, self.stop)
        self._monitor = monitor
        CommandReader(self._reactor, self.execute_command)

    def makeConnection(self, transport: Any) -> None:
        """Connect the started process."""
        self._process = transport
        transport.on_broker_error = self._on_broker_error
        self._is_connected = True
        self._run.run_limits.first_process = transport
        super().makeConnection(transport)

    def _on_broker_error(self, reason: str) -> None:
        """Stop a run whose submission cannot run; srun passes the reason on."""
        print(f"tawebeval-run does not work: {reason}", file=sys.stderr)
        what = "the sandbox for the submission could not be started; submit again"
        self.stop(EvaluationFailure("lost", what))

    def execute_command(self, command: bytes | None, content: bytes) -> None:
        """Do what a line of the daemon says."""
        if command == GRANT:
            before, self._granted = self._granted, max(self._granted, int(content))
            if before <= self._sent < self._granted:
                self._process.resumeProducing()
        elif command == TERMINATE:
            self._signal(signal.SIGTERM)
        elif command == KILL:
            self._signal(signal.SIGKILL)
        elif command == READ:
            self._file_lock.run(self._send_file, *decode_file_request(content))
        elif command == END:
            self._writer.loseConnection()
        elif command is None:
            self._on_reader_lost()

    async def _send_file(self, token: bytes, path: str) -> None:
        """Send a file that the evaluator has named, of which few parts are in memory.

        If it is refused, send why.
        """
        job, refusal = self._job, None
        try:
            parts = job.workspace.read_file_parts(
                *(path, job.directory, job.limits.file, self._run.launch.workspace_view, _FILE_PART)
            )
            while part := await self._threads.run_in_thread(next, parts, b""):
                await self._writer.send_frame(FrameKind.FILE, token + part)
        except PipeClosed:
            return
        except FileRefused as error:
            refusal = str(error)
        except Exception:  # noqa: BLE001  (the daemon waits for an answer)
            refusal = f"{path!r} cannot be read: a defect of the node's program"
            Failure().printTraceback(sys.stderr)
        self._writer.write_frame(FrameKind.FILE_END, token + json.dumps(refusal).encode())

    def _on_reader_lost(self) -> None:
        """Kill the evaluator: nobody waits for it. After the outcome, end."""
        if self._has_told:
            if self._reactor.running:
                self._reactor.stop()
            return
        self._has_told = self.is_deserted = True
        self._granted = UNLIMITED_OFFSET  # nobody grants any more
        if self._is_connected:
            self._signal(signal.SIGKILL)
            self._process.resumeProducing()
        else:
            self._reactor.stop()

    def stop(self, failure: EvaluationFailure) -> None:
        """Kill a run over a limit."""
        self._excess = self._excess or failure
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process.is_running:
            self._run.end.send_signal(self._process, number)

    def outReceived(self, data: bytes) -> None:
        """Send stdout, and stop reading it where the grant ends."""
        self._check_delay()
        self._stdout.add(data)
        before = self._sent
        self._sent += len(data)
        if before < self._granted <= self._sent:
            self._process.pauseProducing()

    def errReceived(self, data: bytes) -> None:
        """Send stderr."""
        self._check_delay()
        self._stderr.add(data)

    def _check_delay(self) -> None:
        if self._process.pipe_read_cpu_seconds >= MAX_SLOW_READ_SECONDS:
            self.stop(_DELAYED)

    def _flush_output(self) -> None:
        self._stdout.flush()
        self._stderr.flush()

    def processExited(self, reason: Failure) -> None:
        """Kill what the evaluator has left."""
        Deferred.fromCoroutine(self._end_tree()).addErrback(self.fail)

    async def _end_tree(self) -> None:
        self._monitor.remove_run(self._run.run_limits)
        await self._run.end.kill_remaining_processes()
        self._flush_output()
        self._writer.write_frame(FrameKind.EVALUATOR_EXITED)
        self._process.read_remaining_output()
        self._tree_ended.callback(None)

    def processEnded(self, reason: Failure) -> None:
        """Tell the outcome: all output was sent."""
        status, number = 0, None
        if isinstance(reason.value, ProcessTerminated):
            status, number = reason.value.exitCode, reason.value.signal
        Deferred.fromCoroutine(self._conclude(status, number)).addErrback(self.fail)

    async def _conclude(self, status: int | None, number: int | None) -> None:
        await self._tree_ended
        run, outcome, over = self._run, dict[str, Any](), self._excess
        try:
            if lost := self._process.lost_reason:
                raise EvaluationFailure("lost", f"the evaluator was lost: {lost}")
            outcome["exit"] = attrs.astuple(run.end.interpret_exit(status, number))
        except EvaluationFailure as error:
            outcome["unstarted"] = encode_failure(error)
        waited = self._process.resource_usage
        usage = await self._threads.run_in_thread(run.run_limits.read_usage, waited)
        seconds = usage.cpu_seconds
        if seconds is None and waited is not None:
            seconds = waited.ru_utime + waited.ru_stime
        over = over or run.run_limits.check_memory()
        if outcome.get("exit") != (0, None):
            over = over or await self._threads.run_in_thread(run.run_limits.check, True)
        outcome["over"] = over and encode_failure(over)
        outcome["usage"] = [seconds, usage.peak_memory_bytes]
        await self._threads.run_in_thread(run.close)
        self._send_outcome(outcome)
        if self.is_deserted or not self._has_own_files:  # else it ends by `END`
            self._writer.loseConnection()

    def fail(self, failure: Failure) -> None:
        """Tell that the evaluator could not be run, or not to its end."""
        error = failure.value
        if isinstance(error, ConfigurationError):
            message = f"on the node {os.uname().nodename}: {error}"
        else:
            why = error.strerror if isinstance(error, OSError) else type(error).__name__
            message = f"the node {os.uname().nodename} could not run the evaluator: {why}"
            failure.printTraceback(sys.stderr)
        self.send_outcome({"unstarted": encode_failure(EvaluationFailure("lost", message))})

    def send_outcome(self, outcome: dict[str, Any]) -> None:
        """Send the last frame, and end."""
        self._send_outcome(outcome)
        self._writer.loseConnection()

    def _send_outcome(self, outcome: dict[str, Any]) -> None:
        self._has_told = True
        self._flush_output()
        self._writer.write_frame(FrameKind.OUTCOME, json.dumps(outcome).encode())


@attrs.frozen
class NodeWorkspace(Workspace):
    """The directories of an evaluation, but `output_directory`, which is on the node.

    In a shared directory the daemon has files of the same names.
    """

    output_directory: Path = attrs.field(kw_only=True)


def encode_failure(failure: EvaluationFailure) -> list[Any]:
    """Return a failure as JSON."""
    return [failure.reason, failure.message, dict(failure.extra_members)]


@contextmanager
def open_node_sandbox(
    settings: SandboxSettings, limits: LimitSettings, place: Path, orphans: OrphanReaper
) -> Iterator[BubblewrapSandbox]:
    """Set up the node's sandbox with its files in `place`, and end it in the end. Blocks.

    Its starter is there, too, and ends with it.

    Raises: ConfigurationError, OSError.
    """
    configuration = msgspec.structs.replace(Configuration(), sandbox=settings, limits=limits)
    with _open_node_cgroups() as cgroups:
        write_sandbox_files(place)
        trees = WritableTrees(place / "starter" / "socket")
        sandbox = open_bubblewrap(configuration, place, cgroups, orphans, trees)
        try:
            # The daemon reads files of the tree by the shared directory: no overlay of this node.
            trees.use_copies("on a node of a cluster")
            yield sandbox
        finally:
            close_sandbox(sandbox)


@contextmanager
def _open_node_cgroups() -> Iterator[CgroupManager]:
    """Make the parent of the evaluator's cgroup in those of the job, where its user may."""
    cgroups = open_cgroups(f"node-{os.getpid()}")
    try:
        yield cgroups
    finally:
        cgroups.remove_all_cgroups()


def check_environment(environment: Environment) -> None:
    """Check that an environment is on this node. Blocks. Raises: ConfigurationError."""
    root = environment.root
    if problem := find_environment_root_problem(root):
        what = f"the environment {environment.name!r} cannot be used: {problem.description}"
        raise ConfigurationError(
            what,
            f"run `tawebeval environment import` on the node, so that {root} is there"
            if environment.digest
            else f"make {root} on the node",
        )


@contextmanager
def make_temporary_directory(parent: Path | None = None) -> Iterator[Path]:
    """Make a directory of the node for this program's files, and remove it in the end. Blocks.

    It lies in `parent`, None for /tmp. Those that killed programs have left are removed first: a
    living one holds a lock. Raises: OSError.
    """
    parent = parent or Path(tempfile.gettempdir())
    for path in parent.glob(f"{_PLACE}*"):
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_ctime > _FRESH:
                with _open_locked(path):
                    remove_tree(path)
    place = Path(tempfile.mkdtemp(prefix=_PLACE, dir=parent))
    try:
        with _open_locked(place):
            yield place
    finally:
        with suppress(OSError):  # an evaluator is being killed still: the next program removes it
            remove_tree(place)


@contextmanager
def _open_locked(path: Path) -> Iterator[None]:
    """Hold the lock of a directory. Raises: OSError, if another process holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def main() -> None:
    """Run the job. Raises: OSError, ConfigurationError, WrongVersion, BrokenStream."""
    from twisted.internet import reactor as default_reactor

    reactor: Any = default_reactor
    is_received = sys.argv[1] == "--receive"
    parent = Path(sys.argv[2]) if is_received else None
    become_subreaper()
    os.umask(0o022)
    spawner = Spawner(reactor)
    orphans = OrphanReaper(reactor, spawner)
    threads = WorkerThreads.create(reactor, _THREADS, "work", abandons_running_calls=True)
    with make_temporary_directory(parent) as place, ExitStack() as opened:
        job = (
            receive_files(place, opened) if is_received else read_job_description(Path(sys.argv[1]))
        )
        sandbox = opened.enter_context(open_node_sandbox(job.sandbox, job.limits, place, orphans))
        threads.start()
        workspace = NodeWorkspace(job.root, output_directory=place / "output")
        run = NodeRun(
            job,
            sandbox.make_run(workspace, job.make_checkout(), job.limits, job.environment),
            threads,
            reactor,
            has_own_files=is_received,
        )

        def begin() -> None:
            try:
                # The run learns of a starter that ends, too.
                sandbox.writable_trees.attach(reactor, threads.run_in_thread, lambda: None)
                run.start_evaluator(LimitMonitor(reactor, threads, threads))
            except Exception:  # noqa: BLE001  (the daemon waits for an outcome)
                run.fail(Failure())

        reactor.callWhenRunning(begin)
        reactor.run()
    if run.is_deserted:
        cancel_own_job()


def receive_files(place: Path, opened: ExitStack) -> JobDescription:
    """Receive a job description with its files, before the reactor runs.

    Slurm ends a job by SIGTERM first. Raises: OSError, WrongVersion, BrokenStream; StreamEnded, if
    srun may be gone: then the job is cancelled.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))

    def send(kind: FrameKind) -> None:
        os.write(1, encode_frame(kind))

    try:
        with open(0, "rb", closefd=False) as stream:
            return receive_job(stream, place, opened.enter_context, send)
    except StreamEnded:
        cancel_own_job()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def cancel_own_job() -> None:
    """Cancel the job of this program, as far as the node can. Blocks."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["scancel", os.environ["SLURM_JOB_ID"]],
            env=build_command_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_TIMEOUT,
            check=False,
        )


def check_node(path: Path) -> None:
    """Print what evaluators would find on this node, for `tawebeval doctor`.

    `path` is a file of the shared directory, or "-" for stdin. Blocks. Raises: OSError.
    """
    from twisted.internet import reactor

    report: dict[str, Any] = {
        "node": os.environ.get("SLURMD_NODENAME", os.uname().nodename),
        "python": platform.python_version(),
        "token": None,
        "problem": None,
        "has_memory_cgroup": False,
        "cache_problem": None,
        "environments": [],
    }
    try:
        told = json.loads(sys.stdin.read() if path.name == "-" else path.read_bytes())
    except OSError as error:
        what = f"{path}, which the daemon has written, cannot be read: {error.strerror}"
        remedy = "mount the directory runner.shared on all nodes, under the same path"
        report["problem"] = [what, remedy]
    else:
        report["token"] = told["token"]
        sandbox = msgspec.convert(told["sandbox"], SandboxSettings)
        parent = told["directory"] and Path(told["directory"])
        try:
            orphans = OrphanReaper(reactor, Spawner(reactor))
            with (
                make_temporary_directory(parent) as place,
                open_node_sandbox(sandbox, LimitSettings(), place, orphans) as opened,
            ):
                found = probe_bubblewrap(opened)
                report["problem"] = found and list(found)
                if parent:
                    check_free_disk(place, told["free_disk"])
                    if limit := told["cache"]:
                        report["cache_problem"] = TreeCache.open(parent, limit, place).problem
                report["has_memory_cgroup"] = "memory" in opened.cgroup_manager.enforced_resources
        except ConfigurationError as error:
            report["problem"] = list(error.problem)
        except OSError as error:
            what = f"runner.node_directory: {told['directory']}: {error.strerror}"
            remedy = "make the directory, where the daemon's user can write, on a disk with room"
            report["problem"] = [what, remedy]
        report["environments"] = list(find_missing_environments(told["environments"]))
    print(json.dumps(report), flush=True)


def find_missing_environments(
    environments: Iterable[tuple[str, str, Mapping[str, str]]],
) -> Iterator[list[str]]:
    """Yield the problem with each environment that evaluators cannot use on this node. Blocks."""
    for name, root, variables in environments:
        try:
            check_environment(Environment(name, Path(root), variables))
        except ConfigurationError as error:
            yield list(error.problem)


def run_job() -> None:
    """Run the job in the file of the command line. Raises: SystemExit, with a message."""
    try:
        if sys.argv[1] == "--check":
            check_node(Path(sys.argv[2]))
        else:
            main()
    except (BrokenStream, OSError, ConfigurationError, WrongVersion) as error:
        what = "the daemon sends a broken stream: " if isinstance(error, BrokenStream) else ""
        sys.exit(format_node_message(os.uname().nodename, f"{what}{error}"))
