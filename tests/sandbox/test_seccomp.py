"""`sandbox.seccomp`: what the filters answer to each call, run here as the kernel runs them."""

from __future__ import annotations

import errno
import itertools
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import ConfigurationError
from tawebeval.sandbox import seccomp
from tawebeval.sandbox.seccomp import (
    ALLOWED_CALLS,
    REFUSED_CALLS,
    FilterRule,
    compile_filter,
    get_architecture,
    make_seccomp_filters,
    resolve_call,
)
from tests.cases.bpf_interpreter import ALLOW, ERRNO, KILL_PROCESS, MOST_INSTRUCTIONS, FilterStack

NATIVE = get_architecture()
X86_64, X86 = 0xC000003E, 0x40000003
X32 = 0x40000000
"""Added to the number of a call of 32 bits on x86-64, under the same architecture."""

UPPER = 0xDEADBEEF00000000
"""What may stand in an argument where the kernel does not look."""

# Calls that are decided by their arguments, and the answer where all of these are 0.
BY_ARGUMENTS = {
    **dict.fromkeys(("clone", "ioctl", "fcntl", "prctl", "setsockopt"), ALLOW),
    **dict.fromkeys(("mmap", "memfd_create", "shmget", "ioprio_set"), ALLOW),
    **dict.fromkeys(("socket", "socketpair"), ERRNO | errno.EAFNOSUPPORT),
    "fallocate": ERRNO | errno.EOPNOTSUPP,
    **dict.fromkeys(("sendfile", "splice", "tee", "vmsplice"), ERRNO | errno.EINVAL),
    "sync": ERRNO,
    "syncfs": ERRNO,
}
# Calls that must never be allowed, whatever becomes of the lists; machines have not all of these.
DANGEROUS = """
    mount umount2 pivot_root chroot fsopen fsmount fsconfig fspick move_mount open_tree
    open_tree_attr mount_setattr statmount listmount unshare setns clone3
    ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_getfd
    keyctl add_key request_key name_to_handle_at open_by_handle_at fanotify_init fanotify_mark
    inotify_init inotify_init1 inotify_add_watch inotify_rm_watch
    io_setup io_submit io_cancel io_destroy io_getevents io_pgetevents
    io_uring_setup io_uring_enter io_uring_register
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
    seccomp bpf perf_event_open userfaultfd memfd_secret cachestat lookup_dcookie syslog
    kexec_load kexec_file_load init_module finit_module delete_module swapon swapoff reboot acct
    quotactl quotactl_fd file_setattr vhangup iopl ioperm modify_ldt uselib personality
    nfsservctl sysfs ustat clock_settime settimeofday adjtimex clock_adjtime stime sethostname
    setdomainname mbind set_mempolicy migrate_pages move_pages set_mempolicy_home_node
"""

THREAD = 0x003D0F00  # the flags of pthread_create(3)
FORK = 0x01200011  # and of fork(3)
# That for the time is for unshare(2) and clone3(2) alone: here its bit is part of a signal.
NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
BEST_EFFORT, IDLE = 2 << 13, 3 << 13  # of ioprio_set(2)

EPERM, EACCES, EINVAL = ERRNO | errno.EPERM, ERRNO | errno.EACCES, ERRNO | errno.EINVAL
ENOMEM, EOPNOTSUPP = ERRNO | errno.ENOMEM, ERRNO | errno.EOPNOTSUPP
# For calls and the index of an argument: the answers to some of its values.
ARGUMENTS: tuple[tuple[str, int, Mapping[int, Iterable[int]]], ...] = (
    (
        "clone",
        0,
        {
            ALLOW: (0, 17, THREAD, FORK),
            EPERM: [
                flag | more for flag in NAMESPACES for more in (0, 17, THREAD, FORK, 2**32 - 1)
            ],
        },
    ),
    (
        "ioctl",
        1,
        {
            # TIOCSTI, TIOCLINUX; TIOCSETD, SIOCGIFBR, SIOCSIFBR, SIOCWANDEV, SIOCADDDLCI,
            # SIOCDELDLCI, SIOCGIFVLAN, SIOCSIFVLAN, SIOCBRADDBR, SIOCBRDELBR
            EPERM: (
                *(0x5412, 0x541C, 0x5423, 0x8940, 0x8941, 0x894A, 0x8980, 0x8981, 0x8982, 0x8983),
                *(0x89A0, 0x89A1),
            ),
            # FS_IOC_RESVSP, FS_IOC_RESVSP64, FS_IOC_ZERO_RANGE, XFS_IOC_ALLOCSP,
            # XFS_IOC_ALLOCSP64, FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_SET_ENCRYPTION_POLICY,
            # FS_IOC_GET_ENCRYPTION_PWSALT, FS_IOC_ADD_ENCRYPTION_KEY,
            # FS_IOC_REMOVE_ENCRYPTION_KEY, BTRFS_IOC_SNAP_CREATE_V2, BTRFS_IOC_SUBVOL_CREATE,
            # FICLONE
            EOPNOTSUPP: (
                *(0x40305828, 0x4030582A, 0x40305839, 0x4030580A, 0x40305824, 0x40086602),
                *(0x401C5820, 0x800C6613, 0x40106614, 0xC0506617, 0xC0406618, 0x50009417),
                *(0x5000940E, 0x40049409),
            ),
            # Neighbours of those; TCGETS, FIONREAD, TIOCGETD, SIOCGIFCONF, SIOCETHTOOL,
            # FS_IOC_GETFLAGS, FS_IOC_FSGETXATTR, FS_IOC_UNRESVSP
            ALLOW: (
                *(0x5411, 0x5413, 0x541D, 0x5401, 0x541B, 0x5424, 0x8912, 0x8946),
                *(0x80086601, 0x801C581F, 0x40305829),
            ),
        },
    ),
    ("prctl", 0, {ALLOW: (1, 15, 21, 38), EINVAL: (22, 62)}),
    (
        "fcntl",
        1,
        {
            ALLOW: (1, 6, 1025, 1030, 1032),
            EINVAL: (1026,),  # F_NOTIFY
            EACCES: (1024, 1040),  # leases
            EPERM: (1031,),  # F_SETPIPE_SZ
        },
    ),
    (
        "ioprio_set",
        2,
        {
            ALLOW: (0, BEST_EFFORT + 4, BEST_EFFORT + 7, IDLE, IDLE + 7),
            EPERM: (1 << 13, BEST_EFFORT, BEST_EFFORT + 3, BEST_EFFORT + 8, 2**16),
        },
    ),
    # Huge pages
    ("mmap", 3, {ENOMEM: (0x40000, 0x40021), ALLOW: (0x20000,)}),
    ("memfd_create", 1, {EINVAL: (4, 0x25), ALLOW: (2,)}),
    ("shmget", 2, {ENOMEM: (0o4000, 0o4041), ALLOW: (0o2000,)}),
)
SOL_IP, SOL_SOCKET, SOL_TCP, SOL_IPV6 = 0, 1, 6, 41
INET, INET6, UNIX = 2, 10, 1


