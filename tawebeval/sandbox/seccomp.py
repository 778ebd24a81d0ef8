"""The filters of system calls for strangers' programs (seccomp(2)), in the form that bwrap takes.

The first filter is a list of what is allowed. A call that it does not name, known today or not,
fails with ENOSYS, as on a kernel that does not have it: programs then do without. The second one
refuses allowed calls by their arguments. Two, as one of libseccomp cannot allow a call and refuse
it for two values of one argument. The kernel takes the stricter answer.

Allowed are the calls that both Docker's default profile and systemd's @system-service allow, and a
few that programs need or that only take rights away. Refused of these are the calls that use up
what the kernel counts for the whole machine or for the daemon's user, show what other evaluations
do, or take room on the disk that nothing counts. docs/security.md lists these budgets.

The filters are for the machine's own architecture; a call of another one kills the process.
libseccomp compiles them (seccomp_init(3)), called by ctypes: of its bindings pyseccomp has had no
release since 2021, and Debian's package is for the system's Python alone.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from tawebeval.errors import ConfigurationError

ALLOW = 0x7FFF0000
"""The action that lets a call through."""

_KILL_PROCESS, _ERRNO = 0x80000000, 0x00050000
# What Linux 4.14 supports. Without it the library asks the kernel by seccomp(2), which the unit of
# the daemon and containers may forbid.
_API_LEVEL = 3
_BAD_ARCHITECTURE, _OPTIMIZE = 2, 8  # SCMP_FLTATR_ACT_BADARCH, SCMP_FLTATR_CTL_OPTIMIZE
_BINARY_TREE = 2  # a search in halves, for each evaluation loads the program
_MASKED_EQUAL = 7  # SCMP_CMP_MASKED_EQ
_X86_64, _X32 = 0xC000003E, 0x4000003E
_LIBRARY = "libseccomp.so.2"


class ArgumentTest(ctypes.Structure):
    """The condition that the argument of this index, from 0 to 5, has `value` under `mask`."""

    _fields_ = (
        ("argument_index", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    )

    def __init__(self, argument_index: int, mask: int, value: int) -> None:
        super().__init__(argument_index, _MASKED_EQUAL, mask, value)


class FilterRule(NamedTuple):
    """The action for a call that meets all conditions."""

    call: str
    action: int
    conditions: tuple[ArgumentTest, ...] = ()


def make_errno_action(number: int) -> int:
    """Return the action that fails a call with an errno; with 0 the call seems to succeed."""
    return _ERRNO | number


@functools.cache
def _load_library() -> Any:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        raise ConfigurationError(
            "sandbox.kind: libseccomp is not installed; run `apt-get install libseccomp2`"
        ) from None
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_arch_native.restype = ctypes.c_uint32
    return library


def _call(function: str, *arguments: object) -> None:
    """Call a function of the library. Raises: ConfigurationError."""
    result = getattr(_load_library(), function)(*arguments)
    if result < 0:
        raise ConfigurationError(
            f"sandbox.kind: {function} of libseccomp fails: {os.strerror(-result)}; install"
            " libseccomp2 2.5 or newer"
        )


def get_architecture() -> int:
    """Return the machine's architecture, as filters see it. Raises: ConfigurationError."""
    return int(_load_library().seccomp_arch_native())


def resolve_call(name: str) -> int | None:
    """Return the number of a call; None if the machine or this libseccomp has no such call.

    Raises: ConfigurationError.
    """
    number = int(_load_library().seccomp_syscall_resolve_name(name.encode()))
    return number if number >= 0 else None


