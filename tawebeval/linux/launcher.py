"""Starts programs: a program by itself, which knows nothing of tawebeval.

The launcher is a child of the daemon, and the programs that it starts are the daemon's children,
too. It forks a spare process, which waits for a launch request and then becomes the program. Once
the spare has received a request the launcher forks the next spare. So no request waits for a fork,
and requests are executed side by side.

To execute a request, the spare mounts an overlay in a mount namespace of its own if the request has
one, enters cgroups, and executes the program. The overlay disappears with the namespace when the
program has ended. So there is nothing to unmount, and namespaces remain small however many there
are. Mounting takes a user namespace in which the process has all capabilities; outside of that
namespace the process has none, and the program inherits none.

The mount namespace of an overlay can be a copy of a namespace with few mounts, which an earlier
request has made: bwrap reads the list of all mounts again for each mount that it makes.

A request is a message with descriptors: of a file with the words of the request
(`encode_launch_request`), of a socket for the report, and of the program's descriptors 1, 2 and so
on; its stdin is `/dev/null`. When all is ready for the program, the report begins with the number
of its process, the devices of the overlay's files, and the descriptor of the overlay's top. If the
socket is then closed, the program has begun; otherwise the last message is the error. The launcher
ends with the connection by which requests come, its stdout. If it ends because the kernel makes no
more processes, the last message on that connection is the errno.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
import stat
from array import array
from collections.abc import Iterable, Iterator, Sequence

PROTOCOL_VERSION = 2
"""The version of requests: a launcher may outlive the daemon that has started it."""
READY_MESSAGE = b"ready"
"""The first message on the connection; a number after it is an errno, and the last one."""
MOUNT, START = b"mount", b"start"
"""What has failed, in the last message of a report: number, one of these, errno and path."""
OOM_SCORE_ADJ = 500
"""What programs have, so that the kernel kills them before the daemon (proc(5))."""
MAX_PROGRAM_DESCRIPTORS = 16
"""The maximum number of a program's descriptors."""

_CLONE_NEWNS, _CLONE_PARENT, _CLONE_NEWUSER = 0x20000, 0x8000, 0x10000000
_PR_SET_DUMPABLE, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 4, 47, 4
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC = 1, 2, 4, 32, 4096, 16384
_MNT_DETACH = 2
_ROOT = b"/tmp"  # where a new root is mounted first
_UMASK = 0o022
_FAILED = 127  # the exit status, which nobody but the kernel sees
_TAKEN = b"\n"  # what a spare sends when it has a request

# With attributes that a user may set, and without synchronising the whole file system when it is
# unmounted. Not with `xino=on` or `auto`, of which the kernel logs a line for each mount.
_OVERLAY = "lowerdir={},upperdir={},workdir={},userxattr,xino=off,volatile"

# The number of clone(2), for programs of 64 bits.
_CLONE = {"x86_64": 56, "aarch64": 220, "riscv64": 220}
_WIDE = 8  # bytes of an address there

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def encode_launch_request(*parts: Iterable[bytes]) -> bytes:
    """Return the words of a request, none of which has a NUL in it.

    The parts are: the lower, the upper and the work directory of the overlay, or a mount namespace
    to enter (a file of proc(5)), or nothing; files to
    write "0" to; limits, each as three numbers with colons between; the program with its arguments;
    its environment; its directory, by how much its nice value is higher, whether few mounts do, and
    whether the program has a user namespace of its own.

    Without a program the first part are the paths that programs see where few mounts do.
    """
    lists = [list(part) for part in parts]
    counts = " ".join(str(len(words)) for words in lists)
    return b"\0".join([counts.encode(), *(word for words in lists for word in words)])


def decode_launch_request(request: bytes) -> list[list[bytes]]:
    """Return the parts that `encode_launch_request` was given."""
    counts, *words = request.split(b"\0")
    rest = iter(words)
    return [[next(rest) for _ in range(int(count))] for count in counts.split()]


