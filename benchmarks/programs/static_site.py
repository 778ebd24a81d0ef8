"""Baseline: a bare `twisted.web` Site. `/poll` and `/page` are static resources.

`static_site FILE` serves the content of FILE as the page. The access log is off, as ours
is; the format of the answer is that of `Data`, with Twisted's own headers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed
from twisted.web.resource import Resource
from twisted.web.server import Site
from twisted.web.static import Data

reactor: Any = installed

POLL = b'{"begin":"0","end":"0","data":[]}'


def main() -> None:
    """Serve on a port of its own, which is printed."""
    root = Resource()
    root.putChild(b"poll", Data(POLL, "application/json"))
    root.putChild(b"page", Data(Path(sys.argv[1]).read_bytes(), "application/json"))
    site: Any = Site(root)
    site.log = lambda request: None
    port = reactor.listenTCP(0, site, backlog=1024, interface="127.0.0.1")
    print(port.getHost().port, flush=True)
    reactor.run()


if __name__ == "__main__":
    main()