def compile_filter(default_action: int, rules: Iterable[FilterRule]) -> bytes:
    """Return the program that applies the rules, and to all other calls `default_action`.

    Rules of calls that `resolve_call` does not know have no effect. A call of another architecture,
    where the numbers mean other calls, kills its process.

    Raises: ConfigurationError, if libseccomp is not installed or fails.
    """
    _call("seccomp_api_set", _API_LEVEL)
    filter_ = ctypes.c_void_p(_load_library().seccomp_init(default_action))
    try:
        _call("seccomp_attr_set", filter_, _BAD_ARCHITECTURE, _KILL_PROCESS)
        _call("seccomp_attr_set", filter_, _OPTIMIZE, _BINARY_TREE)
        for rule in rules:
            number = resolve_call(rule.call)
            if number is not None:
                count = len(rule.conditions)
                tests = (ArgumentTest * count)(*rule.conditions)
                _call("seccomp_rule_add_array", filter_, rule.action, number, count, tests)
        if get_architecture() == _X86_64:
            # Without rules of its own: its calls get the default action.
            _call("seccomp_arch_add", filter_, _X32)
        with os.fdopen(os.memfd_create("seccomp", os.MFD_CLOEXEC), "rb") as file:
            _call("seccomp_export_bpf", filter_, file.fileno())
            file.seek(0)
            return file.read()
    finally:
        _load_library().seccomp_release(filter_)


# Names of other architectures, and names that this libseccomp does not know, have no effect.
ALLOWED_CALLS: Mapping[str, str] = {
    "files": "_llseek access chdir chmod chown chown32 close close_range copy_file_range creat dup"
    " dup2 dup3 faccessat faccessat2 fadvise64 fadvise64_64 arm_fadvise64_64 fchdir fchmod fchmodat"
    " fchmodat2 fchown fchown32 fchownat fdatasync fgetxattr flistxattr flock fremovexattr"
    " fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futimesat"
    " getcwd getdents getdents64 getxattr lchown lchown32 lgetxattr link linkat listxattr"
    " llistxattr lremovexattr lseek lsetxattr lstat lstat64 mkdir mkdirat mknod mknodat newfstatat"
    " open openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink"
    " readlinkat readv removexattr rename renameat renameat2 rmdir setxattr stat stat64"
    " statfs statfs64 statx symlink symlinkat sync_file_range sync_file_range2 truncate truncate64"
    " umask unlink unlinkat utime utimensat utimensat_time64 utimes write writev",
    "waiting": "_newselect epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait"
    " eventfd eventfd2 poll ppoll ppoll_time64 pselect6 pselect6_time64 select",
    "memory": "brk cacheflush madvise membarrier mincore mlock mlock2 mlockall mprotect mremap"
    " msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect remap_file_pages",
    "communication": "accept accept4 bind connect getpeername getsockname getsockopt listen msgctl"
    " msgget msgrcv msgsnd pipe pipe2 recv recvfrom recvmmsg recvmmsg_time64 recvmsg semctl semget"
    " semop semtimedop semtimedop_time64 send sendmmsg sendmsg sendto shmat shmctl shmdt shutdown",
    "processes": "arch_prctl capget capset execve execveat exit exit_group fork futex futex_requeue"
    " futex_time64 futex_wait futex_waitv futex_wake get_robust_list get_thread_area getpgid"
    " getpgrp getpid getppid getpriority getrlimit getrusage getsid gettid ioprio_get"
    " kill map_shadow_stack pidfd_open pidfd_send_signal prlimit64 restart_syscall"
    " riscv_flush_icache riscv_hwprobe rseq sched_get_priority_max sched_get_priority_min"
    " sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval"
    " sched_rr_get_interval_time64 sched_setaffinity sched_setattr sched_setparam"
    " sched_setscheduler sched_yield set_robust_list set_thread_area set_tid_address set_tls"
    " setpgid setpriority setrlimit setsid swapcontext tgkill times tkill ugetrlimit uretprobe"
    " vfork wait4 waitid waitpid",
    "signals": "pause rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn"
    " rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sigaltstack signalfd"
    " signalfd4 sigprocmask sigreturn",
    "users": "getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups getgroups32 getresgid"
    " getresgid32 getresuid getresuid32 getuid getuid32 setfsgid setfsgid32 setfsuid setfsuid32"
    " setgid setgid32 setgroups setgroups32 setregid setregid32 setresgid setresgid32 setresuid"
    " setresuid32 setreuid setreuid32 setuid setuid32",
    "time": "alarm clock_getres clock_getres_time64 clock_gettime clock_gettime64 clock_nanosleep"
    " clock_nanosleep_time64 getitimer gettimeofday nanosleep setitimer time timer_create"
    " timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime timer_settime64"
    " timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime timerfd_settime64",
    "the machine": "getcpu getrandom sysinfo uname",
    # With these a program restricts itself or what it starts, such as a submission.
    "restrictions": "landlock_add_rule landlock_create_ruleset landlock_restrict_self",
}
# Calls that need a privilege, or that namespaces leave open. They fail with EPERM, which programs
# report as a lack of rights.
REFUSED_CALLS: Mapping[str, str] = {
    "mounts": "mount umount2 pivot_root chroot fsopen fsmount fsconfig fspick move_mount open_tree"
    " mount_setattr",
    "namespaces": "unshare setns",
    "other processes' memory": "ptrace process_vm_readv process_vm_writev process_madvise kcmp"
    " pidfd_getfd",
    "keys of the user that runs the daemon": "keyctl add_key request_key",
    "files by number, past all directories": "name_to_handle_at open_by_handle_at fanotify_init",
    "interfaces to the kernel's inside": "bpf perf_event_open userfaultfd syslog",
    "the machine": "kexec_load kexec_file_load init_module finit_module delete_module swapon"
    " swapoff reboot acct quotactl quotactl_fd vhangup iopl ioperm modify_ldt personality",
    "the time of day": "clock_settime settimeofday adjtimex clock_adjtime stime",
}

