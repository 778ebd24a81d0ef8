"""`tawebeval.seccomp`: what the filter says to each call, run here as the kernel would run it."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator

import attrs
import pyseccomp
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.seccomp import make_filter

# What a filter may answer (linux/seccomp.h).
ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
KILL_THREAD = 0x00000000
ERRNO = 0x00050000

NATIVE: int = pyseccomp.system_arch()
X86_64, X86 = 0xC000003E, 0x40000003
X32 = 0x40000000
"""Added to the number of a call of 32 bits on x86-64, under the same architecture."""

UPPER = 0xDEADBEEF00000000
"""What may stand in an argument where the kernel does not look."""

# All that is refused whatever its arguments. Machines have not all of these.
NOT_PERMITTED = """
    mount umount2 pivot_root chroot fsopen fsmount fsconfig fspick move_mount open_tree
    mount_setattr unshare setns ptrace process_vm_readv process_vm_writev process_madvise kcmp
    pidfd_getfd keyctl add_key request_key name_to_handle_at open_by_handle_at fanotify_init bpf
    perf_event_open userfaultfd lookup_dcookie syslog kexec_load kexec_file_load init_module
    finit_module delete_module swapon swapoff reboot acct quotactl quotactl_fd vhangup iopl ioperm
    modify_ldt uselib personality nfsservctl sysfs ustat clock_settime settimeofday adjtimex
    clock_adjtime stime
"""
MISSING = "clone3 io_uring_setup io_uring_enter io_uring_register"

THREAD = 0x003D0F00  # the flags of pthread_create(3)
FORK = 0x01200011  # and of fork(3)
# That for the time is for unshare(2) and clone3(2) alone: here its bit is part of a signal.
NAMESPACES = {
    "mount": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
TIOCSTI, TIOCLINUX, TCGETS = 0x5412, 0x541C, 0x5401


@attrs.frozen
class Filter:
    """A program of classic BPF, as far as seccomp has it (net/core/filter.c)."""

    instructions: tuple[tuple[int, int, int, int], ...]

    def answer(self, number: int, *arguments: int, architecture: int = NATIVE) -> int:
        """Return what it says to a call."""
        given = [*arguments, *[0] * (6 - len(arguments))]
        data = struct.pack("=IIQ6Q", number, architecture, 0, *given)
        accumulator = place = 0
        while True:
            code, if_true, if_false, value = self.instructions[place]
            place += 1
            if code == 0x20:  # load a word
                (accumulator,) = struct.unpack_from("=I", data, value)
            elif code == 0x54:  # and
                accumulator &= value
            elif code == 0x05:  # jump
                place += value
            elif code in TESTS:
                place += if_true if TESTS[code](accumulator, value) else if_false
            elif code == 0x06:  # return
                return value
            else:
                raise NotImplementedError(f"an instruction of code {code:#x}")


TESTS: dict[int, Callable[[int, int], int]] = {
    0x15: lambda a, b: a == b,
    0x25: lambda a, b: a > b,
    0x35: lambda a, b: a >= b,
    0x45: lambda a, b: a & b,
}


def number_of(name: str) -> int | None:
    """Return the number of a call; None where this machine does not have it."""
    try:
        number: int = pyseccomp.resolve_syscall(NATIVE, name)
    except ValueError:
        return None
    return number if number >= 0 else None


def numbers(names: str) -> Iterator[int]:
    """Yield the numbers of calls, where they have one."""
    for name in names.split():
        number = number_of(name)
        if number is not None:
            yield number


class FilterTestCase(SynchronousTestCase):
    """The filter, read from what bwrap is given."""

    def setUp(self) -> None:
        self.filter = self.make()

    def make(self) -> Filter:
        """Return a new one."""
        self.descriptor = make_filter()
        self.addCleanup(os.close, self.descriptor)
        program = os.pread(self.descriptor, 2**20, 0)
        return Filter(tuple(struct.iter_unpack("=HBBI", program)))

    def ask(self, name: str, *arguments: int) -> int:
        """Return what is said to a call of that name."""
        number = number_of(name)
        assert number is not None, name
        return self.filter.answer(number, *arguments)


class CallTests(FilterTestCase):
    """Calls that are refused whatever their arguments, and all others."""

    def test_all(self) -> None:
        """Of all calls that there are or may be, these are refused and no other one."""
        refused: dict[int, int] = {}
        for number in range(1024):
            answer = self.filter.answer(number)
            if answer != ALLOW:
                refused[number] = answer
        expected = dict.fromkeys(numbers(NOT_PERMITTED), ERRNO | errno.EPERM)
        expected |= dict.fromkeys(numbers(MISSING), ERRNO | errno.ENOSYS)
        self.assertGreater(len(expected), 50)
        self.assertEqual(refused, expected)

    def test_arguments(self) -> None:
        """No argument makes it more lenient."""
        for number in (*numbers(NOT_PERMITTED), *numbers(MISSING)):
            for argument in (1, UPPER, 2**64 - 1):
                self.assertNotEqual(self.filter.answer(number, *[argument] * 6), ALLOW, number)

    def test_other_architectures(self) -> None:
        """What calls as another architecture would, with its other numbers, is killed."""
        others = {X86, X86_64, 0x40000028, 0xC00000B7, 0, NATIVE ^ 0x40000000} - {NATIVE}
        for architecture in others:
            for number in (0, 1, 20, 39, 101, 165):
                answer = self.filter.answer(number, architecture=architecture)
                self.assertIn(answer, (KILL_THREAD, KILL_PROCESS))

    def test_x32(self) -> None:
        """On x86-64 nor are there the calls of x32, which come as the native architecture's."""
        for number in range(1024 if NATIVE == X86_64 else 0):
            self.assertIn(self.filter.answer(X32 | number), (KILL_THREAD, KILL_PROCESS))


