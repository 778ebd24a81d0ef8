r"""Library for evaluators: results, runs of the submission, comparison of output.

    import os, sys
    sys.path.insert(0, os.environ["EVALUATION_TOOLS"] + "/lib")
    import segi

    segi.require(1)
    solution = segi.prepare(segi.find_submission("source"))
    judgement = solution.fault
    if not judgement:
        result = solution.run("3 4\n", time=2)
        judgement = result.fault or segi.compare_tokens(result.stdout, "7")
    segi.send_goal("correct", judgement.is_accepted)

Programs of the submission run in a sandbox of their own, as by `tawebeval-run`: they see nothing of
the evaluator. Times are in seconds, sizes in bytes. Python 3.9 or newer; nothing else is needed.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import select
import signal
import socket
import stat
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypedDict

if TYPE_CHECKING:
    import random
    from typing import Literal, Unpack

    Content = str | bytes | Path
    """Text, bytes, or the path of a file with them."""

    Verdict = Literal[
        "accepted",
        "wrong_answer",
        "time_limit",
        "memory_limit",
        "output_limit",
        "runtime_error",
        "compile_error",
        "partial",
        "skipped",
        "judge_error",
    ]

VERSION = 1
"""Of this library. Later versions keep what is here."""
MIB = 2**20
"""Bytes of a mebibyte."""
CANNOT_JUDGE = 3
"""The exit status of an evaluator that lacks something."""

_SOCKET = "/evaluation/runner"
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp"}  # noqa: S108
_CHUNK = 64 * 1024
_EXCERPT = 100  # characters of what was expected or printed
_MESSAGE = 2000  # characters of a compiler's output: six bytes of JSON each
_STRAYS = 1.0  # seconds for what is printed after the end of a program
_MOST_POINTS = 2**53  # that the daemon counts
_JAVA_EXCEPTION = re.compile(rb'^Exception in thread "[^\r\n]*', re.MULTILINE)
# Of Python, Java, Node.js and Go: their exit status is 1 or 2, as of a checker that refuses.
_CRASH = re.compile(
    rb'^(?:[ +|]*(?:Exception Group )?Traceback \(most recent|[ ]*File ".*", line [0-9]+\r?$|'
    rb'Exception in thread "|Error: (?:Could not find or load main|Main method not found|'
    rb"Unable to access jar)|    at .*:[0-9]+:[0-9]+\)?\r?$|panic: |"
    rb"\S*python[0-9.]*: (?:can't|Error|No module))",
    re.MULTILINE,
)
_PARTLY = re.compile(rb"partially correct \(([0-9]{1,9})\) ?")
# Unambiguous, so that no long word takes quadratic time.
_NUMBER = re.compile(rb"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def require(version: int) -> None:
    """End the evaluator with an error if this library is older than `version`."""
    if version > VERSION:
        sys.exit(f"the evaluator needs version {version} of segi; this server has {VERSION}")


# --- Events ---


def send(*values: object) -> None:
    """Send each value as a data event: anything that JSON has. Also in the middle of a line."""
    lines = [json.dumps(value, allow_nan=False, ensure_ascii=False) for value in values]
    if lines:  # an empty line is no JSON
        _write_block("DATA", "\n".join(lines).encode(errors="replace"))


def send_goal(goal: str, reached: bool) -> None:
    """Send whether the submission reached a goal."""
    send({"type": "goal_result", "goal": goal, "result": reached})


def send_case(
    name: str,
    judgement: Judgement,
    result: Result | None = None,
    *,
    points: float | None = None,
    stdin: Content = b"",
    show_expected: bool = False,
) -> None:
    """Send the judgement of a test case, with the time and memory of `result`.

    `points` are those of the judgement if None. Of the input `stdin` an excerpt is sent, of the
    expected output only with `show_expected`: who sees it can print it in the next submission.
    """
    case: dict[str, object] = {"type": "case", "case": name, "verdict": judgement.verdict}
    if points is not None or judgement.points is not None:
        case["points"] = judgement.points if points is None else points
    if result is not None:
        case.update(time=result.cpu_seconds, memory=result.peak_memory_bytes)
    texts = {
        "message": judgement.message,
        "input": _read_excerpt(stdin),
        "expected": judgement.expected if show_expected else "",
        "printed": judgement.printed,
    }
    send({**case, **{key: text for key, text in texts.items() if text}})


def send_progress(done: int, total: int) -> None:
    """Send how much of the evaluation is done."""
    send({"type": "progress", "done": done, "total": total})


def send_score(score: float, maximum: float) -> None:
    """Send the submission's score, and the highest that it could have reached."""
    send({"type": "score", "score": score, "maximum": maximum})


