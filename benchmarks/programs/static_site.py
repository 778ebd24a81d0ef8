"""Baseline: a bare `twisted.web` Site. `/poll` is a static resource.

The access log is off, as ours is; the format of the answer is that of `Data`, with Twisted's own
headers.
"""

from __future__ import annotations

from twisted.web.resource import Resource
from twisted.web.static import Data

from benchmarks.programs.serving import serve_site

POLL = b'{"begin":"0","end":"0","data":[]}'


def main() -> None:
    """Serve it."""
    root = Resource()
    root.putChild(b"poll", Data(POLL, "application/json"))
    serve_site(root)


if __name__ == "__main__":
    main()