_WORD = 0xFFFFFFFF
_CLONE_NEW = (
    0x00020000,  # CLONE_NEWNS
    0x02000000,  # CLONE_NEWCGROUP
    0x04000000,  # CLONE_NEWUTS
    0x08000000,  # CLONE_NEWIPC
    0x10000000,  # CLONE_NEWUSER
    0x20000000,  # CLONE_NEWPID
    0x40000000,  # CLONE_NEWNET
)
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
# Requests for which the kernel loads a module, whoever asks: for the line discipline of a terminal,
# and by any socket for bridges, WAN devices, Frame Relay and VLANs.
_LOADING_REQUESTS = (
    0x5423,  # TIOCSETD
    0x8940,  # SIOCGIFBR
    0x8941,  # SIOCSIFBR
    0x894A,  # SIOCWANDEV
    0x8980,  # SIOCADDDLCI
    0x8981,  # SIOCDELDLCI
    0x8982,  # SIOCGIFVLAN
    0x8983,  # SIOCSIFVLAN
    0x89A0,  # SIOCBRADDBR
    0x89A1,  # SIOCBRDELBR
)
# Requests to file systems. They allocate blocks as fallocate(2) does, on every file system, or
# change a file's attributes: the project, by which quotas count, or the size that XFS allocates at
# once. Or they are of fscrypt: a key that is added stays in the file system after the
# evaluation, and counts for the user.
_FILE_REQUESTS = (
    *(0x40305800 + number for number in (0x0A, 0x24, 0x28, 0x2A, 0x39)),
    *(0x40086602, 0x401C5820),  # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR
    *(0x800C6613, 0x40106614),  # FS_IOC_SET_ENCRYPTION_POLICY, FS_IOC_GET_ENCRYPTION_PWSALT
    *(0xC0506617, 0xC0406618),  # FS_IOC_ADD_ENCRYPTION_KEY, FS_IOC_REMOVE_ENCRYPTION_KEY
)
# All of btrfs, such as subvolumes and snapshots; and FICLONE, without which cp(1) copies.
_BTRFS_REQUESTS = ArgumentTest(1, mask=0xFF00, value=0x9400)
_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ, _F_SETDELEG = 1024, 1026, 1031, 1040
_PR_SET_SECCOMP, _PR_SCHED_CORE = 22, 62
# No priority on the disk above others': none, best effort from the usual level downwards, idle.
_IO_PRIORITIES = (0, *range(0x4004, 0x4008), *range(0x6000, 0x6008))
_SOL_SOCKET = 1
_SO_ATTACH = (
    26,  # SO_ATTACH_FILTER
    50,  # SO_ATTACH_BPF
    51,  # SO_ATTACH_REUSEPORT_CBPF
    52,  # SO_ATTACH_REUSEPORT_EBPF
)
_MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x40000, 0x4, 0o4000
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
# Of sockets of IPv4 and IPv6: stream, datagram and raw, which needs a privilege. Others are of
# protocols that the kernel has to load, such as DCCP. Flags stand above these bits.
_KINDS, _KIND_BITS = (1, 2, 3), 4
_PROTOCOLS = (
    0,  # what the kind of socket has by default
    1,  # IPPROTO_ICMP
    6,  # IPPROTO_TCP
    17,  # IPPROTO_UDP
    58,  # IPPROTO_ICMPV6
)


