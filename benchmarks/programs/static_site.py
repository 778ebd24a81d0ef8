"""Baseline: a bare `twisted.web` Site. `/poll` and `/page` are static resources.

`static_site FILE` serves the content of FILE as the page. The access log is off, as ours
is; the format of the answer is that of `Data`, with Twisted's own headers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from twisted.web.resource import Resource
from twisted.web.static import Data

from benchmarks.programs.serving import serve_site

POLL = b'{"begin":"0","end":"0","data":[]}'


def main() -> None:
    """Serve both."""
    root = Resource()
    root.putChild(b"poll", Data(POLL, "application/json"))
    root.putChild(b"page", Data(Path(sys.argv[1]).read_bytes(), "application/json"))
    serve_site(root)


if __name__ == "__main__":
    main()