def receive_message(connection: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive a message, with that many descriptors at most, which no program inherits.

    (What Python has for it does not pass on the flag that they need from their first moment.)
    """
    numbers = array("i")
    room = socket.CMSG_LEN(most * numbers.itemsize)
    message, control, _, _ = connection.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for _, _, content in control:
        numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    return message, list(numbers)


def fork_as_sibling() -> int:
    """Fork, so that the child is not this process's, but its parent's. Raises OSError.

    Returns 0 in the child. Where the kernel does not offer it there is a process in between, which
    ends at once: the child, an orphan, becomes that of the nearest subreaper, which the daemon is.
    """
    if ctypes.sizeof(ctypes.c_void_p) == _WIDE and (number := _CLONE.get(os.uname().machine)):
        result: int = _libc.syscall(number, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if result >= 0:
            return result
        if ctypes.get_errno() not in (errno.EPERM, errno.EINVAL, errno.ENOSYS):
            raise _error()
    return _fork_twice()


def _fork_twice() -> int:
    between = os.fork()
    if between:
        status = os.waitstatus_to_exitcode(os.waitpid(between, 0)[1])
        if status:
            raise OSError(abs(status), os.strerror(abs(status)))
        return between
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError as error:
        os._exit(error.errno or errno.EAGAIN)
    while os.getppid() == between:
        os.sched_yield()
    return 0


def mount_overlay(layers: Sequence[bytes]) -> tuple[int, set[int]]:
    """Mount an overlay over its upper directory, for this process alone.

    Return its top, and the devices of its files.
    """
    if _libc.unshare(_CLONE_NEWNS):
        raise _error()
    # By descriptors: no character of a path means anything, and evaluators learn no path.
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    opened = [os.open(path, flags) for path in layers]
    options = _OVERLAY.format(*(f"/proc/self/fd/{descriptor}" for descriptor in opened))
    place = layers[1]
    how = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    if _libc.mount(b"overlay", place, b"overlay", how, options.encode()):
        raise _error()
    top = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    devices = {os.fstat(top).st_dev}
    lower, upper, _ = (os.fstat(descriptor).st_dev for descriptor in opened)
    if lower != upper:
        devices |= {_device_of_new_files(top), *_device_of_old_files(top)}
    return top, devices


def enter_mount_namespace(namespace: bytes) -> None:
    """Enter the mount namespace of another program that was started here. Raises OSError."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter_namespace(descriptor)
    finally:
        os.close(descriptor)


def _enter_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNS):
        raise _error()


# Where the layers are of two file systems their files have a device each, other than that of
# directories (the kernel's filesystems/overlayfs, "Inode properties").


def _device_of_new_files(top: int) -> int:
    name = os.urandom(8).hex()
    os.symlink(name, name, dir_fd=top)
    try:
        return os.stat(name, dir_fd=top, follow_symlinks=False).st_dev
    finally:
        os.unlink(name, dir_fd=top)


def _device_of_old_files(top: int) -> Iterator[int]:
    """Yield the device of the first file that is found, if there is one."""
    folders = ["."]
    for folder in folders:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=top)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        yield entry.stat(follow_symlinks=False).st_dev
                        return
                    folders.append(f"{folder}/{entry.name}")
        finally:
            os.close(descriptor)


def enter_minimal_mount_namespace(paths: Sequence[bytes]) -> None:
    """Enter a mount namespace with nothing but these files and directories. Raises OSError."""
    if _libc.unshare(_CLONE_NEWNS):
        raise _error()
    # By descriptors, for the new root hides what is below `_ROOT`.
    opened = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in paths]
    _mount(b"tmpfs", _ROOT, b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=755")
    for path, descriptor in opened:
        place = _ROOT + path
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.makedirs(place)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        _mount(b"/proc/self/fd/%d" % descriptor, place, None, _MS_BIND | _MS_REC, None)
    for name in os.listdir(b"/"):
        if os.path.islink(b"/" + name):  # such as /lib
            os.symlink(os.readlink(b"/" + name), _ROOT + b"/" + name)
    os.makedirs(_ROOT + _ROOT, exist_ok=True)  # bwrap needs it, too
    _mount(None, _ROOT, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV, None)
    os.chdir(_ROOT)
    # One over the other, as pivot_root(2) has it.
    if _libc.pivot_root(b".", b".") or _libc.umount2(b".", _MNT_DETACH):
        raise _error()


def _mount(
    source: bytes | None, place: bytes, kind: bytes | None, how: int, options: bytes | None
) -> None:
    if _libc.mount(source, place, kind, ctypes.c_ulong(how), options):
        raise _error()


def execute_launch_request(
    words: int, report: socket.socket, outputs: Sequence[int], taken: RequestTakenNotifier
) -> None:
    """Become the program of a request. Return if that fails; the report has the error."""
    step = START
    try:
        request = os.pread(words, os.fstat(words).st_size, 0)
        layers, groups, limits, argv, variables, (directory, niceness, few, own) = (
            decode_launch_request(request)
        )
        if not argv:
            with contextlib.ExitStack() as failed:
                failed.callback(taken.notify_request_taken)
                enter_minimal_mount_namespace(layers)
                mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
                failed.pop_all()
            taken.notify_request_taken(mounts)
            report.send(b"%d" % os.getpid())
            return
        taken.notify_request_taken()
        environment = dict(each.split(b"=", 1) for each in variables)
        tops, numbers = [], [os.getpid()]
        # These are not to be seen where few mounts are.
        entries = [os.open(group, os.O_WRONLY | os.O_CLOEXEC) for group in groups]
        step = MOUNT
        if len(layers) == 1:
            enter_mount_namespace(layers[0])
        elif layers:
            if int(few) and taken.mounts is not None:
                _enter_namespace(taken.mounts)
            top, devices = mount_overlay(layers)
            tops.append(top)
            numbers += devices
        step = START
        for entry in entries:
            os.write(entry, b"0")
        os.nice(int(niceness))
        os.chdir(directory)
        for number, descriptor in enumerate(outputs, 1):
            os.dup2(descriptor, number)
        socket.send_fds(report, [b" ".join(b"%d" % number for number in numbers)], tops)
        if int(own):
            enter_user_namespace()
        for limit in limits:  # last of all, for they hold of this process, too
            number, soft, hard = map(int, limit.split(b":"))
            _set_limit(number, soft, hard)
        os.execve(argv[0], argv, environment)  # noqa: S606  (no shell is wanted)
    except OSError as error:
        path = os.fsencode(error.filename or b"")
        report.send(b"\0".join((b"%d" % os.getpid(), step, b"%d" % (error.errno or 0), path)))


def _set_limit(number: int, soft: int, hard: int) -> None:
    """Set a limit; the launcher's own hard limit, which nobody may raise, stands if it is lower."""
    own = resource.getrlimit(number)[1]
    if own != resource.RLIM_INFINITY:
        soft, hard = (
            own if one == resource.RLIM_INFINITY else min(one, own) for one in (soft, hard)
        )
    resource.prlimit(0, number, (soft, hard))


def enter_user_namespace() -> None:
    """Enter a new user namespace, in which the kernel counts for this process apart.

    What limits count for a user (getrlimit(2)) is then not shared with others. Where the kernel
    refuses it the limits hold for all together, and bwrap will tell the reason.
    """
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_CLONE_NEWUSER):
        return
    _libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(1), 0, 0, 0)  # or these files are root's
    for name, line in (
        ("setgroups", b"deny"),
        ("uid_map", b"%d %d 1" % (user, user)),
        ("gid_map", b"%d %d 1" % (group, group)),
    ):
        with (
            contextlib.suppress(OSError),
            open(f"/proc/self/{name}", "wb", buffering=0) as file,
        ):
            file.write(line)


