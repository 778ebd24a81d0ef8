"""The rights of this process: what the kernel knows of them, and how they are given up.

Python's `os` has neither prctl(2) nor capset(2). The rights that these take away are the
calling thread's, so they have to be called while there is no other.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Mapping

CAP_NET_BIND_SERVICE = 10  # capabilities(7): ports below 1024

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_PR_SET_KEEPCAPS = 8
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

_VERSION_3 = 0x20080522  # of capset's arguments: two words of 32 bits for each set
_SETS = ("CapInh", "CapPrm", "CapEff", "CapAmb")


class Process:
    """This process. Every method raises OSError where the kernel refuses."""

    def user_ids(self) -> tuple[int, int, int]:
        """Return the real, the effective and the saved user."""
        return os.getresuid()

    def group_ids(self) -> tuple[int, int, int]:
        """Return the real, the effective and the saved group."""
        return os.getresgid()

    def groups(self) -> frozenset[int]:
        """Return the supplementary groups."""
        return frozenset(os.getgroups())

    def set_groups(self, groups: Iterable[int]) -> None:
        """Change the supplementary groups."""
        os.setgroups(list(groups))

    def set_group_ids(self, real: int, effective: int, saved: int) -> None:
        """Change the groups; -1 leaves one as it is."""
        os.setresgid(real, effective, saved)

    def set_user_ids(self, real: int, effective: int, saved: int) -> None:
        """Change the users; -1 leaves one as it is."""
        os.setresuid(real, effective, saved)

    def set_environment(self, variables: Mapping[str, str]) -> None:
        """Change environment variables."""
        os.environ.update(variables)

    def threads(self) -> int:
        """Return how many threads there are."""
        return len(os.listdir("/proc/self/task"))

    def capabilities(self) -> int:
        """Return the capabilities that are in any set but the bounding one, as bits."""
        found = 0
        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in _SETS:
                    found |= int(value, 16)
        return found

    def set_capabilities(self, capabilities: int) -> None:
        """Keep just these of the permitted ones and make them effective; none is inherited."""
        low, high = capabilities & 0xFFFF_FFFF, capabilities >> 32
        header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
        # Effective, permitted and inheritable: of the first 32 capabilities, and of the rest.
        data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
        _check(_libc.capset(header, data))
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)

    def keep_capabilities(self) -> None:
        """Let the permitted capabilities outlive the next change from root to another user."""
        prctl(_PR_SET_KEEPCAPS, 1)

    def empty_bounding_set(self) -> None:
        """Let no program that is executed gain a capability."""
        for capability in range(64):
            try:
                prctl(_PR_CAPBSET_READ, capability)
            except OSError as error:
                if error.errno == errno.EINVAL:  # the kernel knows no more of them
                    return
                raise
            prctl(_PR_CAPBSET_DROP, capability)

    def gain_nothing(self) -> None:
        """Let no program that is executed have more rights than this process (setuid bits)."""
        prctl(_PR_SET_NO_NEW_PRIVS, 1)

    def hide(self) -> None:
        """Let no process of the same user read this one's memory or environment, or trace it."""
        prctl(_PR_SET_DUMPABLE, 0)

    def is_hidden(self) -> bool:
        """Tell whether `hide` holds: a change of user may have ended it."""
        return prctl(_PR_GET_DUMPABLE) == 0


_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, argument: int = 0) -> int:
    """Ask for something of this process (prctl(2)). Raises OSError where the kernel refuses."""
    zero = ctypes.c_ulong(0)
    return _check(_libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero))


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