def numbers(names: str) -> Iterator[int]:
    """Yield the numbers of calls, where they have one."""
    for name in names.split():
        number = resolve_call(name)
        if number is not None:
            yield number


def answers() -> Mapping[int, int]:
    """Return the answer to each call that the lists name, by its number."""
    found: dict[int, int] = {}
    for answer, groups in ((ALLOW, ALLOWED_CALLS), (ERRNO | errno.EPERM, REFUSED_CALLS)):
        for names in groups.values():
            found |= dict.fromkeys(numbers(names), answer)
    for name, answer in BY_ARGUMENTS.items():
        found |= dict.fromkeys(numbers(name), answer)
    return found


class FilterTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.filter = self.make()

    def make(self, *, internet: bool = False) -> FilterStack:
        self.programs = make_seccomp_filters(internet=internet)
        return FilterStack.parse(self.programs)

    def ask(self, name: str, *arguments: int) -> int:
        number = resolve_call(name)
        assert number is not None, name
        return self.filter.answer(number, *arguments, architecture=NATIVE)


class CallTests(FilterTestCase):
    def test_each_system_call_is_allowed_or_refused_as_listed(self) -> None:
        named = answers()
        self.assertGreater(len(named), 300)
        for internet in (False, True):
            program = self.make(internet=internet)
            for number in (*range(4096), *range(X32, X32 + 1024), 2**31 - 1, 2**31, 2**32 - 1):
                answer = program.answer(number, architecture=NATIVE)
                self.assertEqual(answer, named.get(number, ERRNO | errno.ENOSYS), number)

    def test_each_name_is_known_and_listed_once(self) -> None:
        names = " ".join([*ALLOWED_CALLS.values(), *REFUSED_CALLS.values(), *BY_ARGUMENTS]).split()
        self.assertEqual(sorted({*names}), sorted(names))
        resolve = seccomp._load_library().seccomp_syscall_resolve_name
        unknown = {name for name in names if resolve(name.encode()) == -1}
        self.assertLessEqual(unknown, {"riscv_hwprobe", "uretprobe"}, "newer than libseccomp 2.5")

    def test_dangerous_calls_are_refused_with_any_argument(self) -> None:
        for number in numbers(DANGEROUS):
            for argument in (0, 1, UPPER, 2**64 - 1):
                answer = self.filter.answer(number, *[argument] * 6, architecture=NATIVE)
                self.assertIn(answer, (ERRNO | errno.EPERM, ERRNO | errno.ENOSYS), number)

    def test_call_of_another_architecture_kills_the_process(self) -> None:
        others = {X86, X86_64, 0x40000028, 0xC00000B7, 0, NATIVE ^ 0x40000000} - {NATIVE}
        for architecture in others:
            for number in range(1024):
                answer = self.filter.answer(number, architecture=architecture)
                self.assertEqual(answer, KILL_PROCESS, number)


