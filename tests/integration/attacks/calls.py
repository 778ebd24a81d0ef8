"""System calls that an evaluator has no business with, each tried by a process of its own.

`CALLS` prints a JSON object: for each name the error number, 0 for success, and -N for a
process that signal N has ended. The numbers of the calls are those of this machine: they are
resolved where there is a library for that, outside.
"""

from __future__ import annotations

import errno
import json

from tawebeval.sandbox.seccomp import get_architecture, resolve_call

CALLS = r"""
import ctypes, json, os, sys

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def outcome(number, arguments):
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        page = ctypes.create_string_buffer(4096)
        values = [ctypes.c_long(value) if isinstance(value, int)
                  else ctypes.c_char_p(value.encode()) if value != "page" else page
                  for value in arguments]
        ctypes.set_errno(0)
        result = libc.syscall(ctypes.c_long(number), *values)
        os.write(tell, b"%d" % (ctypes.get_errno() if result == -1 else 0))
        os._exit(0)
    os.close(tell)
    said = os.read(told, 100)
    status = os.waitpid(pid, 0)[1]
    os.close(told)
    return int(said) if said else -os.WTERMSIG(status)

calls = json.loads(sys.argv[1])
print(json.dumps({name: outcome(number, arguments) for name, number, arguments in calls}))
"""

# Prints what each of some numbers answers, all of them in this process: for numbers that are
# refused before the kernel does anything.
NUMBERS = r"""
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
found = {}
for number in json.loads(sys.argv[1]):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
    found[number] = ctypes.get_errno() if result == -1 else 0
print(json.dumps(found))
"""

# The flags of namespaces for clone.
NAMESPACES = {
    "mounts": 0x00020000,
    "cgroups": 0x02000000,
    "names": 0x04000000,
    "ipc": 0x08000000,
    "users": 0x10000000,
    "processes": 0x20000000,
    "network": 0x40000000,
}
_SIGCHLD = 17


# By these arguments calls are refused that are allowed otherwise, and what they answer.
BY_ARGUMENT: dict[str, tuple[object, ...]] = {
    **{f"clone:{name}": (flag | _SIGCHLD, 0, 0, 0, 0) for name, flag in NAMESPACES.items()},
    "setsockopt:filter": (0, 1, 26, "page", 16),
    "setsockopt:bpf": (0, 1, 50, "page", 4),
    "setsockopt:port": (0, 1, 51, "page", 16),
    "prctl:filter": (22, 2, "page", 0, 0),
    "prctl:core": (62, 1, 0, 0, 0),
    "fcntl:notify": (0, 1026, 1),
    "fcntl:lease": (0, 1024, 1),
    "fallocate": (0, 0, 0, 1),
    "ioctl:reserve": (0, 0x40305828, "page"),
    "ioctl:reserve64": (0, 0x4030582A, "page"),
    "ioctl:zero": (0, 0x40305839, "page"),
    "mmap:huge": (0, 4096, 3, 0x40022, -1, 0),
    "memfd_create:huge": ("attack", 4),
    "shmget:huge": (0, 4096, 0o4600),
    "ioprio_set": (1, 0, 0x4000),
    "sync": (),
    "syncfs": (0,),
}
ANSWERS = {
    **{name: errno.EPERM for name in BY_ARGUMENT if name.startswith(("clone", "setsockopt"))},
    "ioprio_set": errno.EPERM,
    **dict.fromkeys(("prctl:filter", "prctl:core", "fcntl:notify"), errno.EINVAL),
    **dict.fromkeys(("fallocate", "ioctl:reserve", "ioctl:reserve64"), errno.EOPNOTSUPP),
    "ioctl:zero": errno.EOPNOTSUPP,
    "fcntl:lease": errno.EACCES,
    "memfd_create:huge": errno.EINVAL,
    **dict.fromkeys(("mmap:huge", "shmget:huge"), errno.ENOMEM),
    **dict.fromkeys(("sync", "syncfs"), 0),
}
# Families of sockets, with a kind that they have.
FAMILIES: dict[str, tuple[object, ...]] = {
    f"socket:{name}": (family, kind, protocol)
    for name, family, kind, protocol in (
        ("netlink", 16, 3, 0),
        ("packet", 17, 3, 0),
        ("alg", 38, 5, 0),
        ("vsock", 40, 1, 0),
        ("xdp", 44, 3, 0),
        ("x25", 9, 5, 0),
        ("bluetooth", 31, 3, 0),
        ("key", 15, 3, 2),
    )
}
# Sockets that need a privilege: also without the filter nobody in there has it.
RAW: dict[str, tuple[object, ...]] = {
    "socket:raw": (2, 3, 255),
    "socket:raw-ipv6": (10, 3, 58),
}
INTERNET: dict[str, tuple[object, ...]] = {
    "socket:internet": (2, 1, 0),
    "socket:internet-6": (10, 2, 0),
}
# Protocols that the kernel would have to load.
PROTOCOLS: dict[str, tuple[object, ...]] = {
    "socket:sctp": (2, 1, 132),
    "socket:mptcp": (2, 1, 262),
    "socket:udplite": (10, 2, 136),
}
# What an ordinary program may rely on.
ALLOWED: dict[str, tuple[object, ...]] = {
    "getpid": (),
    "socket:unix": (1, 1, 0),
    "clone:none": (_SIGCHLD, 0, 0, 0, 0),
    "memfd_create": ("x", 0),
}


def calls_argument(*tables: dict[str, tuple[object, ...]]) -> str:
    """Return what `CALLS` takes as its argument."""
    return json.dumps(
        [
            (name, number_of(name.partition(":")[0]), arguments)
            for table in tables
            for name, arguments in table.items()
        ]
    )


ARCHITECTURE = get_architecture()


def number_of(name: str) -> int:
    """Return the number of a system call on this machine."""
    number = resolve_call(name)
    assert number is not None, name
    return number


# Calls of another architecture go past a filter that looks at numbers only. 20 is getpid for
# programs of 32 bits, 39 + 0x40000000 is getpid in the x32 form.
OTHER_ARCHITECTURES = r"""
import ctypes, mmap, os, sys

def machine_code(code):
    place = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    place.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(place))
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)

for name, code in (
    ("int80", b"\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3"),
    ("x32", b"\xb8\x27\x00\x00\x40\x0f\x05\xc3"),
):
    pid = os.fork()
    if pid == 0:
        result = machine_code(code)()
        os._exit(0 if result == os.getpid() else 1)
    status = os.waitpid(pid, 0)[1]
    print(name, "succeeded" if status == 0 else "refused")
"""

# Puts a character into the input of the terminal that controls it, or of any that it can make; and
# has the kernel load modules, for the lines of one, for bridges and for VLANs.
TERMINAL = r"""
import errno, fcntl, os, pty, termios
try:
    os.open("/dev/tty", os.O_RDWR)
    print("there is a terminal")
except OSError as error:
    print("no terminal")
for name, request in (
    ("TIOCSTI", 0x5412), ("TIOCLINUX", 0x541C), ("TIOCSETD", 0x5423), ("SIOCGIFBR", 0x8940),
    ("SIOCSIFVLAN", 0x8983),
):
    for extra in (0, 1 << 32):
        try:
            leader, follower = pty.openpty()
            fcntl.ioctl(follower, request | extra, b"x")
            print(name, "succeeded")
        except OverflowError:
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            result = libc.ioctl(follower, ctypes.c_ulong(request | extra), b"x")
            print(name, errno.errorcode[ctypes.get_errno()] if result else "succeeded")
        except OSError as error:
            print(name, errno.errorcode[error.errno])
"""
