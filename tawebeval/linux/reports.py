"""What becomes of an order: the launcher's report of it, as `launcher` says."""

from __future__ import annotations

import errno
import os
import signal
import socket

import attrs

from tawebeval.linux import launcher

ENDED = "the process that starts evaluators has ended"

REPORT = 8 * 1024
"""Bytes of a message, in which there is one path at most."""


class NotMounted(OSError):
    """An overlay cannot be mounted."""


@attrs.frozen
class Overlay:
    """A mounted overlay: a descriptor of its top, and the devices of its files."""

    top: int
    devices: frozenset[int]


def reported(report: socket.socket) -> tuple[int, Overlay | None]:
    """Return which child has begun, and its overlay, if it has one. Raises OSError.

    One that is a ConnectionError or a TimeoutError tells that nothing can be had of the launcher.
    """
    pid, devices, tops = 0, list[int](), list[int]()
    try:
        while True:
            message, descriptors = launcher.receive(report, REPORT, 1)
            tops += descriptors
            if not message:
                break
            numbers, *failure = message.split(b"\0")
            pid, *devices = map(int, numbers.split())
            if failure:
                raise _failure(*failure)
        if not pid:
            raise ConnectionResetError(errno.ECONNRESET, ENDED)
    except OSError as error:
        for top in tops:
            os.close(top)
        if pid:
            os.kill(pid, signal.SIGKILL)
            if not isinstance(error, TimeoutError):  # then it may hang in the kernel
                os.waitpid(pid, 0)
        raise
    return pid, Overlay(tops[0], frozenset(devices)) if tops else None


def _failure(step: bytes, number: bytes, path: bytes) -> OSError:
    kind = NotMounted if step == launcher.MOUNT else OSError
    return kind(int(number), os.strerror(int(number)), os.fsdecode(path) or None)