class ArgumentTests(FilterTestCase):
    """Calls that are decided by their arguments; the upper half of these counts nowhere."""

    def test_filter_compares_the_lower_32_bits_of_an_argument(self) -> None:
        for name, argument, table in ARGUMENTS:
            for answer, values in table.items():
                for value, upper in itertools.product(values, (0, UPPER, 1 << 32)):
                    given = [0] * 6
                    given[argument] = upper | value
                    self.assertEqual(self.ask(name, *given), answer, f"{name} {value:#x}")

    def test_setsockopt_that_attaches_a_bpf_program_is_refused(self) -> None:
        for option in (26, 50, 51, 52):
            for upper in (0, UPPER, 1 << 32):
                answer = self.ask("setsockopt", 0, upper | SOL_SOCKET, upper | option)
                self.assertEqual(answer, ERRNO | errno.EPERM, option)
            for level in (SOL_IP, SOL_TCP, SOL_IPV6):
                self.assertEqual(self.ask("setsockopt", 0, level, option), ALLOW, option)
        for option in (2, 7, 8, 15, 25, 27, 49, 53):
            self.assertEqual(self.ask("setsockopt", 0, SOL_SOCKET, option), ALLOW, option)

    def test_unix_sockets_are_always_allowed_and_internet_sockets_if_configured(self) -> None:
        for internet in (False, True):
            self.filter = self.make(internet=internet)
            allowed = {UNIX, INET, INET6} if internet else {UNIX}
            for name in ("socket", "socketpair"):
                for family in (*range(64), 255, 2**31):
                    expected = ALLOW if family in allowed else ERRNO | errno.EAFNOSUPPORT
                    for upper in (0, UPPER, 1 << 32):
                        self.assertEqual(self.ask(name, upper | family, 1), expected, family)

    def test_internet_protocols_are_tcp_udp_and_icmp(self) -> None:
        self.filter = self.make(internet=True)
        for family in (INET, INET6):
            for protocol in range(512):
                known = protocol in (0, 1, 6, 17, 58)
                expected = ALLOW if known else ERRNO | errno.EPROTONOSUPPORT
                self.assertEqual(self.ask("socket", family, 1, UPPER | protocol), expected)
            # The protocol 0 of other kinds is that of a module: the kernel loads DCCP for kind 6.
            for kind in range(16):
                expected = ALLOW if kind in (1, 2, 3) else ERRNO | errno.EPROTONOSUPPORT
                for flags in (0, 0o2004000, UPPER):
                    self.assertEqual(self.ask("socket", family, flags | kind, 0), expected, kind)


class FileTests(FilterTestCase):
    def test_each_filter_program_is_short_enough_and_ends_with_a_return(self) -> None:
        for program, one in zip(self.programs, self.filter.filters, strict=True):
            self.assertEqual(len(one.instructions) * 8, len(program))
            self.assertLessEqual(len(one.instructions), MOST_INSTRUCTIONS)
            self.assertEqual(one.instructions[-1][0], 0x06, "no way on past the last one")

    def test_filter_that_refuses_prctl_set_seccomp_is_loaded_last(self) -> None:
        answers = [
            one.answer(resolve_call("prctl") or 0, 22, 2, architecture=NATIVE)
            for one in self.filter.filters
        ]
        self.assertEqual(answers, [ALLOW, ERRNO | errno.EINVAL])

    def test_system_call_unknown_to_the_library_fails_with_enosys(self) -> None:
        known = seccomp.resolve_call

        def resolve(name: str) -> int | None:
            return None if name in ("fchmodat2", "bpf", "open", "ioctl") else known(name)

        self.patch(seccomp, "resolve_call", resolve)
        older = self.make()
        for name in ("fchmodat2", "bpf", "open", "ioctl", "mount"):
            number = known(name)
            assert number is not None, name
            expected = errno.EPERM if name == "mount" else errno.ENOSYS
            self.assertEqual(older.answer(number, architecture=NATIVE), ERRNO | expected, name)

    def test_filters_built_under_a_seccomp_filter_are_identical(self) -> None:
        child = subprocess.run(
            [sys.executable, "-c", UNDER_ITSELF, *(each.hex() for each in self.programs)],
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual((child.stdout, child.stderr), ("the same\n", ""))


# Loads the filters that it is given into itself, which forbid seccomp(2), and makes them again.
UNDER_ITSELF = """
import ctypes, os, sys
from tawebeval.sandbox.seccomp import make_seccomp_filters

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

libc, programs = ctypes.CDLL(None, use_errno=True), tuple(map(bytes.fromhex, sys.argv[1:]))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
for program in programs:  # PR_SET_SECCOMP
    assert libc.prctl(22, 2, ctypes.byref(Program(len(program) // 8, program))) == 0
assert make_seccomp_filters(internet=False) == programs
print("the same")
"""


class LibraryTests(SynchronousTestCase):
    def test_missing_library_is_reported_with_the_package(self) -> None:
        self.patch(seccomp, "_LIBRARY", "libseccomp.so.0")
        with self.assertRaisesRegex(ConfigurationError, "apt-get install libseccomp2"):
            seccomp._load_library.__wrapped__()

    def test_refused_rule_is_an_error(self) -> None:
        rules = [FilterRule("getpid", ALLOW)]
        with self.assertRaisesRegex(ConfigurationError, "seccomp_rule_add_array of"):
            compile_filter(ALLOW, rules)