_Refusals = Sequence[tuple[int, tuple[ArgumentTest, ...]]]
"""For one call: errors, and the conditions under which they are the answer."""


def _is(argument: int, *values: int) -> Sequence[ArgumentTest]:
    """Return tests of which one holds if the argument is one of the values.

    Of arguments other than addresses and sizes the kernel ignores the upper 32 bits; so do all
    tests here.
    """
    return [ArgumentTest(argument, _WORD, value) for value in values]


def _has(argument: int, *bits: int) -> Sequence[ArgumentTest]:
    """Return tests of which one holds if one of the bits is set."""
    return [ArgumentTest(argument, bit, bit) for bit in bits]


def _is_none(argument: int, values: Sequence[int], bits: int = 32) -> Sequence[ArgumentTest]:
    """Return tests of which one holds if the lower bits of the argument are none of the values.

    They test for each beginning, in binary, with which no value begins.
    """
    return [
        ArgumentTest(argument, (_WORD << rest) & (1 << bits) - 1, beginning << rest)
        for rest in range(bits)
        for beginning in sorted({value >> rest ^ 1 for value in values})
        if all(value >> rest != beginning for value in values)
    ]


def _refuse(error: int, *arguments: Iterable[ArgumentTest]) -> _Refusals:
    """Return the error as the answer if one test of each argument holds."""
    return [(error, conditions) for conditions in product(*arguments)]


