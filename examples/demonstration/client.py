"""A small client of the daemon: it submits files and follows the events."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import treq
from twisted.web.http_headers import Headers

from demonstration.daemon import DemonstrationError

Event = dict[str, Any]
"""``{"type": "text" | "data", "payload": ...}``."""


@dataclass(frozen=True)
class SubmittedFile:
    """A file of a submission; ``name`` is None for text from a text field."""

    field: str
    content: bytes
    name: str | None


async def answer_of(response: Any) -> Any:
    """Return an answer's JSON. Raises: DemonstrationError (the answer is an error)."""
    body = await treq.content(response)
    if response.code != 200:
        text = body.decode(errors="replace")
        raise DemonstrationError(f"The daemon answered with status {response.code}: {text}")
    return await treq.json_content(response)


async def submit(base_url: str, submitted: SubmittedFile, fields: Mapping[str, str]) -> str:
    """Start an evaluation, and return its identifier."""
    name = f"submission[{submitted.field}]"
    # treq sends no file name where it is empty.
    part: Any = (submitted.name or "", "application/octet-stream", io.BytesIO(submitted.content))
    response = await treq.post(
        f"{base_url}/evaluate", data=dict(fields), files={name: part}, timeout=30
    )
    answer = await answer_of(response)
    return str(answer["evaluation_id"])


async def follow(base_url: str, evaluation_id: str, show: Callable[[Event], object]) -> None:
    """Call ``show`` with each event of an evaluation as it arrives, until the end.

    The events come as a stream of JSON Lines. Unlike a reader of pages, a stream
    acknowledges nothing that the daemon has room for, so a browser can read the
    same events afterwards.
    """
    response = await treq.get(
        f"{base_url}/evaluation/{evaluation_id}/events",
        headers=Headers({"Accept": ["application/jsonl"]}),
    )
    if response.code != 200:
        await answer_of(response)
    rest = b""

    def receive(data: bytes) -> None:
        nonlocal rest
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            show(json.loads(line))

    await treq.collect(response, receive)