def send_file(name: str, content: Content, content_type: str = "application/octet-stream") -> None:
    """Send a file. One of a path is read later: leave it unchanged until the evaluator's end."""
    from urllib.parse import quote

    header = (
        f"Content-Type: {content_type}\n"
        f"Content-Disposition: attachment; filename*=UTF-8''{quote(name, '', errors='replace')}\n"
        f"X-SEGI-As: {'path' if isinstance(content, Path) else 'content'}\n\n"
    )
    body = os.fsencode(content.absolute()) if isinstance(content, Path) else _encode(content)
    _write_block("FILE", header.encode() + body)


def _write_block(kind: str, body: bytes) -> None:
    begin, end = (os.environ[f"EVALUATION_{kind}_{side}"].encode() for side in ("BEGIN", "END"))
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n%b\n%b\n%b\n" % (begin, body, end))
    sys.stdout.buffer.flush()


# --- The submission ---


def cannot_judge(missing: str, message: str) -> NoReturn:
    """Send what the evaluator lacks, in place of goals, and exit."""
    print(message)
    send({"type": "cannot_judge", "missing": missing, "message": message})
    sys.exit(CANNOT_JUDGE)


def find_submission(field: str) -> Path:
    """Return the path of the file that was submitted in a field; exit if there is none."""
    path = os.environ.get(f"SUBMISSION_FILE_{field.upper()}")
    if not path:
        cannot_judge(field, f"Nothing to judge: the field submission[{field}] is missing.")
    # The name may have bytes that are not UTF-8, which `print` would refuse.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Path(path)


def make_random(name: str = "") -> random.Random:
    """Return a generator of random numbers that the evaluation's seed and `name` determine."""
    import random

    seed = int(os.environ["TURINGARENA_SEED"])
    return random.Random(f"{seed} {name}" if name else seed)  # noqa: S311


