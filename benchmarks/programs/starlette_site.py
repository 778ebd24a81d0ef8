"""Baseline: uvicorn and Starlette, with httptools, uvloop and orjson: empty polls at `/poll`.

The access log is off, as ours is; there is one process, as ours is one.
"""

from __future__ import annotations

import socket

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HEADERS = {"Cache-Control": "no-store"}


async def poll(request: Request) -> Response:
    """Answer an empty page."""
    page: dict[str, object] = {"begin": "0", "end": "0", "data": []}
    return Response(orjson.dumps(page), media_type="application/json", headers=HEADERS)


def main() -> None:
    """Serve on a port of its own, which is printed."""
    application = Starlette(routes=[Route("/poll", poll)])
    config = uvicorn.Config(
        application, loop="uvloop", http="httptools", log_level="warning", access_log=False
    )
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(config).run([listening])


if __name__ == "__main__":
    main()
