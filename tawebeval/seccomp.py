"""The filter of system calls for strangers' programs (seccomp(2)), in the form that bwrap takes.

A list of what is refused, not of what is allowed: evaluators are programs of any kind, and
user, mount and network namespaces already take away what needs a privilege. What stands here
is what a namespace leaves open, or what has a history of holes in the kernel. The filter is
for the machine's own architecture; calls of another one end the program.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from tawebeval.errors import ConfigurationError

_REFUSED = {
    "mounts": "mount umount2 pivot_root chroot fsopen fsmount fsconfig fspick move_mount open_tree"
    " mount_setattr",
    "namespaces": "unshare setns",
    "other processes' memory": "ptrace process_vm_readv process_vm_writev process_madvise kcmp"
    " pidfd_getfd",
    "keys of the user that runs the daemon": "keyctl add_key request_key",
    "files by number, past all directories": "name_to_handle_at open_by_handle_at fanotify_init",
    "interfaces to the kernel's inside": "bpf perf_event_open userfaultfd lookup_dcookie syslog",
    "the machine": "kexec_load kexec_file_load init_module finit_module delete_module"
    " swapon swapoff reboot acct quotactl quotactl_fd vhangup iopl ioperm modify_ldt uselib"
    " personality nfsservctl sysfs ustat",
    "the time of day": "clock_settime settimeofday adjtimex clock_adjtime stime",
}
# Programs try these first and do without them where the kernel does not have them.
_MISSING = "clone3 io_uring_setup io_uring_enter io_uring_register"

_NAMESPACES = (
    0x00020000,  # CLONE_NEWNS
    0x02000000,  # CLONE_NEWCGROUP
    0x04000000,  # CLONE_NEWUTS
    0x08000000,  # CLONE_NEWIPC
    0x10000000,  # CLONE_NEWUSER
    0x20000000,  # CLONE_NEWPID
    0x40000000,  # CLONE_NEWNET
)
# Input that is put into a terminal as if it were typed there.
_TERMINAL = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_WORD = 0xFFFFFFFF  # the part of an argument that the kernel looks at

# The families of sockets that there are, besides AF_UNIX. Network namespaces do not cover all
# of the others: packet, vsock, netlink and rarer ones.
_INET, _INET6 = 2, 10


def make_filter() -> int:
    """Return a descriptor of the filter's program: a file in memory, read from its start.

    Raises ConfigurationError where the library that writes it is not installed.
    """
    pyseccomp = _library()
    calls = pyseccomp.SyscallFilter(defaction=pyseccomp.ALLOW)
    refuse = pyseccomp.ERRNO(errno.EPERM)

    def add(action: int, name: str, *arguments: object) -> None:
        try:
            number = pyseccomp.resolve_syscall(pyseccomp.system_arch(), name)
        except ValueError:
            return  # this version of libseccomp does not know it
        if number >= 0:  # others are of other architectures
            calls.add_rule(action, name, *arguments)

    for names in _REFUSED.values():
        for name in names.split():
            add(refuse, name)
    for name in _MISSING.split():
        add(pyseccomp.ERRNO(errno.ENOSYS), name)
    for flag in _NAMESPACES:
        add(refuse, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    for request in _TERMINAL:
        add(refuse, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, _WORD, request))
    no_family = pyseccomp.ERRNO(errno.EAFNOSUPPORT)
    for name in ("socket", "socketpair"):
        add(no_family, name, pyseccomp.Arg(0, pyseccomp.GT, _INET6))
        for family in range(_INET + 1, _INET6):
            add(no_family, name, pyseccomp.Arg(0, pyseccomp.EQ, family))
    descriptor = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        calls.export_bpf(file)
    return descriptor


def _library() -> Any:
    """Import it only where there is to be a sandbox: it loads a library of the system's."""
    try:
        import pyseccomp
    except RuntimeError:
        raise ConfigurationError(
            "sandbox.kind: there is no libseccomp here, which writes the sandbox's filter of"
            " system calls; apt-get install libseccomp2"
        ) from None
    return pyseccomp