class Judgement(NamedTuple):
    """The verdict on one test case; excerpts of what was expected and printed."""

    verdict: Verdict
    message: str = ""
    expected: str = ""
    printed: str = ""
    points: float | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether the verdict is "accepted"."""
        return self.verdict == "accepted"


ACCEPTED = Judgement("accepted")
"""The judgement without a fault."""


# --- Runs ---


class RunError(Exception):
    """A program that could not be run, without a fault of the submission. str() is the reason."""


class Output(NamedTuple):
    """What a program of the submission wrote into a file; empty if `fault` says why not."""

    content: bytes = b""
    fault: Judgement | None = None


def read_output(path: str | Path, most: int = 16 * MIB) -> Output:
    """Read a file of at most `most` bytes that a program of the submission has written.

    A symbolic link, also in place of a directory, and a hard link could lead to files that the
    program must not read, such as the expected output. They are faults, as is all but a regular
    file. Links above the evaluator's own directories are followed.
    """
    parent, name = os.path.split(os.path.abspath(path))
    base = "/"
    for own in (os.getcwd(), os.environ["TEMPORARY_DIRECTORY"], os.environ["HOME"]):
        if len(own) > len(base) and f"{parent}/".startswith(f"{own}/"):
            base = own
    directory = os.open(base, os.O_PATH)
    try:
        for each in filter(None, parent[len(base) :].split("/")):
            flags = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY
            above, directory = directory, os.open(each, flags, dir_fd=directory)
            os.close(above)
        # Without waiting for the writer of a FIFO.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except FileNotFoundError:
        return Output(fault=Judgement("wrong_answer", f"{name} is missing"))
    except OSError:
        return Output(fault=Judgement("wrong_answer", f"{name} is a link or no readable file"))
    finally:
        os.close(directory)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            return Output(fault=Judgement("wrong_answer", f"{name} is a link or no readable file"))
        with open(file, "rb", closefd=False) as opened:
            content = opened.read(most + 1)
    finally:
        os.close(file)
    if len(content) > most:
        return Output(fault=Judgement("output_limit", f"{name} has over {most} bytes"))
    return Output(content)


class Options(TypedDict, total=False):
    """Limits and files of a run. Without one, the evaluation's holds.

    Of its `memory` and `processes`, a run without a limit may use three quarters.

    - `time`: processor time of all processes; `wall`: the time until the end.
    - `memory` of all processes; `processes`: their number, threads included.
    - `output`: bytes on stdout and stderr; `file_size`: bytes of each file.
    - `read`, `write`: files and directories that the program may read, or also write. Their paths
      are the same in the sandbox. A pair of paths names another one there.
    - `directory`: where the program starts; `environment`: its variables.
    """

    time: float | None
    wall: float | None
    memory: int | None
    processes: int | None
    output: int | None
    file_size: int | None
    read: Iterable[str | Path | tuple[str, str]]
    write: Iterable[str | Path | tuple[str, str]]
    directory: str | Path
    environment: Mapping[str, str]


class Result(NamedTuple):
    """How a program ended: by an exit status, a signal, or a limit (`reason`).

    `reason` is None, "time", "wall", "memory", "processes" or "output".
    """

    exit_status: int | None
    signal: int | None
    reason: str | None
    cpu_seconds: float
    wall_seconds: float
    peak_memory_bytes: int
    stdout: bytes
    stderr: bytes

    @property
    def fault(self) -> Judgement | None:
        """The judgement of a program that failed; None after exit status 0."""
        if self.reason == "processes":
            return Judgement("runtime_error", "too many processes")
        if self.reason == "output":
            return Judgement("output_limit", "printed too much")
        if self.reason == "memory":
            mebibytes = round(self.peak_memory_bytes / MIB)
            return Judgement("memory_limit", f"stopped at its limit of {mebibytes} MiB of memory")
        if self.reason == "time":
            message = f"stopped after {self.cpu_seconds:.1f} s of processor time"
            return Judgement("time_limit", message)
        if self.reason is not None:
            return Judgement("time_limit", f"stopped after {self.wall_seconds:.1f} s")
        if self.signal is not None:
            with suppress(ValueError):  # a real-time signal has no name
                return Judgement("runtime_error", f"killed by {signal.Signals(self.signal).name}")
            return Judgement("runtime_error", f"killed by signal {self.signal}")
        if self.exit_status:
            found = _JAVA_EXCEPTION.search(self.stderr)  # before the lines of its stack
            line = found[0] if found else self.stderr.rstrip().rpartition(b"\n")[2]
            message = f"exit status {self.exit_status}"
            return Judgement("runtime_error", f"{message}: {_shorten(line)}" if line else message)
        return None


def run(command: Sequence[str | Path], stdin: Content = b"", **options: Unpack[Options]) -> Result:
    """Run a program of the submission in a sandbox of its own, and wait for its end.

    `wall` is 5 times `time` and 5 s if it is not given. `output` is 16 MiB, as
    the evaluator holds it in memory. A large `stdin` takes least memory as a Path.

    Raises: RunError.
    """
    with (
        open(stdin, "rb") if isinstance(stdin, Path) else io.BytesIO(_encode(stdin)) as source,
        start(command, **options) as program,
    ):
        while (chunk := source.read(_CHUNK)) and program._send(chunk):
            pass
        return program.finish()


def start(command: Sequence[str | Path], **options: Unpack[Options]) -> Program:
    r"""Start a program of the submission to talk to, with the defaults of `run`. Raises: RunError.

    with segi.start(command, time=2) as program:
        program.write("1000\n")
        guess = program.read_line()
        result = program.finish()
    """
    return Program(command, _complete(options))


def _complete(options: Options) -> Options:
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise TypeError(f"unknown option {min(unknown)!r}; the options are {known}")
    limit = options.get("time")
    variables = {"PATH": os.environ.get("PATH", os.defpath), **options.get("environment", {})}
    defaults: Options = {"wall": None if limit is None else 5 * limit + 5, "output": 16 * MIB}
    return {**defaults, **options, "environment": variables}


class Program:
    """A running program of the submission, behind pipes. Leaving `with` kills it.

    `take_stdout` and `take_stderr`, both or none, get what it prints in the thread that waits; with
    None it is kept for the result, and `write` reads it, too. Several threads may write and read.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        options: Options,
        *,
        take_stdout: Callable[[bytes], object] | None = None,
        take_stderr: Callable[[bytes], object] | None = None,
    ) -> None:
        limit = options.get("output")
        self._left = float("inf") if limit is None else limit
        self._stdout, self._stderr = bytearray(), bytearray()
        self._is_cut = False
        self._report: dict[str, Any] | None = None
        self._error: RunError | None = None  # in place of the report
        self._last_read = float("inf")  # when to give up reading, after the end
        self._lock = threading.Lock()  # around what was ready, never while waiting
        kind = _Sandboxed if os.path.exists(_SOCKET) else _Unsandboxed
        self._process = kind([os.fspath(word) for word in command], options)
        stdin, *outputs = self._process.streams
        self._input = [stdin]  # until it is closed, by whatever thread
        os.set_blocking(stdin, take_stdout is not None)
        takers = (take_stdout or self._stdout.extend, take_stderr or self._stderr.extend)
        self._takers: dict[int, Callable[[bytes], object]] = {}
        self._takers.update(zip(outputs, takers))  # noqa: B905  (Python 3.9)
        for descriptor in self._takers:
            os.set_blocking(descriptor, False)  # another thread may have read it
        self._output = outputs[0]

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def write(self, text: str | bytes) -> None:
        """Write to the program's input; meanwhile keep what it prints.

        That the program has ended shows when it is read from. Raises: RunError.
        """
        self._send(_encode(text))

    def _send(self, content: bytes) -> bool:
        """Write to the program's input; tell whether it may read more. Raises: RunError."""
        data = memoryview(content)
        with suppress(OSError, IndexError):
            while data:
                try:
                    data = data[os.write(self._input[0], data) :]
                except BlockingIOError:
                    if not self._wait_for_more(self._input[0]):
                        return False
            return True
        return False

    def close_input(self) -> None:
        """Let the program read the end of its input."""
        with suppress(IndexError):
            os.close(self._input.pop())

    def read_line(self, most: int = 64 * 1024) -> str | None:
        """Return the next line without its newline; None at the end of the output.

        Of a line that is longer than `most` bytes, return the beginning.
        """
        while (end := self._stdout.find(b"\n", 0, most + 1)) < 0 and len(self._stdout) <= most:
            if self._output not in self._takers or not self._wait_for_more():
                break
        if not self._stdout:
            return None
        line = self._stdout[: most if end < 0 else end]
        del self._stdout[: len(line) if end < 0 else end + 1]
        return line.decode(errors="replace")

    def wait(self) -> dict[str, Any]:
        """Wait for the program's end; return the report of `tawebeval-run`. Raises: RunError."""
        try:
            while self._wait_for_more():
                pass
        finally:
            self._close()
        if self._report is None:
            raise self._error or AssertionError("it has ended")
        if self._is_cut and self._report["reason"] is None:  # it has ended before it was stopped
            self._report["reason"] = "output"
        return self._report

    def finish(self) -> Result:
        """Close the program's input, and return the result after its end, with unread output.

        Raises: RunError.
        """
        self.close_input()
        return _make_result(self.wait(), self._stdout, self._stderr)

    def kill(self) -> None:
        """Kill the program with all its processes; `finish` returns what was read until then."""
        with self._lock:
            if not self._has_ended():
                self._process.stop("output")
                with suppress(RunError):
                    self._read_report()
                report = self._report
                if report and report["signal"] == signal.SIGKILL and report["reason"] == "output":
                    report["reason"] = "output" if self._is_cut else None
            self._close()

    def _has_ended(self) -> bool:
        return self._report is not None or self._error is not None

    def _read_report(self) -> None:
        try:
            self._report = self._process.wait()
        except RunError as error:
            self._error = error
            raise

    def _close(self) -> None:
        self.close_input()
        for descriptor in self._takers:
            os.close(descriptor)
        self._takers.clear()

    def _wait_for_more(self, writing: int | None = None) -> bool:
        """Wait for output, for the end, or until `writing` can be written to; False after both.

        Raises: RunError.
        """
        poll = select.poll()
        with self._lock:
            has_ended = self._has_ended()
            if has_ended and not self._takers:
                return False
            for descriptor in self._takers:
                poll.register(descriptor, select.POLLIN)
            if not has_ended:
                poll.register(self._process.fileno(), select.POLLIN)
        if writing is not None:
            poll.register(writing, select.POLLOUT)
        if not has_ended:
            ready = poll.poll()
        else:  # without a sandbox, a stray process may hold the pipes open
            ready = poll.poll(1000 * max(self._last_read - time.monotonic(), 0))
        with self._lock:
            if not ready:
                self._close()
            for descriptor, _ in ready:
                if descriptor in self._takers:
                    self._take(descriptor)
                elif not self._has_ended() and descriptor == self._process.fileno():
                    self._read_report()
                    self._last_read = time.monotonic() + _STRAYS
        return True

    def _take(self, descriptor: int) -> None:
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            del self._takers[descriptor]
            os.close(descriptor)
            return
        kept = chunk[: int(min(len(chunk), self._left))]
        self._left -= len(kept)
        self._takers[descriptor](kept)
        if len(kept) < len(chunk) and not self._is_cut:
            self._is_cut = True
            self._process.stop("output")