# Calls that have another answer than the rest.
_ANSWERED_CALLS: Mapping[str, int] = {
    # 40 GB in 0.2 s. glibc's posix_fallocate(3) writes instead after EOPNOTSUPP alone.
    "fallocate": errno.EOPNOTSUPP,
    # Moving from a silent socket into stdout keeps the pipe locked. The reactor, which reads the
    # pipe, would hang in spite of O_NONBLOCK, and KILL would not end the daemon. The calls answer
    # so where they do not support a descriptor. Programs then read and write.
    **dict.fromkeys(("sendfile", "sendfile64", "splice", "tee", "vmsplice"), errno.EINVAL),
    # These write what all others have written, too. What an evaluation writes goes with it: the
    # calls seem to succeed.
    "sync": 0,
    "syncfs": 0,
}
_FCNTL = (
    # inotify's predecessor, which also tells what other evaluations open below /usr. A kernel
    # without the option answers so.
    *_refuse(errno.EINVAL, _is(1, _F_NOTIFY)),
    # Other evaluations would wait 45 s to open a file that all share, such as /etc/passwd. The
    # kernel answers so where the file is another user's.
    *_refuse(errno.EACCES, _is(1, _F_SETLEASE, _F_SETDELEG)),
    # What stdout holds at the exit goes into memory however full that is: 1 MiB of blank lines
    # takes 32 MiB. The kernel answers so where the user has too many pages for pipes.
    *_refuse(errno.EPERM, _is(1, _F_SETPIPE_SZ)),
)
# Huge pages, which the operator has set apart for something else.
_MMAP = _refuse(errno.ENOMEM, _has(3, _MAP_HUGETLB))
# Calls that are allowed but for some arguments.
_REFUSED_ARGUMENTS: Mapping[str, _Refusals] = {
    # clone3(2) has its flags in memory, where no filter can look: C libraries take clone(2) then.
    "clone": _refuse(errno.EPERM, _has(0, *_CLONE_NEW)),
    "ioctl": (
        # Input for a terminal, as if it were typed there.
        *_refuse(errno.EPERM, _is(1, _TIOCSTI, _TIOCLINUX, *_LOADING_REQUESTS)),
        *_refuse(errno.EOPNOTSUPP, [*_is(1, *_FILE_REQUESTS), _BTRFS_REQUESTS]),
    ),
    "fcntl": _FCNTL,
    "fcntl64": _FCNTL,
    # A filter takes of the machine's memory for BPF; a core of one's own idles its sibling.
    "prctl": _refuse(errno.EINVAL, _is(0, _PR_SET_SECCOMP, _PR_SCHED_CORE)),
    "setsockopt": _refuse(errno.EPERM, _is(1, _SOL_SOCKET), _is(2, *_SO_ATTACH)),
    "ioprio_set": _refuse(errno.EPERM, _is_none(2, _IO_PRIORITIES)),
    "mmap": _MMAP,
    "mmap2": _MMAP,
    "memfd_create": _refuse(errno.EINVAL, _has(1, _MFD_HUGETLB)),
    "shmget": _refuse(errno.ENOMEM, _has(2, _SHM_HUGETLB)),
}


def make_seccomp_filters(*, internet: bool) -> tuple[bytes, bytes]:
    """Return the programs of both filters.

    They have to be loaded in this order: the second one refuses to load more. `internet` allows
    sockets of IPv4 and IPv6. Raises: ConfigurationError, if libseccomp is not installed or fails.
    """
    refused = {**_REFUSED_ARGUMENTS, **_refuse_sockets(internet=internet)}
    allowing = compile_filter(make_errno_action(errno.ENOSYS), _list_calls(refused))
    refusing = compile_filter(
        ALLOW,
        (
            FilterRule(call, make_errno_action(error), conditions)
            for call, refusals in refused.items()
            for error, conditions in refusals
        ),
    )
    return allowing, refusing


def _list_calls(refused_by_arguments: Iterable[str]) -> Iterator[FilterRule]:
    """Yield the rules of calls whose arguments do not count."""
    allowed = " ".join([*ALLOWED_CALLS.values(), *refused_by_arguments])
    for call in allowed.split():
        yield FilterRule(call, ALLOW)
    for call in " ".join(REFUSED_CALLS.values()).split():
        yield FilterRule(call, make_errno_action(errno.EPERM))
    for call, error in _ANSWERED_CALLS.items():
        yield FilterRule(call, make_errno_action(error))


def _refuse_sockets(*, internet: bool) -> Mapping[str, _Refusals]:
    """Return which sockets may not be made: network namespaces do not cover all families."""
    families = (_AF_INET, _AF_INET6) if internet else ()
    refusals = (
        *_refuse(errno.EAFNOSUPPORT, _is_none(0, (_AF_UNIX, *families))),
        *_refuse(errno.EPROTONOSUPPORT, _is(0, *families), _is_none(1, _KINDS, _KIND_BITS)),
        *_refuse(errno.EPROTONOSUPPORT, _is(0, *families), _is_none(2, _PROTOCOLS)),
    )
    return dict.fromkeys(("socket", "socketpair"), refusals)
