"""The keeper of evaluators: a program of its own that outlives the daemon.

The keeper is the parent of evaluators, and holds descriptors for the daemon in *bundles*: a name, a
list of descriptors, and the number of one process or 0. A daemon that starts after a crash or an
upgrade gets all bundles back. The keeper never reads from a descriptor that it holds. It imports
the standard library only: an upgrade of tawebeval does not change a running keeper.

Clients connect to a UNIX socket of the type SOCK_SEQPACKET. A request is one message: a JSON object
with `request` (the names below) and `id`, an integer which the answer repeats; descriptors come
with the message (SCM_RIGHTS).

| request | members | descriptors | members of the answer |
| --- | --- | --- | --- |
| version | | | `version`, `pid` of the keeper, `cgroups`: see below |
| keep | `name`, `pid` | 1 to 16 | none: only an error is answered |
| drop | `name` | | none |
| list | `after` | | `bundles`: name, pid, number of descriptors; `after`; the descriptors |
| wait | `name`, `pid` | | `status` and `rusage` of wait4(2) |
| start | `argv` | stdin, stdout, stderr | `pid`, and a pidfd |
| reap_others | | | none |

- keep replaces a bundle of the same name. A process that the new bundle does not have is killed.
- drop kills a process that still runs. An unknown name is no error.
- list returns one page: the bundles behind `after`, which is 0 at first and then the answer's
  `after`. The page after the last one has no bundles.
- wait is for a process that has ended. The answer is the same until the bundle is dropped. If there
  is no bundle of this name, the answer is about the child `pid`, and is given once.
- start runs a program in a session of its own, without environment, in the directory `/`.
- reap_others reaps the ended children that belong to no bundle, after a time of grace: a keep may
  still be on its way.

The answer to a request that fails has `error`, a text, and `errno`, an integer or null.

Bounds, so that one client cannot harm another one:

- A request is at most `MAX_MESSAGE_BYTES` bytes. The keeper reads it only when the client's socket
  has room for an answer, so no answer is stored.
- `RESERVED_DESCRIPTORS` of the descriptors that the keeper may have (RLIMIT_NOFILE) are never used
  for bundles.
- Descriptors in flight are limited for each user, by RLIMIT_NOFILE of the sender. An evaluator can
  fill this only up to its own `limits.open_files`, far below the keeper's limit.
- Only without a sandbox do orphans of evaluators become children of the keeper. At most
  `_MAX_ENDED` of them are kept in grace.

Arguments: the name for process lists; the path of the socket, in a directory that only this
user may enter; and, for tests, the time of grace in seconds. The environment variable
`CGROUP_DESCRIPTION_VARIABLE` has a text for clients, which describes the cgroups of evaluations.
SIGTERM kills the processes of all bundles and ends the keeper.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import pwd
import resource
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
from array import array
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

PROCESS_NAME = "tawebeval-keeper"
"""The name of the process in process lists."""
CGROUP_DESCRIPTION_VARIABLE = "TAWEBEVAL_CGROUPS"
"""The environment variable whose value `version` returns."""
PROTOCOL_VERSION = 1
"""The version of requests and answers."""
MAX_MESSAGE_BYTES = 64 * 1024
"""The maximum size of a request and of an answer, in bytes."""
MAX_BUNDLE_DESCRIPTORS = 16
"""The maximum number of descriptors of a bundle."""
MAX_BUNDLE_NAME_LENGTH = 128
"""The maximum length of a bundle's name, which has printable ASCII characters only."""
REAP_DELAY_SECONDS = 30.0
"""Seconds after which an ended child that belongs to no bundle is reaped."""
MAX_DESCRIPTORS_PER_MESSAGE = 253
"""The maximum number of descriptors of an answer: SCM_MAX_FD, the kernel's limit of a message."""
# Descriptors of clients, of one request, of a program that is being started, and the keeper's own.
RESERVED_DESCRIPTORS = 128
"""The number of descriptors that are never used for bundles."""

