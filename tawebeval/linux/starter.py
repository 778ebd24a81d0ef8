"""The starter of programs: a program by itself, which knows nothing of tawebeval.

The starter is the parent of all programs that it starts, so they outlive its clients. It imports
the standard library, and modules that do the same: an upgrade of tawebeval does not change a
running starter.

A client writes the file `start` into a directory, and names the directory. The starter forks, and
the child mounts an overlay if it is to, enters cgroups, sets limits and executes the program. The
starter moves what the program prints from pipes into files by splice(2), and writes down how the
program has ended. All of that is in files of the directory, which a later client can read:

| file | content |
| --- | --- |
| start | what to start, a JSON object: see `LaunchSpec` |
| stdout, stderr | what the program has printed, up to the limits and one byte |
| exit | how the program ended, a JSON object: see `Program.describe_state` |
| broker-stderr | what the broker has printed on stderr |

Programs never get the files: they cannot truncate, map or reopen them.

Clients connect to a UNIX socket of the type SOCK_SEQPACKET. A request is one message: a JSON object
with `request`; most have `name`, which is the path of the directory.

| request | effect | members of the answer |
| --- | --- | --- |
| version | | `version`, `pid`, `cgroups`, `mount_problem`: see below |
| start | start the program of the directory | `pid`, `start_time_ticks`; the overlay's top |
| tree | | the overlay's top |
| list | send a notice of each program, and one of "" | |
| signal | send the signal `number` to the process group | |
| close | read what the pipes hold now, and close them: other processes may hold them, too | |
| forget | kill the program, and drop all that is known of it | |
| look | send a notice of the program | |
| attach | from now on send a notice of each program that ends, or whose output fails | |

A request with `id`, an integer, is answered; the answer repeats `id`. An overlay's top is a
descriptor (SCM_RIGHTS). The answer to a request that fails has `error`, a text, `errno` and
`path`; each may be null. A notice is a message with `notice`, the name, and the members of the file
`exit`, or with `is_unknown`.

`start_time_ticks` is field 22 of proc(5)'s stat: with `pid` it names one process of this boot.
`mount_problem` is why no overlay can be mounted, null if it can. To mount them the starter is in a
user namespace of its own, in which it has all capabilities. Programs inherit none.

Bounds, so that neither a client nor a program harms others:

- A request has at most `MAX_MESSAGE_BYTES` bytes, and `start` at most `MAX_START_FILE_BYTES`. A
  client that sends nonsense, or does not read its answers, is disconnected; of each program it gets
  one notice later.
- A program that would need one of the last `RESERVED_FD_COUNT` descriptors is refused (EMFILE).
- Each pipe is read once in a turn, `MAX_PIPE_READ_BYTES` at most, and only up to its limit and one
  byte.
- Each read wakes all epoll instances that watch the pipe. Once such reads have taken
  `MAX_SLOW_READ_CPU_SECONDS` of processor time, the program's pipes are read no more.
- Once the disk takes no byte the pipe is read no more, and the program waits. It is told
  (`write_errno`): a client kills the program.
- Nothing waits for a child to execute its program. If its client has gone before that, the program
  is killed.

Arguments: the name for process lists; the path of the socket, in a directory that only this user
may enter; optionally the process whose end ends the starter, which has to be its parent. The
environment variable `CGROUP_DESCRIPTION_VARIABLE` has a text for clients, which describes the
cgroups of programs and which the starter removes at its end. SIGTERM kills all programs and ends
the starter, once they are gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import resource
import select
import shlex
import signal
import socket
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from tawebeval.linux.kernel_files import (
    CgroupDirectory,
    call_libc,
    is_pid_in_use,
    make_sealed_memfd,
    prctl,
    read_process_stat,
    remove_parent_cgroup,
    shorten_socket_path,
)

PROCESS_NAME = "tawebeval-starter"
"""The name of the process in process lists."""
CGROUP_DESCRIPTION_VARIABLE = "TAWEBEVAL_CGROUPS"
"""The environment variable whose value `version` returns."""
PROTOCOL_VERSION = 5
"""The version of requests and answers."""
MAX_MESSAGE_BYTES = 64 * 1024
"""The maximum size of a request and of an answer, in bytes."""
MAX_START_FILE_BYTES = 4 * 2**20
"""The maximum size of a file `start`, in bytes."""
RESERVED_FD_COUNT = 256
"""The number of descriptors that are never used for programs."""
STARTER_FDS_PER_PROGRAM = 7
"""The maximum number of descriptors that the starter needs for one program with its broker."""
FIRST_PROGRAM_DESCRIPTOR = 3
"""The number of the first of a program's `descriptors`; the others follow."""
MAX_PROGRAM_DESCRIPTORS = 13
"""The maximum number of a program's `descriptors`."""
MAX_PIPE_READ_BYTES = 256 * 1024
"""The maximum number of bytes that are read from a pipe in one turn; the size of full pipes."""
MAX_SLOW_READ_CPU_SECONDS = 0.25
"""Seconds of processor time that slow reads of one program's output may take."""
OOM_SCORE_ADJ = 500
"""What programs have, so that the kernel kills them before others (proc(5))."""