class RequestTakenNotifier:
    """Notice of a spare process to the launcher that it has received a request.

    `mounts` is a descriptor of the mount namespace with few mounts; None if there is none.
    """

    def __init__(self, connection: socket.socket, mounts: int | None) -> None:
        self._connection = connection
        self.mounts = mounts

    def notify_request_taken(self, mounts: int | None = None) -> None:
        """Notify the launcher, and hand over a namespace for it to keep."""
        socket.send_fds(self._connection, [_TAKEN], [] if mounts is None else [mounts])
        self._connection.close()


def wait_for_launch_request(connection: socket.socket, taken: RequestTakenNotifier) -> None:
    """Wait for a request, notify the launcher by `taken`, and become the program.

    Return when no request will follow. Until then the process is in the process group of the
    launcher, and is killed with it.
    """
    # What holds for every program is done before there is a request.
    os.umask(_UMASK)
    os.set_inheritable(0, True)
    # Python ignores some, and the daemon's parent may have ignored others.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _, descriptors = receive_message(connection, 1, MAX_PROGRAM_DESCRIPTORS + 2)
    if descriptors:
        os.setsid()
        words, report, *outputs = descriptors
        execute_launch_request(words, socket.socket(fileno=report), outputs, taken)


def serve_connection(connection: socket.socket) -> None:
    """Keep one spare process waiting for the next request until the connection is closed.

    A spare that ends without a request is the last one: the next might end in the same way.
    Raises: OSError.
    """
    mounts: int | None = None
    while True:
        reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not fork_as_sibling():
            try:
                wait_for_launch_request(connection, RequestTakenNotifier(writing, mounts))
            finally:
                os._exit(_FAILED)
        writing.close()
        said, given = receive_message(reading, len(_TAKEN), 1)
        reading.close()
        if said != _TAKEN:
            return
        if given:
            if mounts is not None:
                os.close(mounts)
            (mounts,) = given


def _expose_to_killer() -> None:
    """Have the kernel kill what is started here before the daemon, where no memory is left."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) < OOM_SCORE_ADJ:
            file.seek(0)
            file.write(str(OOM_SCORE_ADJ))


def _keep_out_of_dumps() -> None:
    """Have core dumps of what is started here contain no memory (core(5)).

    A handler of the machine would store them as root, and where no limit counts them.
    """
    with contextlib.suppress(OSError), open("/proc/self/coredump_filter", "w") as file:
        file.write("0")


def main() -> None:
    """Serve the connection that is stdout."""
    # First, since the files of a process that is not dumpable are root's.
    _expose_to_killer()
    _keep_out_of_dumps()
    _libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(0), 0, 0, 0)
    _libc.prctl(_PR_CAP_AMBIENT, ctypes.c_ulong(_PR_CAP_AMBIENT_CLEAR_ALL), 0, 0, 0)
    # No descriptor that comes with a request is one of those that a program shall get it as.
    connection = os.dup2(1, MAX_PROGRAM_DESCRIPTORS + 1, inheritable=False)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in range(MAX_PROGRAM_DESCRIPTORS + 1):
        if number != null:
            os.dup2(null, number, inheritable=False)
    with socket.socket(fileno=connection) as requests:
        requests.send(READY_MESSAGE)
        try:
            serve_connection(requests)
        except OSError as error:
            requests.send(b"%d" % (error.errno or 0))


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
