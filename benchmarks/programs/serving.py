"""How those programs serve that ours is measured against, or with."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.interfaces import IProtocolFactory
from twisted.web.resource import Resource
from twisted.web.server import Site

reactor: Any = installed


def serve(factory: IProtocolFactory) -> None:
    """Serve until the process is ended, on a port of the loopback interface, which is printed."""
    port = reactor.listenTCP(0, factory, backlog=1024, interface="127.0.0.1")
    print(port.getHost().port, flush=True)
    reactor.run()


def serve_site(root: Resource) -> None:
    """Serve what is in `root`, without an access log, as ours is."""
    site: Any = Site(root)
    site.log = lambda request: None
    serve(site)
