"""Baseline: uvicorn and Starlette, with httptools, uvloop and orjson. `/poll` and `/page`.

`starlette_site FILE` takes the events of the page in FILE, and keeps them as a list of dicts, as
a program in Starlette would that is asked for them again and again. Each answer is built from
those. The access log is off, as ours is; there is one process, as ours is one.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.programs.static_site import POLL

HEADERS = {"Cache-Control": "no-store"}


def make_application(page: bytes) -> Starlette:
    """Return the application that has these events."""
    events = orjson.loads(page)["data"]

    def answer(data: list[dict[str, str]]) -> Response:
        page = {"begin": "0", "end": str(len(data)), "data": data}
        return Response(orjson.dumps(page), media_type="application/json", headers=HEADERS)

    async def poll(request: Request) -> Response:
        return answer([])

    async def full(request: Request) -> Response:
        return answer(events)

    return Starlette(routes=[Route("/poll", poll), Route("/page", full)])


def main() -> None:
    """Serve on a port of its own, which is printed."""
    application = make_application(Path(sys.argv[1]).read_bytes() or POLL)
    config = uvicorn.Config(
        application, loop="uvloop", http="httptools", log_level="warning", access_log=False
    )
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(config).run([listening])


if __name__ == "__main__":
    main()