_SLOW = 0.005  # seconds of processor time, a hundred times as long as a read takes
_INTEGER_BYTES = 4  # of a descriptor in a message
_RETRY = 0.25  # seconds until what has failed is tried again
_MAX_END_SECONDS = 5  # for the end of killed programs
_END_PAUSE = 0.002  # seconds between two looks for it
_TERMINATION = (signal.SIGTERM, signal.SIGINT)
_BACKLOG = 128
_FAILED = 127  # the exit status of a child that could not execute the program
_UMASK = 0o022
_PRIVATE = 0o600  # the mode of files
_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_LAST_OF_PROGRAMS = FIRST_PROGRAM_DESCRIPTOR + MAX_PROGRAM_DESCRIPTORS

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_MS_NOSUID, _MS_NODEV = 2, 4

# With attributes that a user may set, and without synchronising the whole file system when it is
# unmounted. Not with `xino=on` or `auto`, of which the kernel logs a line for each mount.
_OVERLAY = "lowerdir={},upperdir={},workdir={},userxattr,xino=off,volatile"


class LaunchSpec(NamedTuple):
    """A program to start, as the file `start` has it.

    - `argv`, `environment`, `directory`: those of the program; its umask is 022, its stdin empty.
    - `descriptors`: what the program has open from `FIRST_PROGRAM_DESCRIPTOR` on. Each is an object
      with one member: `text`, the content of a file in memory; `read` or `append`, a
      path; or `socket`, in a broker, its listening socket.
    - `procs_files`: the files of cgroups to which the process writes "0" to enter.
    - `rlimits`: soft and hard limit by the names of prlimit(1). The starter's own hard limit stands
      if it is lower.
    - `niceness`: the increment over the starter's nice value.
    - `overlay_directories`: lower, upper and work directory of an overlay, which is mounted over
      the upper one for the program alone (the kernel's filesystems/overlayfs); empty without.
    - `has_own_process_limit`: the process has a user namespace of its own, so that it shares no
      limit of a user with others.
    - `stdout_limit`, `stderr_limit`: bytes that are read, and one more.
    - `broker_specification`: of a program that serves the socket `broker_socket_path`. It is
      started with the first connection, in the mount namespace of the program, and killed after it.
    """

    argv: Sequence[str]
    environment: Mapping[str, str] = {}
    directory: str = "/"
    descriptors: Sequence[Mapping[str, str]] = ()
    procs_files: Sequence[str] = ()
    rlimits: Mapping[str, tuple[int, int]] = {}
    niceness: int = 0
    overlay_directories: Sequence[str] = ()
    has_own_process_limit: bool = False
    stdout_limit: int = 2**62
    stderr_limit: int = 2**62
    broker_specification: Any = None
    broker_socket_path: str | None = None

    def build_json_object(self) -> dict[str, Any]:
        """Return the content of the file `start`."""
        return {
            **self._asdict(),
            "broker_specification": self.broker_specification
            and self.broker_specification._asdict(),
        }