_PAGE_BUNDLES = 128  # so that a page is smaller than `MAX_MESSAGE_BYTES`
_MAX_CLIENTS = 64
_MAX_ENDED = 1024  # children in grace: beyond it the oldest are reaped early
_BACKLOG = 128
_RETRY = 0.05  # seconds until the next accept(2) where the machine has no free descriptor
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36


class _RequestError(Exception):
    """A request that is not executed."""


class KeptBundle:
    """Descriptors with a name, and the number of one process, or 0.

    `serial` is unique and increases with each bundle. `exit` has the status and the usage of the
    process once it is reaped. `is_child` is False for a process whose exit status is lost.
    """

    __slots__ = ("descriptors", "exit", "is_child", "pid", "serial")

    def __init__(self, serial: int, pid: int, descriptors: Sequence[int]) -> None:
        self.serial = serial
        self.pid = pid
        self.descriptors = descriptors
        self.exit: dict[str, Any] | None = None
        self.is_child = True


class Keeper:
    """The bundles, and the connections of all clients."""

    def __init__(self, listening: socket.socket, max_descriptors: int, grace: float) -> None:
        self._listening = listening
        self._max_descriptors = max_descriptors  # of all bundles together
        self._grace = grace
        self._clients: dict[int, socket.socket] = {}
        self._poll = select.poll()  # not epoll, whose watches evaluators of this user can exhaust
        self._bundles: dict[str, KeptBundle] = {}  # in the order of their serials
        self._serial = 0
        self._descriptor_count = 0
        self._owners: dict[int, KeptBundle] = {}  # of children that are not reaped yet
        self._unwanted: set[int] = set()  # children whose exit status nobody asks for
        self._ended: dict[int, float] = {}  # other ended children, with the time of their discovery

    def serve(self) -> NoReturn:
        """Serve all clients. Raises: SystemExit, from the handler of SIGTERM."""
        self._poll.register(self._listening, select.POLLIN)
        try:
            while True:
                for number, events in self._poll.poll():
                    if number in self._clients:
                        self._serve_client(self._clients[number], events)
                    else:
                        self._accept_client()
        finally:
            for pid in self._owners:
                _kill(pid)

    def _accept_client(self) -> None:
        try:
            client, _ = self._listening.accept()
        except (ConnectionError, BlockingIOError):
            return  # the client has gone
        except OSError:
            time.sleep(_RETRY)
            return
        client.setblocking(False)
        self._clients[client.fileno()] = client
        self._poll.register(client, select.POLLIN)
        if len(self._clients) == _MAX_CLIENTS:
            self._poll.unregister(self._listening)  # more clients wait

    def _serve_client(self, client: socket.socket, events: int) -> None:
        if not events & select.POLLHUP:  # the rest of a dead client's requests is read at once
            if events == select.POLLOUT:  # the client has read its answers
                self._poll.modify(client, select.POLLIN)
                return
            if not _is_writable(client):
                self._poll.modify(client, select.POLLOUT)
                return
        try:
            message, descriptors, is_whole = receive_message(client, MAX_BUNDLE_DESCRIPTORS)
        except (ConnectionResetError, BlockingIOError):
            # A client that dies with unread answers resets the connection. The kernel reports this
            # once, before the requests that the client has sent.
            return
        except OSError:
            self._close_client(client)
            return
        if not message:
            close_descriptors(descriptors)
            self._close_client(client)
            return
        try:
            answer, sent = self._execute(message, descriptors, is_whole)
            if answer is not None:
                self._send(client, answer, sent)
        except Exception:  # noqa: BLE001  (a defect here must not end all evaluators)
            traceback.print_exc()
            self._close_client(client)
        finally:
            close_descriptors(descriptors)

    def _close_client(self, client: socket.socket) -> None:
        self._poll.unregister(client)
        if len(self._clients) == _MAX_CLIENTS:
            self._poll.register(self._listening, select.POLLIN)
        del self._clients[client.fileno()]
        client.close()

    def _send(
        self, client: socket.socket, answer: dict[str, Any], descriptors: Sequence[int]
    ) -> None:
        try:
            socket.send_fds(client, [json.dumps(answer).encode()], descriptors)
        except ConnectionError:
            pass  # the client has gone; its other requests are still executed
        except OSError as error:
            if descriptors and error.errno == errno.ETOOMANYREFS:
                self._send(client, _failure(answer["id"], str(error.strerror), error.errno), ())
            else:  # the client would wait for this answer
                self._close_client(client)

    def _execute(
        self, message: bytes, descriptors: list[int], is_whole: bool
    ) -> tuple[dict[str, Any] | None, Sequence[int]]:
        """Execute a request; return the answer, and the descriptors to send.

        `descriptors` came with the request; the caller closes those that the list has afterwards.
        """
        number = 0
        try:
            request = _parse(message)
            number = request["id"]
            if not is_whole:
                raise _RequestError("the request, or its number of descriptors, is too large")
            name = request["request"]
            if name == "keep":
                self._keep(request, descriptors)
                return None, ()
            if name == "drop":
                self._drop(_name(request))
                return None, ()
            if name == "reap_others":
                self._reap_others()
                return None, ()
            answer, sent = self._query(name, request, descriptors)
        except _RequestError as error:
            return _failure(number, str(error), None), ()
        except OSError as error:
            return _failure(number, str(error.strerror or error), error.errno), ()
        return {"id": number, **answer}, sent

    def _query(
        self, name: str, request: dict[str, Any], descriptors: list[int]
    ) -> tuple[dict[str, Any], Sequence[int]]:
        if name == "version":
            cgroups = os.environ.get(CGROUP_DESCRIPTION_VARIABLE, "")
            return {"version": PROTOCOL_VERSION, "pid": os.getpid(), "cgroups": cgroups}, ()
        if name == "list":
            return self._list(_integer(request, "after"))
        if name == "wait":
            return self._wait(_name(request), _integer(request, "pid")), ()
        if name == "start":
            return self._start(request, descriptors), descriptors
        raise _RequestError(f"unknown request {name[:MAX_BUNDLE_NAME_LENGTH]!r}")

    def _keep(self, request: dict[str, Any], descriptors: list[int]) -> None:
        name, pid = _name(request), _integer(request, "pid")
        if not 1 <= len(descriptors) <= MAX_BUNDLE_DESCRIPTORS:
            raise _RequestError(f"{name}: a bundle has 1 to {MAX_BUNDLE_DESCRIPTORS} descriptors")
        old = self._bundles.get(name)
        if pid and self._owners.get(pid, old) is not old:
            raise _RequestError(f"{name}: process {pid} belongs to another bundle")
        held = self._descriptor_count - (len(old.descriptors) if old else 0)
        if held + len(descriptors) > self._max_descriptors:
            raise OSError(errno.EMFILE, f"{name}: {os.strerror(errno.EMFILE)} (RLIMIT_NOFILE)")
        self._serial += 1
        bundle = KeptBundle(self._serial, pid, tuple(descriptors))
        if pid and old is not None and old.pid == pid:
            bundle.exit, bundle.is_child = old.exit, old.is_child
        elif pid:
            bundle.is_child = _is_child(pid)
        if pid and bundle.is_child and bundle.exit is None:
            self._owners[pid] = bundle  # so that dropping the old bundle does not kill it
            self._unwanted.discard(pid)
        self._drop(name)
        self._bundles[name] = bundle
        self._descriptor_count += len(bundle.descriptors)
        descriptors.clear()

    def _drop(self, name: str) -> None:
        bundle = self._bundles.pop(name, None)
        if bundle is None:
            return
        close_descriptors(bundle.descriptors)
        self._descriptor_count -= len(bundle.descriptors)
        if self._owners.get(bundle.pid) is bundle:
            del self._owners[bundle.pid]
            _kill(bundle.pid)
            if os.waitpid(bundle.pid, os.WNOHANG) == (0, 0):
                self._unwanted.add(bundle.pid)  # it takes some time to end

    def _list(self, after: int) -> tuple[dict[str, Any], list[int]]:
        bundles: list[tuple[str, int, int]] = []
        descriptors: list[int] = []
        for name, bundle in self._bundles.items():
            if bundle.serial <= after:
                continue
            if (
                len(bundles) == _PAGE_BUNDLES
                or len(descriptors) + len(bundle.descriptors) > MAX_DESCRIPTORS_PER_MESSAGE
            ):
                break
            bundles.append((name, bundle.pid, len(bundle.descriptors)))
            descriptors += bundle.descriptors
            after = bundle.serial
        return {"bundles": bundles, "after": after}, descriptors

    def _wait(self, name: str, pid: int) -> dict[str, Any]:
        bundle = self._bundles.get(name)
        if bundle is None and pid and pid not in self._owners and pid not in self._unwanted:
            return _reap(name, pid)  # of a keep that was refused
        if bundle is None or not bundle.pid:
            raise _RequestError(f"{name}: no bundle of this name has a process")
        if not bundle.is_child:
            raise OSError(errno.ECHILD, f"{name}: the exit status of {bundle.pid} is unknown")
        if bundle.exit is None:
            bundle.exit = _reap(name, bundle.pid)
            del self._owners[bundle.pid]
        return bundle.exit

    def _start(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Start a program; replace its descriptors by a pidfd."""
        argv = request.get("argv")
        if not isinstance(argv, list) or not argv or not all(isinstance(x, str) for x in argv):
            raise _RequestError("argv: not a list of strings")
        if len(descriptors) != 3:
            raise _RequestError("a program to start has three descriptors")
        stdin, stdout, stderr = descriptors
        try:
            process = subprocess.Popen(
                argv,
                env={},
                cwd="/",
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except ValueError as error:
            raise _RequestError(f"argv: {error}") from None
        process.returncode = 0  # so that Popen does not wait for it
        self._unwanted.add(process.pid)
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            _kill(process.pid)
            raise
        close_descriptors(descriptors)
        descriptors[:] = [pidfd]
        return {"pid": process.pid}

    def _reap_others(self) -> None:
        """Reap ended children that belong to no bundle: unwanted ones, and others after a time."""
        now, ended = time.monotonic(), dict[int, float]()
        for pid in _list_children():
            if pid in self._owners or not _has_ended(pid):
                continue
            if pid in self._unwanted:
                os.waitpid(pid, 0)
                self._unwanted.discard(pid)
            else:
                ended[pid] = self._ended.get(pid, now)
        oldest = sorted(ended, key=lambda pid: ended[pid])
        for index, pid in enumerate(oldest):
            if now - ended[pid] >= self._grace or index < len(oldest) - _MAX_ENDED:
                os.waitpid(pid, 0)
                del ended[pid]
        self._ended = ended


def _parse(message: bytes) -> dict[str, Any]:
    """Return a request, with a `request` and an `id` of the right types."""
    try:
        request = json.loads(message)
    except (ValueError, RecursionError):
        raise _RequestError("the request is not JSON") from None
    if not isinstance(request, dict) or not isinstance(request.get("request"), str):
        raise _RequestError("the request is not an object with a member 'request'")
    _integer(request, "id")
    return request


def _integer(request: dict[str, Any], name: str) -> int:
    value = request.get(name)
    if type(value) is not int or not 0 <= value < 2**53:
        raise _RequestError(f"{name}: not an integer from 0 on")
    return value


def _name(request: dict[str, Any]) -> str:
    name = request.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_BUNDLE_NAME_LENGTH:
        raise _RequestError(f"name: not a string of 1 to {MAX_BUNDLE_NAME_LENGTH} characters")
    if not name.isascii() or not name.isprintable():
        raise _RequestError("name: not printable ASCII")
    return name


def _failure(number: int, error: str, code: int | None) -> dict[str, Any]:
    return {"id": number, "error": error, "errno": code}


def _is_writable(client: socket.socket) -> bool:
    """Tell whether the next answer fits: less than a quarter of the socket's buffer is in use."""
    poll = select.poll()
    poll.register(client, select.POLLOUT)
    return bool(poll.poll(0))


def receive_message(connection: socket.socket, most: int) -> tuple[bytes, list[int], bool]:
    """Return a message, its descriptors, `most` at most, and whether all of both has arrived."""
    numbers = array("i")
    room = socket.CMSG_LEN(most * numbers.itemsize)
    message, control, flags, _ = connection.recvmsg(
        MAX_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC
    )
    for _, _, content in control:
        numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    return message, list(numbers), not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)


