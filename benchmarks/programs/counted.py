"""The daemon, with a count of what objects there are: `python counted.py SOCKET ARGUMENT...`.

The arguments are those of twistd. Whoever connects to the UNIX socket is sent a JSON object: how
many instances the garbage collector knows, by class, of the package's own classes, and of those
of Twisted that stand for connections and for waiting.
"""

import gc
import json
import sys
from collections import Counter

from twisted.internet import reactor
from twisted.internet.protocol import Factory, Protocol
from twisted.scripts.twistd import run

# Not threads, which stay for the next who needs them, nor timed calls, of which the reactor keeps
# some that were cancelled.
_COUNTED = ("tawebeval.", "twisted.web.", "twisted.internet.defer.", "twisted.internet.tcp.")
# The figures of the metrics stay, one for each route that was ever asked for, the last queries, and
# the last forms.
_KEPT = ("tawebeval.core.evaluations.", "tawebeval.core.form.", "tawebeval.web.events.EventQuery")


class Count(Protocol):
    """Says it, and no more."""

    def connectionMade(self) -> None:
        """Count."""
        gc.collect()
        kinds = map(type, gc.get_objects())
        names = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
        counted = (name for name in names if name.startswith(_COUNTED))
        found = Counter(name for name in counted if not name.startswith(_KEPT))
        self.transport.write(json.dumps(found).encode())
        self.transport.loseConnection()


def main() -> None:
    """Run twistd."""
    path = sys.argv.pop(1)
    factory = Factory.forProtocol(Count)
    factory.noisy = False
    reactor.callWhenRunning(reactor.listenUNIX, path, factory)  # type: ignore[attr-defined]
    run()


if __name__ == "__main__":
    main()