class OutputPipe:
    """A pipe whose bytes go to `file`, a descriptor: `limit` bytes and one more at most.

    `size` is the number of bytes in the file. `error` is the errno by which the file took no more;
    None if it takes more. `slow_read_cpu_seconds` is the processor time of slow reads.
    """

    def __init__(self, path: str, limit: int) -> None:
        """Make the file, and the pipe, whose end `writing` the caller closes. Raises: OSError."""
        self.file = os.open(path, _FILE_FLAGS | os.O_TRUNC, _PRIVATE)
        try:
            self.pipe, self.writing = os.pipe2(os.O_CLOEXEC)
        except OSError:
            os.close(self.file)
            raise
        os.set_blocking(self.pipe, False)
        self._limit = limit
        self._pipe_size = fcntl.fcntl(self.pipe, fcntl.F_GETPIPE_SZ)
        self.size = 0
        self.error: int | None = None
        self.slow_read_cpu_seconds = 0.0
        self.is_open = True

    @property
    def is_over_limit(self) -> bool:
        """Whether the limit is exceeded: nothing more is read."""
        return self.size > self._limit

    def move_chunk(self) -> None:
        """Move bytes that the pipe holds; at its end close it."""
        began = time.thread_time()
        try:
            moved = os.splice(
                self.pipe,
                self.file,
                min(MAX_PIPE_READ_BYTES, self._limit + 1 - self.size),
                offset_dst=self.size,
                flags=os.SPLICE_F_NONBLOCK,
            )
        except BlockingIOError:
            return
        except OSError as error:
            self.error = error.errno
            return
        self.size += moved
        if not moved:
            self.close()
            return
        if moved >= self._pipe_size:
            self._enlarge()
        took = time.thread_time() - began
        if took > _SLOW:
            self.slow_read_cpu_seconds += took

    def _enlarge(self) -> None:
        """Enlarge a pipe that was full, for its writer waits; not at the user's limit of pages."""
        with contextlib.suppress(OSError):
            self._pipe_size = fcntl.fcntl(self.pipe, fcntl.F_SETPIPE_SZ, MAX_PIPE_READ_BYTES)

    def move_rest(self) -> None:
        """Move what the pipe holds now, and close it."""
        if not self.is_open:
            return
        left = int.from_bytes(fcntl.ioctl(self.pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
        end, before = self.size + left, -1
        while self.is_open and before < self.size < end and not self.is_over_limit:
            before = self.size
            self.move_chunk()
        self.close()

    def close(self) -> None:
        """Close the pipe and the file."""
        if self.is_open:
            self.is_open = False
            os.close(self.pipe)
            os.close(self.file)


class Broker:
    """The broker of a program: its listening socket, and its process once there is one."""

    def __init__(self, specification: LaunchSpec, listening: socket.socket) -> None:
        self.specification = specification
        self.listening = listening
        self.pid = 0
        self.error: str | None = None

    def refuse_connections(self) -> None:
        """Refuse connections from now on, whoever else has a descriptor of the socket."""
        if self.listening.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
            self.listening.setblocking(False)
            while True:
                self.listening.accept()[0].close()
        self.listening.close()


class Program:
    """A program that was started, or is being started. `exit` is set when it has ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0
        self.start_time_ticks = 0
        self.top: int | None = None
        self.outputs: Sequence[OutputPipe] = ()
        self.broker: Broker | None = None
        self.exit: dict[str, Any] | None = None
        self.is_started = False  # it executes the program, and its client knows
        self.is_forgotten = False

    @property
    def is_output_complete(self) -> bool:
        """Whether the program has ended, and its pipes are closed."""
        return self.exit is not None and not any(output.is_open for output in self.outputs)

    @property
    def slow_read_cpu_seconds(self) -> float:
        """The processor time of slow reads, in seconds."""
        return sum(output.slow_read_cpu_seconds for output in self.outputs)

    def describe_state(self) -> dict[str, Any]:
        """Return the content of the file `exit`, and of notices.

        - `wait_status`, `rusage`: as of wait4(2); `time`: of the end, in seconds since the epoch.
          The three are missing while the program runs.
        - `is_output_complete`: whether all that was printed is in the files.
        - `write_errno`: the errno by which the disk has not taken output; null if it has.
        - `slow_read_cpu_seconds`: the processor time of slow reads.
        - `broker_pid`: the running broker, null without; `broker_error`: why it cannot be started.
        """
        errors = [output.error for output in self.outputs if output.error is not None]
        return {
            **(self.exit or {}),
            "pid": self.pid,
            "start_time_ticks": self.start_time_ticks,
            "is_output_complete": self.is_output_complete,
            "write_errno": errors[0] if errors else None,
            "slow_read_cpu_seconds": self.slow_read_cpu_seconds,
            "broker_pid": self.broker and (self.broker.pid or None),
            "broker_error": self.broker and self.broker.error,
        }

    def write_exit_file(self) -> bool:
        """Write the file `exit`; return False if that is to be tried again."""
        path = f"{self.name}/exit"
        try:
            file = os.open(f"{path}.new", _FILE_FLAGS | os.O_TRUNC, _PRIVATE)
            try:
                os.write(file, json.dumps(self.describe_state()).encode())
            finally:
                os.close(file)
            os.rename(f"{path}.new", path)
        except OSError as error:
            # If the directory has gone nobody will ask for it.
            return error.errno == errno.ENOENT
        return True

    def close(self) -> None:
        """Close all descriptors."""
        for output in self.outputs:
            output.close()
        if self.top is not None:
            os.close(self.top)
        self.top = None

    def send_signal(self, number: int) -> None:
        """Send a signal to the process group, also after the program's own end.

        The kernel gives the number to no other process before this process is reaped and its group
        is empty.
        """
        with contextlib.suppress(OSError):
            if self.exit is None or not is_pid_in_use(self.pid):
                os.killpg(self.pid, number)
        if self.exit is None:  # it may not lead its group yet
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)


class Client:
    """A connected client. `notices` are the names of programs of which it is yet to be told."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_attached = False
        self.notices: dict[str, None] = {}


class Starter:
    """All programs and clients."""

    def __init__(
        self, listening: socket.socket, max_descriptors: int, mount_problem: str | None
    ) -> None:
        self._listening = listening
        self._max_programs = (max_descriptors - RESERVED_FD_COUNT) // STARTER_FDS_PER_PROGRAM
        self._mount_problem = mount_problem
        self._poll = select.poll()  # not epoll, whose watches evaluators of this user can exhaust
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._clients: set[Client] = set()
        self._programs: dict[str, Program] = {}
        self._children: dict[int, Program] = {}  # programs and brokers that are not reaped yet
        self._woken, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._is_terminated = False
        for number in _TERMINATION:
            signal.signal(number, self._on_termination)
        self._repeated: list[Callable[[], None]] = []  # calls of what has failed
        self._repeat_time = 0.0

    def serve(self) -> NoReturn:
        """Serve all clients and programs. Raises: SystemExit, after SIGTERM."""
        self._watch(self._listening.fileno(), self._accept_client)
        self._watch(self._woken, self._reap_children)
        try:
            while not self._is_terminated:
                for number, events in self._poll.poll(_RETRY * 1000 if self._repeated else None):
                    # An earlier handler of this round may have closed it.
                    if handler := self._handlers.get(number):
                        handler(events)
                self._repeat_calls()
        finally:
            self._listening.close()  # so that another starter may take the place
            for program in self._programs.values():
                program.send_signal(signal.SIGKILL)
                self._kill_broker(program)
            _wait_for_children()
            _leave_cgroup(os.environ.get(CGROUP_DESCRIPTION_VARIABLE) or "{}")
        raise SystemExit(0)

    def _on_termination(self, number: int, frame: FrameType | None) -> None:
        # The loop ends between two handlers: an exception could lose a program that one has forked.
        self._is_terminated = True

    def _watch(
        self, number: int, handler: Callable[[int], None], events: int = select.POLLIN
    ) -> None:
        self._handlers[number] = handler
        self._poll.register(number, events)

    def _unwatch(self, number: int) -> None:
        if self._handlers.pop(number, None):
            self._poll.unregister(number)

    def _repeat_later(self, call: Callable[[], None]) -> None:
        if not self._repeated:
            self._repeat_time = time.monotonic() + _RETRY
        self._repeated.append(call)

    def _repeat_calls(self) -> None:
        if self._repeated and time.monotonic() >= self._repeat_time:
            calls, self._repeated = self._repeated, []
            for call in calls:
                call()

    # Clients

    def _accept_client(self, events: int) -> None:
        try:
            connection, _ = self._listening.accept()
        except (ConnectionError, BlockingIOError):
            return  # the client has gone
        except OSError:  # the machine has no free descriptor
            number = self._listening.fileno()
            self._unwatch(number)
            self._repeat_later(partial(self._watch, number, self._accept_client))
            return
        connection.setblocking(False)
        client = Client(connection)
        self._clients.add(client)
        self._watch(connection.fileno(), lambda events: self._serve_client(client, events))

    def _serve_client(self, client: Client, events: int) -> None:
        if events & select.POLLOUT:
            self._send_notices(client)
        if not events & ~select.POLLOUT or client not in self._clients:
            return
        try:
            # Not recv_fds(): descriptors that a client sends are closed by the kernel.
            message = client.connection.recvmsg(MAX_MESSAGE_BYTES)[0]
        except (ConnectionResetError, BlockingIOError):
            # A client that dies with unread answers resets the connection. The kernel reports this
            # once, before the requests that the client has sent.
            return
        except OSError:
            message = b""
        if not message:
            self._close_client(client)
            return
        try:
            request = json.loads(message)
            try:
                answer = self._answer(client, request)
            except OSError as error:
                answer = _describe_error(error)
            if answer is not None:
                self._send_answer(client, {"id": request.get("id"), **answer})
        except Exception as error:  # noqa: BLE001  (nonsense, or a defect, must end nothing else)
            with contextlib.suppress(OSError):  # such as a full disk
                print(f"{PROCESS_NAME}: a request fails: {error!r:.200}", file=sys.stderr)
            self._close_client(client)

    def _close_client(self, client: Client) -> None:
        if client not in self._clients:
            return
        self._unwatch(client.connection.fileno())
        self._clients.discard(client)
        client.connection.close()

    def _answer(self, client: Client, request: dict[str, Any]) -> dict[str, Any] | None:
        """Execute a request; return its answer, None if that comes later."""
        what = request["request"]
        if what == "version":
            return {
                "version": PROTOCOL_VERSION,
                "pid": os.getpid(),
                "cgroups": os.environ.get(CGROUP_DESCRIPTION_VARIABLE, ""),
                "mount_problem": self._mount_problem,
            }
        if what == "list":
            client.notices.update(dict.fromkeys([*self._programs, ""]))
            self._send_notices(client)
            return {}
        if what == "attach":
            client.is_attached = True
            return {}
        name = request["name"]
        if what == "look":
            self._notify(client, name)
            return {}
        if what == "start":
            self._start(client, name, request.get("id"))
            return None
        program = self._programs.get(name)
        if program is None:
            raise ProcessLookupError(errno.ESRCH, "no such program", name)
        if what == "signal":
            program.send_signal(request["number"])
        elif what == "close":
            self._close_output(program)
        elif what == "forget":
            self._forget(program)
        elif what == "tree":
            top = [] if program.top is None else [program.top]
            self._send_answer(client, {"id": request.get("id")}, top)
            return None
        else:
            raise OSError(errno.EINVAL, f"unknown request {what!r}")
        return {}

    def _send_answer(
        self, client: Client, answer: Mapping[str, Any], descriptors: Sequence[int] = ()
    ) -> None:
        if answer["id"] is None:
            return
        try:
            socket.send_fds(client.connection, [json.dumps(answer).encode()], descriptors)
        except OSError as error:
            if descriptors and error.errno == errno.ETOOMANYREFS:
                failure = {"id": answer["id"], **_describe_error(error)}
                self._send_answer(client, failure)
            else:  # it has gone, or does not read its answers
                self._close_client(client)

    def _notify_all(self, program: Program) -> None:
        for client in list(self._clients):
            if client.is_attached:
                self._notify(client, program.name)

    def _notify(self, client: Client, name: str) -> None:
        client.notices[name] = None
        self._send_notices(client)

    def _send_notices(self, client: Client) -> None:
        number = client.connection.fileno()
        while client.notices:
            name = next(iter(client.notices))
            program = self._programs.get(name)
            notice = {"is_unknown": True} if program is None else program.describe_state()
            try:
                client.connection.send(json.dumps({"notice": name, **notice}).encode())
            except BlockingIOError:
                self._poll.modify(number, select.POLLIN | select.POLLOUT)
                return
            except OSError:
                self._close_client(client)
                return
            del client.notices[name]
        self._poll.modify(number, select.POLLIN)

    # The start

    def _start(self, client: Client, name: str, number: int | None) -> None:
        """Start a program; `_take_report` answers. Raises: OSError."""
        if name in self._programs:
            raise FileExistsError(errno.EEXIST, "was started already", name)
        if len(self._programs) >= self._max_programs:
            raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)} (RLIMIT_NOFILE)")
        specification = read_launch_spec(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{name}/exit")
        program = Program(name)
        with contextlib.ExitStack() as failing:
            failing.callback(program.close)
            if (
                specification.broker_specification is not None
                and specification.broker_socket_path is not None
            ):
                broker = LaunchSpec(**specification.broker_specification)
                program.broker = Broker(broker, _listen(specification.broker_socket_path))
                failing.callback(program.broker.listening.close)
            with contextlib.ExitStack() as writing:
                limits = {
                    "stdout": specification.stdout_limit,
                    "stderr": specification.stderr_limit,
                }
                ends = []
                for what, limit in limits.items():
                    output = OutputPipe(f"{name}/{what}", limit)
                    program.outputs = (*program.outputs, output)
                    writing.callback(os.close, output.writing)
                    ends.append(output.writing)
                report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                failing.callback(report.close)
                writing.callback(theirs.close)
                program.pid = _fork(lambda: _execute_program(specification, ends, theirs))
            failing.pop_all()
        self._programs[name] = self._children[program.pid] = program
        for output in program.outputs:
            self._watch(output.pipe, partial(self._move_output, program, output))
        if program.broker is not None:
            self._watch(
                program.broker.listening.fileno(), lambda events: self._start_broker(program)
            )
        report.setblocking(False)
        take = partial(self._take_report, program, report, client, number)
        self._watch(report.fileno(), take)

    def _take_report(
        self,
        program: Program,
        report: socket.socket,
        client: Client,
        number: int | None,
        events: int,
    ) -> None:
        """Take what the child tells until it executes the program or fails, and answer."""
        failure = None
        try:
            message, tops = receive_message(report)
            if tops:
                program.top = tops[0]
            told = json.loads(message or "{}")
            if "start_time_ticks" in told:
                program.start_time_ticks = told["start_time_ticks"]
                return
            if told:
                failure = told
            elif not program.start_time_ticks:
                raise OSError(errno.ECHILD, "the process was killed before it executed the program")
        except BlockingIOError:
            return
        except OSError as error:  # such as EMFILE
            failure = _describe_error(error)
        except ValueError as error:  # its end is cut off
            failure = _describe_error(OSError(errno.EMSGSIZE, str(error)))
        self._unwatch(report.fileno())
        report.close()
        answer = failure or {"pid": program.pid, "start_time_ticks": program.start_time_ticks}
        top = [] if failure or program.top is None else [program.top]
        self._send_answer(client, {"id": number, **answer}, top)
        if failure or client not in self._clients or program.is_forgotten:
            self._forget(program)
            return
        program.is_started = True
        if program.exit is not None:
            self._save(program)

    # Output

    def _move_output(self, program: Program, output: OutputPipe, events: int) -> None:
        pipe = output.pipe
        output.move_chunk()
        if not output.is_open:
            self._unwatch(pipe)
            if program.is_output_complete:
                self._save(program)
            return
        is_bad = output.is_over_limit or output.error is not None
        if is_bad or program.slow_read_cpu_seconds >= MAX_SLOW_READ_CPU_SECONDS:
            self._unwatch(pipe)
            self._notify_all(program)

    def _close_output(self, program: Program) -> None:
        was_complete = program.is_output_complete
        for output in program.outputs:
            if output.is_open:
                self._unwatch(output.pipe)
                output.move_rest()
        if program.is_output_complete and not was_complete:
            self._save(program)

    def _save(self, program: Program) -> None:
        """Write and tell the end, after the start, and once no process of the broker runs."""
        if program.is_started and (program.broker is None or not program.broker.pid):
            self._write_exit(program)
            self._notify_all(program)

    def _write_exit(self, program: Program) -> None:
        if not (program.is_forgotten or program.write_exit_file()):
            self._repeat_later(partial(self._write_exit, program))

    # The end

    def _reap_children(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            program = self._children.pop(pid, None)
            if program is None:  # an orphan
                continue
            if pid != program.pid:
                has_failed = os.waitstatus_to_exitcode(status) == _FAILED
                self._end_broker(program, "it could not be executed" if has_failed else None)
                continue
            program.exit = {"wait_status": status, "rusage": list(usage), "time": time.time()}
            self._kill_broker(program)
            self._save(program)

    def _forget(self, program: Program) -> None:
        if not program.is_forgotten:
            program.is_forgotten = True
            del self._programs[program.name]
            program.send_signal(signal.SIGKILL)
            self._kill_broker(program)
            for output in program.outputs:
                if output.is_open:
                    self._unwatch(output.pipe)
        program.close()

    # Brokers

    def _start_broker(self, program: Program) -> None:
        broker = program.broker
        assert broker is not None
        self._unwatch(broker.listening.fileno())
        mounts = None
        try:
            if program.top is not None:
                mounts = os.open(f"/proc/{program.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            broker.pid = _fork(lambda: _execute_broker(program.name, broker, mounts))
        except OSError as error:
            self._end_broker(program, str(error))
            return
        finally:
            if mounts is not None:
                os.close(mounts)
        self._children[broker.pid] = program
        self._notify_all(program)

    def _end_broker(self, program: Program, error: str | None) -> None:
        """Refuse connections after the end of a broker; `error` is why it could not run."""
        broker = program.broker
        assert broker is not None
        broker.pid = 0
        broker.refuse_connections()
        if program.exit is not None:
            self._save(program)
        elif not program.is_forgotten:
            broker.error = error
            self._notify_all(program)

    def _kill_broker(self, program: Program) -> None:
        broker = program.broker
        if broker is None:
            return
        if broker.pid:
            for kill in (os.killpg, os.kill):  # it may not lead its group yet
                with contextlib.suppress(OSError):
                    kill(broker.pid, signal.SIGKILL)
        elif broker.listening.fileno() >= 0:
            self._unwatch(broker.listening.fileno())
            broker.refuse_connections()


def _describe_error(error: OSError) -> dict[str, Any]:
    path = error.filename
    return {
        "error": str(error.strerror or error),
        "errno": error.errno,
        "path": os.fsdecode(path) if isinstance(path, (str, bytes)) else None,
    }


def receive_message(connection: socket.socket) -> tuple[bytes, Sequence[int]]:
    """Return a message, and the descriptor that came with it, which no program inherits.

    Not by socket.recv_fds(), which ignores its flags. Raises: OSError; with EMFILE, if the kernel
    has dropped the descriptor.
    """
    message, control, flags, _ = connection.recvmsg(
        MAX_MESSAGE_BYTES, socket.CMSG_LEN(_INTEGER_BYTES), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = [int.from_bytes(content, sys.byteorder) for _, _, content in control]
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return message, descriptors


def read_launch_spec(directory: str) -> LaunchSpec:
    """Read the file `start` of a directory. Raises: OSError."""
    path = f"{directory}/start"
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        content = file.read(MAX_START_FILE_BYTES + 1)
    if len(content) > MAX_START_FILE_BYTES:
        raise OSError(errno.E2BIG, os.strerror(errno.E2BIG), path)
    try:
        return LaunchSpec(**json.loads(content))
    except (ValueError, TypeError, RecursionError) as error:
        raise OSError(errno.EINVAL, str(error), path) from None


def _listen(path: str) -> socket.socket:
    """Return a listening socket at a path. Raises: OSError."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with shorten_socket_path(path) as short:
            listening.bind(short)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


# In the child


def _fork(execute: Callable[[], None]) -> int:
    """Return the number of a child that becomes a program. Raises: OSError."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _prepare_process()
        execute()
    except BaseException:  # noqa: BLE001  (the child must not go on as a second starter)
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(_FAILED)


def _prepare_process() -> None:
    """Set what is the same for all programs; `main` has done what programs inherit."""
    for number in _TERMINATION:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    os.umask(_UMASK)
    # The files of a process that is not dumpable are root's.
    prctl(_PR_SET_DUMPABLE, 1)
    with contextlib.suppress(OSError):  # it is higher already
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        os.write(score, b"%d" % OOM_SCORE_ADJ)


def _execute_program(
    specification: LaunchSpec, outputs: Sequence[int], report: socket.socket
) -> None:
    """Become a program; if that fails the report has the error."""
    try:
        entries = _open_procs_files(specification)
        tops = []
        if specification.overlay_directories:
            tops.append(mount_overlay(specification.overlay_directories))
        _take_place(specification, entries, outputs)
        told = {"start_time_ticks": int(read_process_stat("self")[19])}
        socket.send_fds(report, [json.dumps(told).encode()], tops)
        _execute(specification)
    except OSError as error:
        report.send(json.dumps(_describe_error(error)).encode())


def _execute_broker(name: str, broker: Broker, mounts: int | None) -> None:
    """Become the broker of a program, in a mount namespace; if that fails stderr has the error."""
    specification = broker.specification
    output = os.open(f"{name}/broker-stderr", _FILE_FLAGS | os.O_TRUNC, _PRIVATE)
    try:
        entries = _open_procs_files(specification)
        if mounts is not None:
            call_libc("setns", mounts, _CLONE_NEWNS)
        _take_place(specification, entries, (output, output), broker.listening.fileno())
        _execute(specification)
    except OSError as error:
        os.write(output, str(error).encode())


def _open_procs_files(specification: LaunchSpec) -> Sequence[int]:
    return [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in specification.procs_files]


def _take_place(
    specification: LaunchSpec,
    entries: Sequence[int],
    outputs: Sequence[int],
    listening: int | None = None,
) -> None:
    """Enter cgroups and the directory, and open descriptors."""
    for entry in entries:
        os.write(entry, b"0")
    os.nice(specification.niceness)
    given = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), *outputs]
    given += [_open_descriptor(each, listening) for each in specification.descriptors]
    os.chdir(specification.directory)
    for number, descriptor in enumerate(given):  # the highest is below those that were opened
        os.dup2(descriptor, number)


def _open_descriptor(source: Mapping[str, str], listening: int | None) -> int:
    ((kind, value),) = source.items()
    if kind == "socket" and listening is not None:
        return listening
    if kind == "text":
        return make_sealed_memfd("content", os.fsencode(value))
    if kind == "append":
        return os.open(value, _FILE_FLAGS | os.O_APPEND, _PRIVATE)
    return os.open(value, os.O_RDONLY | os.O_CLOEXEC)


def _execute(specification: LaunchSpec) -> None:
    if specification.has_own_process_limit:
        with contextlib.suppress(OSError):  # the limit counts for all of the user then
            enter_user_namespace()
    for name, (soft, hard) in specification.rlimits.items():  # last: they hold of this process, too
        number = getattr(resource, f"RLIMIT_{name.upper()}")
        own = resource.getrlimit(number)[1]
        if own != resource.RLIM_INFINITY:
            soft, hard = (own if one < 0 else min(one, own) for one in (soft, hard))
        resource.setrlimit(number, (soft, hard))
    argv = list(map(os.fsencode, specification.argv))
    os.execve(argv[0], argv, dict(specification.environment))  # noqa: S606  (no shell is wanted)


def mount_overlay(overlay_directories: Sequence[str]) -> int:
    """Mount an overlay over its upper directory, for this process alone; return its top.

    Raises: OSError, which says that it is of an overlay.
    """
    # By descriptors: no character of a path means anything, and evaluators learn no path.
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    place = os.fsencode(overlay_directories[1])
    how = _MS_NOSUID | _MS_NODEV
    try:
        call_libc("unshare", _CLONE_NEWNS)
        opened = [os.open(path, flags) for path in overlay_directories]
        options = _OVERLAY.format(*(f"/proc/self/fd/{descriptor}" for descriptor in opened))
        call_libc("mount", b"overlay", place, b"overlay", how, options.encode())
        return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        what = f"an overlay cannot be mounted: {error.strerror}"
        raise OSError(error.errno, what, error.filename) from None


def enter_user_namespace(more: int = 0) -> None:
    """Enter a new user namespace, and `more` (unshare(2)). Raises: OSError.

    The kernel counts there for this process apart what limits count for a user (getrlimit(2)).
    """
    user, group = os.getuid(), os.getgid()
    call_libc("unshare", _CLONE_NEWUSER | more)
    for name, line in (
        ("setgroups", b"deny"),
        ("uid_map", b"%d %d 1" % (user, user)),
        ("gid_map", b"%d %d 1" % (group, group)),
    ):
        with open(f"/proc/self/{name}", "wb", buffering=0) as file:
            file.write(line)


# The starter itself


def enter_mount_namespace() -> str | None:
    """Enter a namespace in which this process may mount; return why it cannot.

    A child tries first: there is no way back.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if not pid:
        try:
            enter_user_namespace(_CLONE_NEWNS)
        except OSError as error:
            os.write(writing, f"{error.filename or 'unshare(2)'}: {error.strerror}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        problem = file.read().decode()
    os.waitpid(pid, 0)
    if not problem:
        enter_user_namespace(_CLONE_NEWNS)
    return problem or None


def open_listening_socket(path: str) -> socket.socket:
    """Listen at a path. Raises: SystemExit, if others may enter its directory; OSError."""
    directory = os.path.dirname(path) or "."
    status = os.stat(directory)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        user = os.geteuid()
        command = shlex.join(["install", "-d", "-m", "700", "-o", str(user), directory])
        raise SystemExit(
            f"{PROCESS_NAME}: {path}: the directory must belong to the user {user} and have mode"
            f" 0700; as root: {command}"
        )
    new = f"{path}.new"  # so that the starter listens as soon as `path` exists
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other,
        shorten_socket_path(path) as short,
        contextlib.suppress(FileNotFoundError, ConnectionRefusedError),
    ):
        other.connect(short)
        raise SystemExit(f"{PROCESS_NAME}: {path}: another starter listens here")
    os.umask(0o077)
    listening = _listen(new)
    os.rename(new, path)
    listening.setblocking(False)
    return listening


def notify_systemd() -> None:
    """Tell systemd, if it has started this process, that it is ready (sd_notify(3))."""
    if path := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifying:
            notifying.sendto(b"READY=1", path.replace("@", "\0", 1) if path[0] == "@" else path)


def _occupy_low_descriptors() -> None:
    """Have nothing open under the numbers of a program's descriptors, besides stderr."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in range(_LAST_OF_PROGRAMS + 1):
        if number not in (null, 2):
            os.dup2(null, number, inheritable=False)
    os.set_inheritable(2, False)


def _set_signal_handlers() -> None:
    """Ignore no signal, which programs would inherit: what has a handler is default for them."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, lambda number, frame: None)
    for number in _TERMINATION:
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def prepare_parent_process() -> int:
    """Set what programs inherit; return the maximum number of descriptors."""
    with contextlib.suppress(OSError), open("/proc/self/coredump_filter", "w") as file:
        # Core dumps of programs contain no memory (core(5)). A handler of the machine would store
        # them as root, and where no limit counts them.
        file.write("0")
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_DUMPABLE, 0)
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _set_signal_handlers()
    _occupy_low_descriptors()
    # So that children copy fewer pages.
    gc.collect()
    gc.freeze()
    gc.disable()
    return hard


def main() -> None:
    """Listen, notify systemd and serve."""
    _, path, *parents = sys.argv[1:]
    mount_problem = enter_mount_namespace()
    for parent in parents:  # after the change of namespaces, which ends the setting
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            raise SystemExit(1)
    hard = prepare_parent_process()
    try:
        listening = open_listening_socket(path)
    except OSError as error:
        raise SystemExit(
            f"{PROCESS_NAME}: {path}: cannot listen there: {error.strerror or error}; name"
            " another path by --socket, in a directory of mode 700"
        ) from None
    os.chdir("/")
    notify_systemd()
    Starter(listening, hard, mount_problem).serve()


def _wait_for_children() -> None:
    """Wait until killed programs have left their cgroups, for `_MAX_END_SECONDS` at most.

    With bwrap all processes in the sandbox have ended: its first process becomes a child.
    """
    deadline = time.monotonic() + _MAX_END_SECONDS
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(_END_PAUSE)


def _leave_cgroup(description: str) -> None:
    """Move this process back to the cgroup that it was started in, and remove those below."""
    told = json.loads(description)
    if told.get("evaluations") is not None and told.get("own") is not None:
        parent, own = CgroupDirectory(told["evaluations"]), CgroupDirectory(told["own"])
        remove_parent_cgroup(parent, own, told["enabled"])
