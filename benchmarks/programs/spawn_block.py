"""How long the reactor's thread is busy with starting a child as git is: `spawn_block DESCRIPTORS`.

So many descriptors are open besides.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from benchmarks.measure import percentile
from tawebeval.linux.child import Spawner

reactor: Any = installed

_SPAWNS = 60
_WARM_UP = 5
_COMMAND = "/bin/true"


class Child(ProcessProtocol):
    """Tells when the child has ended."""

    def __init__(self) -> None:
        self.ended: Deferred[None] = Deferred()

    def processEnded(self, reason: Failure) -> None:
        """Tell."""
        self.ended.callback(None)


spawner = Spawner(reactor)


async def start_git(protocol: ProcessProtocol) -> float:
    """Start a child as git is."""
    begin = time.perf_counter()
    spawner(protocol, [_COMMAND], {}, "/")
    return time.perf_counter() - begin


def main() -> None:
    """Start one child after the other, and report."""
    descriptors = int(sys.argv[1])
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for _ in range(descriptors):
        os.dup(null)
    blocked: list[float] = []

    async def start_all() -> None:
        for _ in range(_WARM_UP + _SPAWNS):
            child = Child()
            blocked.append(await start_git(child) * 1e3)
            await child.ended
        reactor.stop()

    reactor.callWhenRunning(lambda: Deferred.fromCoroutine(start_all()))
    reactor.run()
    samples = blocked[_WARM_UP:]
    print(json.dumps({"middle": percentile(samples, 50), "worst": max(samples)}))


if __name__ == "__main__":
    main()
