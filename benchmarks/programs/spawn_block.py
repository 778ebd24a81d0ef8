"""How long the reactor's thread is busy with starting a child: `spawn_block HOW DESCRIPTORS`.

HOW is `ours`, or `twisted` for `reactor.spawnProcess`. So many descriptors are open besides.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from benchmarks.measure import percentile
from tawebeval.process import Spawner

reactor: Any = installed

_SPAWNS = 60
_WARM_UP = 5
_COMMAND = "/bin/true"


class Child(ProcessProtocol):
    """Tells when the child has ended."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def processEnded(self, reason: Failure) -> None:
        """Tell."""
        self._ended()


def spawn_ours(protocol: ProcessProtocol) -> None:
    """Start a child as the daemon does."""
    spawner(protocol, [_COMMAND], {}, "/")


def spawn_twisted(protocol: ProcessProtocol) -> None:
    """Start a child as Twisted does."""
    reactor.spawnProcess(protocol, _COMMAND, [_COMMAND], {})


spawner = Spawner(reactor)
_HOW = {"ours": spawn_ours, "twisted": spawn_twisted}


def main() -> None:
    """Start one child after the other, and report."""
    spawn, descriptors = _HOW[sys.argv[1]], int(sys.argv[2])
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for _ in range(descriptors):
        os.dup(null)
    blocked: list[float] = []

    def following() -> None:
        if len(blocked) == _WARM_UP + _SPAWNS:
            reactor.stop()
            return
        begin = time.perf_counter()
        spawn(Child(following))
        blocked.append((time.perf_counter() - begin) * 1e3)

    reactor.callWhenRunning(following)
    reactor.run()
    samples = blocked[_WARM_UP:]
    print(json.dumps({"middle": percentile(samples, 50), "worst": max(samples)}))


if __name__ == "__main__":
    main()