def _keep_beginning(kept: bytearray, chunk: bytes) -> None:
    kept.extend(chunk[: max(MIB - len(kept), 0)])


def _make_result(report: dict[str, Any], stdout: bytes | bytearray, stderr: bytearray) -> Result:
    known = {name: report[name] for name in Result._fields if name in report}
    return Result(**known, stdout=bytes(stdout), stderr=bytes(stderr))


class Interaction(NamedTuple):
    """How two programs that talked to each other ended: without stdout, and 1 MiB of stderr."""

    solution: Result
    interactor: Result
    has_interactor_ended_first: bool
    """Whether the interactor ended first. A program that fails because the other one has ended
    ends after it."""


def interact(
    solution: tuple[Sequence[str | Path], Options],
    interactor: tuple[Sequence[str | Path], Options],
    accept: int = 0,
) -> Interaction:
    """Run two commands, each with its options, and connect stdin and stdout of both.

    When one has ended, the other one reads the end of its input. An interactor that ends with
    another status than `accept` ends the solution. Raises: RunError.
    """
    programs: list[Program] = []
    reports: list[dict[str, Any]] = [{}, {}]
    order: list[int] = []
    errors: list[bytearray] = [bytearray(), bytearray()]
    failures: list[RunError] = []

    def relay(this: int) -> None:
        other = programs[1 - this]
        try:
            reports[this] = programs[this].wait()
        except RunError as error:
            failures.append(error)
        order.append(this)  # before the other one can notice
        other.close_input()
        if failures or (this == 1 and reports[1]["exit_status"] != accept):
            other.kill()

    try:
        for this, (command, options) in enumerate((solution, interactor)):
            programs.append(
                Program(
                    command,
                    _complete(options),
                    take_stdout=lambda chunk, this=this: programs[1 - this].write(chunk),  # type: ignore[misc]
                    take_stderr=partial(_keep_beginning, errors[this]),
                )
            )
        threads = [threading.Thread(target=relay, args=[this]) for this in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for program in programs:
            program.kill()
    if failures:
        raise failures[0]
    results = [_make_result(reports[this], b"", errors[this]) for this in (0, 1)]
    return Interaction(results[0], results[1], order[0] == 1)


class _Sandboxed:
    """A program that the daemon's side runs: it gets a request, and sends a report at the end.

    `streams` are the caller's ends of stdin, stdout and stderr.
    """

    def __init__(self, command: list[str], options: Options) -> None:
        request: dict[str, Any] = {
            "version": 4,
            "command": command,
            "directory": os.path.normpath(options.get("directory", "/tmp")),  # noqa: S108
            "environment": dict(options.get("environment", {})),
            "read": [_resolve(path) for path in options.get("read", ())],
            "write": [_resolve(path) for path in options.get("write", ())],
        }
        for name in ("time", "wall", "memory", "processes", "file_size"):
            if options.get(name) is not None:
                request[name] = options[name]
        self.streams: list[int] = []
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connection.connect(_SOCKET)
            self._connection.send(json.dumps(request).encode())
            answer = self._receive_streams()
            if not self.streams:
                _read_report(answer)  # which has the error
        except OSError as error:
            self._close()
            raise RunError(f"no sandbox for the program: {error.strerror}") from None
        except RunError:
            self._close()
            raise

    def _receive_streams(self) -> bytes:
        """Receive the first answer, with descriptors unless it is an error. Raises: OSError.

        Not by socket.recv_fds(), which ignores its flags: other programs would inherit them.
        """
        numbers = array("i")
        room = socket.CMSG_LEN(3 * numbers.itemsize)
        answer, control, flags, _ = self._connection.recvmsg(_CHUNK, room, socket.MSG_CMSG_CLOEXEC)
        for _, _, content in control:
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
        self.streams.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return answer

    def _close(self) -> None:
        self._connection.close()
        for descriptor in self.streams:
            os.close(descriptor)

    def fileno(self) -> int:
        """Return a descriptor that is readable at the end."""
        return self._connection.fileno()

    def stop(self, reason: str) -> None:
        """Have the program killed, for a reason."""
        with suppress(OSError):
            self._connection.send(reason.encode())

    def wait(self) -> dict[str, Any]:
        """Return the report. Raises: RunError."""
        with self._connection:
            try:
                answer = self._connection.recv(_CHUNK)
            except ConnectionResetError:  # the report was sent before the word to stop was read
                answer = self._connection.recv(_CHUNK)
        return _read_report(answer)


def _read_report(answer: bytes) -> dict[str, Any]:
    """Return a report. Raises: RunError, for an error in place of it."""
    if not answer:
        raise RunError("the sandbox has ended before the program")
    report: dict[str, Any] = json.loads(answer)
    if "error" in report:
        raise RunError(report["error"])
    return report


def _resolve(path: str | Path | tuple[str, str]) -> tuple[str, str]:
    """Return the path without links, and the path in the sandbox."""
    source, target = path if isinstance(path, tuple) else (path, os.path.abspath(path))
    return os.path.realpath(source), os.path.normpath(target)


class _Unsandboxed:
    """A program where the evaluator itself has no sandbox: only limits hold.

    `streams` are as in `_Sandboxed`.
    """

    def __init__(self, command: list[str], options: Options) -> None:
        import subprocess

        self._limit = options.get("time")
        self._reason: str | None = None
        limits = {
            "core": 0,
            # Twice as much: the kernel compares it with ticks.
            "cpu": None if self._limit is None else math.ceil(2 * self._limit) + 1,
            "data": options.get("memory"),
            "fsize": options.get("file_size"),
        }
        words = [f"--{name}={limit}" for name, limit in limits.items() if limit is not None]
        self._begin = time.monotonic()
        try:
            self._process = subprocess.Popen(
                ["/usr/bin/prlimit", *words, "--", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=options.get("directory", "/tmp"),  # noqa: S108
                env={**_ENVIRONMENT, **options.get("environment", {})},
                start_new_session=True,
            )
        except OSError as error:
            raise RunError(str(error)) from None
        self.streams = []
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with pipe:
                    self.streams.append(os.dup(pipe.fileno()))
        self._descriptor = os.pidfd_open(self._process.pid)
        self._timer = threading.Timer(options.get("wall") or 0, self.stop, ["wall"])
        if options.get("wall") is not None:
            self._timer.daemon = True
            self._timer.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable at the end."""
        return self._descriptor

    def stop(self, reason: str) -> None:
        """Kill the process group, for a reason."""
        self._reason = self._reason or reason
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> dict[str, Any]:
        """Return the report of the program, which has ended."""
        self._timer.cancel()
        with suppress(ProcessLookupError):  # before its number can be another's
            os.killpg(self._process.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self._process.pid, 0)
        os.close(self._descriptor)
        wall, cpu = time.monotonic() - self._begin, usage.ru_utime + usage.ru_stime
        code = self._process.returncode = os.waitstatus_to_exitcode(status)
        if self._limit is not None and cpu >= self._limit:
            self._reason = self._reason or "time"
        elif code == -signal.SIGXFSZ:
            self._reason = self._reason or "output"
        return {
            "exit_status": None if code < 0 else code,
            "signal": -code if code < 0 else None,
            "reason": self._reason,
            "cpu_seconds": round(cpu, 6),
            "wall_seconds": round(wall, 6),
            "peak_memory_bytes": usage.ru_maxrss * 1024,
            "measured": {"cpu_seconds": "rusage", "peak_memory_bytes": "rusage"},
            "sandbox": False,
        }


# --- Languages ---


class Language(NamedTuple):
    """How to build and run a source file.

    In the words, `{source}` is its path, `{build}` an empty directory, and `{name}` the file's name
    without its ending; for Java, the class that has `main`, under its package. The words that
    begin with `java` and `javac` get options for the memory of the run, which yours override.
    """

    build: Sequence[str]
    run: Sequence[str]


_CHECK_PYTHON = """
import sys, tokenize, traceback
try:
    with tokenize.open(sys.argv[1]) as source:
        source.read()
    compile(open(sys.argv[1], "rb").read(), sys.argv[1], "exec")
except (SyntaxError, ValueError) as error:
    sys.exit("".join(traceback.format_exception_only(error)))
"""
_GCC = ("-O2", "-Wall", "-o", "{build}/solution", "{source}", "-lm")
# A virtual machine takes its heap from the memory of the host: give it the limit of the run. That
# is the limit of the stack in the sandbox (elsewhere the stack has 8 MiB); without cgroups that of
# the data, in which whole stacks count. Sizes are in KiB.
_RUN_JAVA = """
data=$(ulimit -d) size=$(ulimit -s) option=
[ "$data" = unlimited ] || size=$data
[ "$size" != unlimited ] && [ "$size" -gt 8192 ] || exec "$0" "$@"
stack=$((size / 4))
[ "$stack" -le 65536 ] || stack=65536
if [ "$data" = unlimited ]; then heap=$((size - 65536)) others=$stack
else heap=$((size - 49152 - stack)) others=1024; fi
[ "$heap" -ge "$stack" ] || heap=$stack
[ "$0" = java ] || option=-J
exec "$0" "$option-Xms$((heap / 4))k" "$option-Xmx${heap}k" "$option-Xss${stack}k" \
    "$option-XX:ThreadStackSize=$others" "$option-XX:+UseSerialGC" "$@"
"""

LANGUAGES: Mapping[str, Language] = {
    ".c": Language(("gcc", "-std=c17", "-x", "c", *_GCC), ("{build}/solution",)),
    ".cpp": Language(("g++", "-std=c++17", "-x", "c++", *_GCC), ("{build}/solution",)),
    ".java": Language(
        ("javac", "-encoding", "UTF-8", "-d", "{build}", "{source}"),
        ("java", "-cp", "{build}", "{name}"),
    ),
    ".py": Language(
        ("python3", "-I", "-c", _CHECK_PYTHON, "{source}"), ("python3", "-I", "-B", "{source}")
    ),
    ".sh": Language(("bash", "-n", "{source}"), ("bash", "{source}")),
}
"""The languages of solutions, by the endings of their files, which may also be in capitals."""
_ENDINGS = {".cc": ".cpp", ".cxx": ".cpp", ".c++": ".cpp", ".py3": ".py", ".bash": ".sh"}


class Solution(NamedTuple):
    """A submitted program that is ready to run, unless `fault` says why not."""

    command: Sequence[str]
    files: Sequence[str | Path]
    """What the program may read."""
    fault: Judgement | None = None
    build_seconds: float = 0.0

    def run(self, stdin: Content = b"", **options: Unpack[Options]) -> Result:
        """Run the solution; see `run`."""
        return run(self.command, stdin, **self._add_files(options))

    def start(self, **options: Unpack[Options]) -> Program:
        """Start the solution; see `start`."""
        return start(self.command, **self._add_files(options))

    def interact(
        self,
        interactor: Solution,
        arguments: Sequence[str | Path] = (),
        limits: Options | None = None,
        accept: int = 0,
        **options: Unpack[Options],
    ) -> Interaction:
        """Let the solution talk to another program, with `arguments` and `limits`; see `interact`.

        `options` are those of the solution.
        """
        command = [*interactor.command, *arguments]
        own = (self.command, self._add_files(options))
        return interact(own, (command, interactor._add_files(limits or {})), accept)

    def _add_files(self, options: Options) -> Options:
        return {**options, "read": [*self.files, *options.get("read", ())]}


def find_ending(source: Path) -> str:
    """Return the key of `LANGUAGES` for a file, or its own ending, in lower case."""
    ending = source.suffix.lower()
    return _ENDINGS.get(ending, ending)


def prepare(
    source: Path, languages: Mapping[str, Language] = LANGUAGES, **options: Unpack[Options]
) -> Solution:
    """Build the program of a source file, in a sandbox that has only this file.

    `options` are those of the compiler, 30 s of `time` and files of 64 MiB without any; files of
    `read` are added. Exits by `cannot_judge` if the compiler is missing. Raises: RunError.
    """
    ending = find_ending(source)
    language = languages.get(source.suffix) or languages.get(ending)
    if language is None:
        endings = ", ".join(languages)
        message = f"{source.name}: a solution is a file that ends in {endings}"
        return Solution((), (), Judgement("compile_error", message))
    import shutil

    for program in (language.build[0], language.run[0]):
        if "{" not in program and shutil.which(program) is None:
            cannot_judge(program, f"This machine cannot build {source.name}: it has no {program}.")
    build, name = make_directory(), source.stem
    directories = (source.parent, build)
    files: Sequence[str | Path] = [source]
    if ending == ".java":
        source, name = _copy_java(source, build)
        files = []
    names = {"source": str(source), "build": str(build), "name": name}
    command, running = (
        [
            *(("sh", "-c", _RUN_JAVA) if words[0] in ("java", "javac") else ()),
            *(word.format_map(names) for word in words),
        ]
        for words in language
    )
    limits: Options = {"time": 30, "wall": 60, "output": MIB, "file_size": 64 * MIB}
    if "time" in options:
        del limits["wall"]
    places: Options = {
        "read": [*files, *options.get("read", ())],
        "write": [build, *options.get("write", ())],
        "directory": build,
    }
    given: Options = {**limits, **options, **places}
    result = run(command, **given)
    fault = result.fault
    if fault:
        text = (result.stdout + result.stderr).decode(errors="replace").rstrip()
        for directory in directories:
            text = text.replace(f"{directory}/", "")
        fault = Judgement("compile_error", text[:_MESSAGE] or fault.message)
    return Solution(running, [*files, build], fault, result.cpu_seconds)


# Comments and literals: an unclosed one ends with the line or the file.
_JAVA_TEXT = re.compile(
    r"""//[^\r\n]*|/\*.*?(?:\*/|\Z)|\"{3}(?:\\.|[^\\])*?(?:\"{3}|\Z)"""
    r"""|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?""",
    re.DOTALL,
)
_JAVA_WORD = re.compile(
    r"[{};]|\b(?:public|static)\b|\bvoid\s+main\s*\("
    r"|\b(?:class|interface|enum|record)\s+([\w$]+)"
)


def _copy_java(source: Path, build: Path) -> tuple[Path, str]:
    """Copy a source file as Java wants it: under the name of its public class, without a BOM.

    Return the copy, and the class that has `main`, under its package.
    """
    text = source.read_bytes()
    text = text[3:] if text.startswith(b"\xef\xbb\xbf") else text
    code = _JAVA_TEXT.sub(" ", text.decode(errors="replace"))
    package = re.search(r"\bpackage\s+([\w$.]+)\s*;", code)
    stem, public, depth = source.stem, "", 0
    words: set[str] = set()
    classes: list[str] = []
    mains: list[str] = []
    for word in _JAVA_WORD.finditer(code):
        if word[0] in "{};":
            depth += {"{": 1, "}": -1, ";": 0}[word[0]]
            words.clear()
        elif word[1] and depth == 0:
            classes.append(word[1])
            if "public" in words and len(os.fsencode(word[1])) < 250:  # the name of a file
                public = word[1]
        elif depth == 1 and classes and word[0].endswith("(") and "static" in words:
            mains.append(classes[-1])
        words.add(word[0])
    copy = build / f"{public or stem}.java"
    copy.write_bytes(text)
    name = next((each for each in (stem, public, *mains) if each in mains), public or stem)
    return copy, f"{package[1]}.{name}" if package else name


def make_directory() -> Path:
    """Return a new directory, which is removed after the evaluation."""
    import tempfile

    return Path(tempfile.mkdtemp(dir=os.environ["TEMPORARY_DIRECTORY"]))


# --- Comparison ---


def compare_exact(printed: str | bytes, expected: str | bytes) -> Judgement:
    """Compare each byte."""
    return compare_parts("line", _split_lines(printed), _split_lines(expected))


def compare_tokens(printed: str | bytes, expected: str | bytes) -> Judgement:
    """Compare words; spaces and newlines only separate them."""
    return compare_parts("word", _split_words(printed), _split_words(expected))


def compare_floats(
    printed: str | bytes,
    expected: str | bytes,
    *,
    absolute: float = 1e-9,
    relative: float = 1e-9,
) -> Judgement:
    """Compare words, of which numbers may differ: by `absolute`, or `relative` to the larger."""

    def are_close(one: bytes, other: bytes) -> bool:
        if one == other:
            return True
        number, wanted = parse_number(one), parse_number(other)
        if number is None or wanted is None:
            return False
        return math.isclose(number, wanted, rel_tol=relative, abs_tol=absolute)

    return compare_parts("word", _split_words(printed), _split_words(expected), are_close)


def run_checker(
    command: Sequence[str | Path],
    *,
    stdin: str | bytes,
    printed: str | bytes,
    expected: str | bytes = b"",
    **options: Unpack[Options],
) -> Judgement:
    """Let a program judge: its last arguments are files with the input, output and answer.

    It ends as `judge_by_checker` says, and runs as by `run`: name its files in `read`. Raises:
    RunError.
    """
    directory = make_directory()
    paths = [directory / name for name in ("input", "output", "answer")]
    for path, content in zip(paths, (stdin, printed, expected)):  # noqa: B905  (Python 3.9)
        path.write_bytes(_encode(content))
    options["read"] = [*options.get("read", ()), directory]
    result = run([*command, *paths], **options)
    for path in paths:
        path.unlink()
    return judge_by_checker(result)


def judge_by_checker(result: Result) -> Judgement:
    """Return what a checker or an interactor says by its end.

    As with testlib, exit status 0 accepts, 1, 2, 4 and 8 refuse, and 7 gives the points with which
    stderr begins, maybe behind the word "points". Points of `_pc(n)` are n. The rest of stderr is
    the message. An uncaught exception, which also ends with 1, is an error of the checker.
    """
    text, fault = result.stderr.strip(), result.fault
    # A status over 128 counts as a signal.
    status = result.exit_status if result.signal is None else 128 + result.signal
    partly = _PARTLY.match(text) if result.reason is None else None
    # The status of _pc(n) is n, or with other versions of testlib 16 or 50 more.
    if partly and status in [(int(partly[1]) + base) % 256 for base in (0, 16, 50)]:
        return Judgement("partial", _shorten(text[partly.end() :]), points=float(partly[1]))
    has_crashed = status in (1, 2) and _CRASH.search(text) is not None
    if fault and (has_crashed or result.reason is not None or status not in (1, 2, 4, 7, 8)):
        return Judgement("judge_error", f"checker: {fault.message}")
    if status != 7:
        return Judgement("wrong_answer" if status else "accepted", _shorten(text))
    text = text[len(b"points ") :] if text.startswith(b"points ") else text
    if text.startswith(b"points_info="):  # for another program: no number
        return Judgement("partial", _shorten(text))
    first, text = [*text.split(None, 1), b"", b""][:2]
    points = parse_number(first)
    if points is None or abs(points) > _MOST_POINTS:
        return Judgement("judge_error", f"checker: no points in {_shorten(first)!r}")
    return Judgement("partial", _shorten(text), points=points)


def parse_number(word: bytes) -> float | None:
    """Return the number that a word is; None if it is none, or too large for a float."""
    number = float(word) if _NUMBER.fullmatch(word) else math.inf
    return number if math.isfinite(number) else None


def compare_parts(
    kind: str,
    printed: Iterable[bytes],
    expected: Iterable[bytes],
    are_same: Callable[[bytes, bytes], bool] = bytes.__eq__,
) -> Judgement:
    """Compare words, lines or other parts one by one; a message has their `kind` and number."""
    for number, (one, other) in enumerate(zip_longest(printed, expected), start=1):
        if one is None:
            message = f"{kind} {number} missing"
        elif other is None:
            message = f"{kind} {number} unexpected"
        elif are_same(one, other):
            continue
        else:
            message = f"{kind} {number} differs"
        return Judgement("wrong_answer", message, _shorten(other or b""), _shorten(one or b""))
    return ACCEPTED


# One by one: a list of the words of a long output would need much memory.
def _split_words(text: str | bytes) -> Iterator[bytes]:
    return (found[0] for found in re.finditer(rb"\S+", _encode(text)))


def _split_lines(text: str | bytes) -> Iterator[bytes]:
    return (found[0] for found in re.finditer(rb"[^\n]*\n|[^\n]+", _encode(text)))


def _shorten(text: bytes) -> str:
    shown = text[: 4 * _EXCERPT + 4].decode(errors="replace")  # not cut within the excerpt
    return shown if len(shown) <= _EXCERPT else f"{shown[: _EXCERPT - 3]}..."


def _read_excerpt(content: Content) -> str:
    if isinstance(content, Path):
        with open(content, "rb") as file:
            content = file.read(4 * _EXCERPT + 4)
    return _shorten(_encode(content[: 4 * _EXCERPT + 4]))


def _encode(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
