"""The part of libseccomp that compiles filters of system calls (seccomp_init(3)), by ctypes."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable
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


def return_errno(number: int) -> int:
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
