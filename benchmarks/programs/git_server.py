"""A server of smart HTTP: `git http-backend` for what lies in ROOT, `git_server ROOT`.

The first part of a path is left out, so that one repository has as many URLs as are wanted.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from twisted.web.resource import Resource
from twisted.web.twcgi import CGIScript

from benchmarks.programs.serving import serve_site


class Backend(CGIScript):
    """Runs `git http-backend` for each request."""

    def __init__(self, root: str) -> None:
        path = subprocess.check_output(["git", "--exec-path"], text=True).strip()
        super().__init__(str(Path(path, "git-http-backend")))
        self._root = root

    def render(self, request: Any) -> Any:
        """Run it; CGIScript wants the path as text, which Site has as bytes."""
        request.postpath = [part.decode() for part in request.postpath]
        return super().render(request)

    def runProcess(self, env: dict[Any, Any], request: Any, qargs: Any = ()) -> None:
        """Add what the program wants to know besides what is usual."""
        more = {
            "GIT_PROJECT_ROOT": self._root,
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_PROTOCOL": env.get(b"HTTP_GIT_PROTOCOL", b""),
        }
        super().runProcess({**env, **more}, request, qargs)


class Root(Resource):
    """Leaves the first part of the path out."""

    def getChild(self, name: bytes, request: Any) -> Resource:
        """Return the same for every name."""
        return Backend(sys.argv[1])


def main() -> None:
    """Serve repositories."""
    serve_site(Root())


if __name__ == "__main__":
    main()