def close_descriptors(descriptors: Sequence[int]) -> None:
    """Close all descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def _kill(pid: int) -> None:
    """Kill a child that is not reaped yet, and its process group if it leads one."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _reap(name: str, pid: int) -> dict[str, Any]:
    """Reap a child that has ended; return its status and usage. Raises: OSError."""
    reaped, status, usage = os.wait4(pid, os.WNOHANG)
    if not reaped:
        raise OSError(errno.EBUSY, f"{name}: process {pid} still runs")
    return {"status": status, "rusage": list(usage)}


def _is_child(pid: int) -> bool:
    """Tell whether a process, running or ended, is a child that is not reaped yet."""
    try:
        _has_ended(pid)
    except (ChildProcessError, OverflowError):
        return False
    return True


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _list_children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


def _find_user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def open_socket(path: str) -> socket.socket:
    """Listen at a path. Raises: SystemExit, if others may enter its directory; OSError."""
    directory = os.path.dirname(path) or "."
    status = os.stat(directory)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        user = _find_user_name(os.geteuid())
        command = shlex.join(["install", "-d", "-m", "700", "-o", user, directory])
        raise SystemExit(
            f"tawebeval-keeper: {path}: the directory must belong to the user {user} and have mode"
            f" 0700; as root: {command}"
        )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        listening.connect(path)
        raise SystemExit(f"tawebeval-keeper: {path}: another keeper listens here")
    new = f"{path}.new"  # so that the keeper listens as soon as `path` exists
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    os.umask(0o077)
    listening.bind(new)
    listening.listen(_BACKLOG)
    os.rename(new, path)
    listening.setblocking(False)
    return listening


def notify_systemd() -> None:
    """Tell systemd, if it has started this process, that it is ready (sd_notify(3))."""
    if path := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifying:
            notifying.sendto(b"READY=1", path.replace("@", "\0", 1) if path[0] == "@" else path)


def _on_termination(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def main() -> None:
    """Listen, notify systemd and serve."""
    _, path, *rest = sys.argv[1:]
    grace = float(rest[0]) if rest else REAP_DELAY_SECONDS
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_CHILD_SUBREAPER, 1), (_PR_SET_DUMPABLE, 0)):
        if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # Also the limit of descriptors that this user may have in flight (unix(7)).
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # If it were ignored, no exit status would be kept.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _on_termination)
    signal.signal(signal.SIGINT, _on_termination)
    try:
        listening = open_socket(path)
    except OSError as error:
        raise SystemExit(
            f"tawebeval-keeper: {path}: cannot listen there: {error.strerror or error}; name"
            " another path by --socket, in a directory of mode 700"
        ) from None
    notify_systemd()
    Keeper(listening, hard - RESERVED_DESCRIPTORS, grace).serve()


if __name__ == "__main__":
    main()
