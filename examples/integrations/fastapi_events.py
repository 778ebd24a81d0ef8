"""FastAPI: submit a file, and follow its evaluation live in any number of browsers.

The site reads each evaluation once, and sends the events on to all of its viewers. (If each viewer
read by itself, each would acknowledge, and so discard, events that others still need.)

    TAWEBEVAL_SERVER=https://judge.example.org uvicorn fastapi_events:app
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from tawebeval_client import AsyncClient, ClientError, Data, EvaluationError, Event, NamedFile, Text

MOST_EVALUATIONS, MOST_BYTES = 100, 65_536  # that viewers may still open; of a file

client = AsyncClient(os.environ["TAWEBEVAL_SERVER"], os.environ.get("TAWEBEVAL_TOKEN"))
app = FastAPI()


class Broadcast:
    """The events of one evaluation for all viewers."""

    def __init__(self, identifier: str) -> None:
        self.messages: list[str] = []
        self.has_ended = False
        self._changed = asyncio.Condition()
        self.reading = asyncio.create_task(self._read(identifier))

    async def _read(self, identifier: str) -> None:
        try:
            async for page in client.pages(identifier):
                await self._send([describe(event) for event in page.events])
        except ClientError as error:
            await self._send([{"error": str(error)}])
        self.has_ended = True
        await self._send([])

    async def _send(self, messages: list[dict[str, str]]) -> None:
        async with self._changed:
            self.messages += [f"data: {json.dumps(message)}\n\n" for message in messages]
            self._changed.notify_all()

    async def follow(self) -> AsyncIterator[str]:
        """Yield all messages, from the first one on."""
        sent = 0
        while True:
            while sent < len(self.messages):
                yield self.messages[sent]
                sent += 1
            if self.has_ended:
                yield "event: end\ndata:\n\n"
                return
            async with self._changed:
                if sent == len(self.messages) and not self.has_ended:
                    await self._changed.wait()


def describe(event: Event) -> dict[str, str]:
    """Return what the page shows of an event."""
    if isinstance(event, Text):
        return {"text": event.text}
    if isinstance(event, EvaluationError):
        return {"error": f"{event.reason}: {event.message}"}
    return {"data": event.raw_json} if isinstance(event, Data) else {}


broadcasts: dict[str, Broadcast] = {}


@app.post("/problems/{problem}/submit")
async def submit(problem: str, filename: str, request: Request) -> dict[str, str]:
    """Begin an evaluation of the body: `fetch(url, { method: "POST", body: file })`."""
    if int(request.headers.get("Content-Length", MOST_BYTES)) >= MOST_BYTES:
        raise HTTPException(413, f"send a file of less than {MOST_BYTES} bytes")
    source = NamedFile(filename, await request.body())
    try:
        identifier = await client.evaluate_problem(problem, {"source": source})
    except (ClientError, ValueError) as error:
        raise HTTPException(502, str(error)) from None
    broadcasts[identifier] = Broadcast(identifier)
    if len(broadcasts) > MOST_EVALUATIONS:
        broadcasts.pop(next(iter(broadcasts)))
    return {"evaluation": identifier}


@app.get("/evaluations/{identifier}/events")
async def events(identifier: str) -> StreamingResponse:
    """Follow an evaluation, for `new EventSource(...)`."""
    if identifier not in broadcasts:
        raise HTTPException(404, "no such evaluation")
    return StreamingResponse(broadcasts[identifier].follow(), media_type="text/event-stream")