class CloneTests(FilterTestCase):
    """Which children clone(2) makes."""

    def test_threads_and_children(self) -> None:
        """All that programs ask for."""
        for flags in (0, 17, THREAD, FORK, UPPER | THREAD):
            self.assertEqual(self.ask("clone", flags), ALLOW, hex(flags))

    def test_namespaces(self) -> None:
        """None in a new namespace, whatever else is asked for or stands beside it."""
        for name, flag in NAMESPACES.items():
            for others in (0, 17, THREAD, FORK, UPPER, 2**64 - 1):
                answer = self.ask("clone", flag | others)
                self.assertEqual(answer, ERRNO | errno.EPERM, f"{name} {others:#x}")


class TerminalTests(FilterTestCase):
    """What ioctl(2) does."""

    def test_input(self) -> None:
        """Nothing is typed into a terminal, whatever stands in the upper half of the request."""
        for request in (TIOCSTI, TIOCLINUX):
            for upper in (0, UPPER, 1 << 32, 0xFFFFFFFF << 32):
                self.assertEqual(self.ask("ioctl", 0, upper | request), ERRNO | errno.EPERM)

    def test_others(self) -> None:
        """All other requests are the kernel's to judge, whatever they are for."""
        for request in (TCGETS, TIOCSTI - 1, TIOCSTI + 1, TIOCLINUX + 1, 0x541B, UPPER | TCGETS):
            self.assertEqual(self.ask("ioctl", TIOCSTI, request, TIOCSTI), ALLOW, hex(request))


class SocketTests(FilterTestCase):
    """The families of sockets."""

    def test_families(self) -> None:
        """Those of UNIX and of the Internet, and no other."""
        for name in ("socket", "socketpair"):
            for family in (*range(64), 255, 2**31, 2**32 - 1):
                expected = ALLOW if family in (0, 1, 2, 10) else ERRNO | errno.EAFNOSUPPORT
                self.assertEqual(self.ask(name, family, 1), expected, f"{name} {family}")

    def test_upper_half(self) -> None:
        """What stands where the kernel does not look lets no other family in."""
        for name in ("socket", "socketpair"):
            for family in (*range(3, 10), *range(11, 64)):
                for upper in (UPPER, 1 << 32, 0xFFFFFFFF << 32):
                    answer = self.ask(name, upper | family, 1)
                    self.assertEqual(answer, ERRNO | errno.EAFNOSUPPORT, f"{name} {family}")


class FileTests(FilterTestCase):
    """What bwrap is given."""

    def test_program(self) -> None:
        """Whole instructions, not more than the kernel takes, no way on past the last one."""
        size = os.fstat(self.descriptor).st_size
        self.assertEqual(size % 8, 0)
        self.assertEqual(len(self.filter.instructions), size // 8)
        self.assertLessEqual(size // 8, 4096)
        self.assertEqual(self.filter.instructions[-1][0], 0x06)

    def test_not_inherited(self) -> None:
        """It is for those to whom it is given."""
        self.assertFalse(os.get_inheritable(self.descriptor))

    def test_older_library(self) -> None:
        """Names that libseccomp does not know are left out, or it could not be made at all."""
        known = pyseccomp.resolve_syscall

        def resolve(architecture: int, name: str) -> int:
            if name in ("clone3", "bpf"):
                raise ValueError(name)
            return known(architecture, name)

        self.patch(pyseccomp, "resolve_syscall", resolve)
        older = self.make()
        for name in ("clone3", "bpf", "mount"):
            number = known(NATIVE, name)
            self.assertEqual(older.answer(number) == ALLOW, name != "mount", name)

    def test_other_machines(self) -> None:
        """Calls that have no number of this architecture are left out, too."""
        known = pyseccomp.resolve_syscall
        added: set[str] = set()

        class Calls(pyseccomp.SyscallFilter):
            def add_rule(self, action: int, name: str, *arguments: object) -> None:
                added.add(name)
                super().add_rule(action, name, *arguments)

        def resolve(architecture: int, name: str) -> int:
            return -10064 if name == "bpf" else known(architecture, name)

        self.patch(pyseccomp, "SyscallFilter", Calls)
        self.patch(pyseccomp, "resolve_syscall", resolve)
        self.make()
        self.assertIn("mount", added)
        self.assertNotIn("bpf", added)
