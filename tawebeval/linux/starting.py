"""Starting children, by `Popen`, which uses vfork. Everything here blocks, though hardly."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

import attrs

from tawebeval.linux.pipes import open_pipe

_READ = 64 * 1024


@attrs.frozen
class Started:
    """A child that runs, leads a session and process group of its own, and is not waited for yet.

    `pidfd` tells of its end; `stdout` and `stderr` are the ends of its pipes to read from, which do
    not block. Whoever takes it over closes them.
    """

    pid: int
    pidfd: int
    stdout: int
    stderr: int


def start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    descriptors: Sequence[int] = (),
) -> Started:
    """Start `argv` in `directory` with just that environment and nothing on stdin.

    Raises OSError where that is impossible. The child gets `descriptors` under the same
    numbers; they stay open here, too.
    """
    with contextlib.ExitStack() as writing, contextlib.ExitStack() as reading:
        stdout, stderr = (open_pipe(reading, writing) for _ in range(2))
        process = subprocess.Popen(
            argv,
            env=dict(environment),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=stdout[1],
            stderr=stderr[1],
            start_new_session=True,
            pass_fds=descriptors,
            umask=0o022,
        )
        process.returncode = 0  # it is not to wait for the child: whoever takes that over does
        started = taken_over(process.pid, stdout[0], stderr[0])
        reading.pop_all()
        return started


def taken_over(pid: int, stdout: int, stderr: int) -> Started:
    """Return a child of ours by that number; one whose end could not be told is killed.

    Raises OSError.
    """
    try:
        return Started(pid, os.pidfd_open(pid), stdout, stderr)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def wait_for(started: Started, patience: float) -> tuple[int, bytes]:
    """Return how a child ends that nobody takes over, and what it has printed until then.

    That is its exit status, or a signal's number with a minus. One that has not ended after so many
    seconds is killed. Raises TimeoutError then.
    """
    deadline = time.monotonic() + patience
    pipes = (started.stdout, started.stderr)
    printed = bytearray()
    with contextlib.ExitStack() as stack:
        for descriptor in (started.pidfd, *pipes):
            stack.callback(os.close, descriptor)
        waiting = stack.enter_context(selectors.DefaultSelector())
        for descriptor in (started.pidfd, *pipes):
            waiting.register(descriptor, selectors.EVENT_READ)
        ended = False
        while not ended:
            ready = [key.fd for key, _ in waiting.select(max(deadline - time.monotonic(), 0))]
            if not ready:
                os.kill(started.pid, signal.SIGKILL)
                os.waitpid(started.pid, 0)
                why = f"it has not ended within {patience:g} seconds"
                raise TimeoutError(errno.ETIMEDOUT, why)
            ended = started.pidfd in ready
            # What it printed was there before its end.
            for pipe in pipes if ended else ready:
                with contextlib.suppress(BlockingIOError):
                    while chunk := os.read(pipe, _READ):
                        printed += chunk
                    if not ended:
                        waiting.unregister(pipe)
    return os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1]), bytes(printed)
