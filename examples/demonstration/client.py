"""A client of the daemon, as small as one can be: submit, then poll for events."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import treq
from twisted.web.http_headers import Headers

from demonstration.daemon import DemonstrationError

Event = dict[str, Any]
"""``{"type": "text" | "data", "payload": ...}``."""

WAIT_SECONDS = 10


@dataclass(frozen=True)
class SubmittedFile:
    """A file of a submission; without a name it is text that somebody typed."""

    field: str
    content: bytes
    name: str | None


async def answer_of(response: Any) -> Any:
    """Read an answer's JSON; an error's own words become a DemonstrationError."""
    body = await treq.content(response)
    if response.code != 200:
        text = body.decode(errors="replace")
        raise DemonstrationError(f"The daemon answered {response.code}: {text}")
    return await treq.json_content(response)


async def submit(base_url: str, submitted: SubmittedFile, fields: Mapping[str, str]) -> str:
    """Start an evaluation, and give its identifier."""
    name = f"submission[{submitted.field}]"
    # treq sends no file name where it is empty.
    part: Any = (submitted.name or "", "application/octet-stream", io.BytesIO(submitted.content))
    response = await treq.post(
        f"{base_url}/evaluate", data=dict(fields), files={name: part}, timeout=30
    )
    answer = await answer_of(response)
    return str(answer["evaluation_id"])


async def events_of(base_url: str, evaluation_id: str) -> AsyncIterator[Event]:
    """Poll for the events of an evaluation until its end, and give each as it arrives.

    Each page says where it ends; the next one is asked for from there. Where a
    page ends with ``null`` there is nothing more. ``Prefer: wait`` lets the
    daemon hold a request until it has something to say.
    """
    url = f"{base_url}/evaluation/{evaluation_id}/events"
    after: str | None = None
    while True:
        response = await treq.get(
            url,
            params={} if after is None else {"after": after},
            headers=Headers({"Prefer": [f"wait={WAIT_SECONDS}"]}),
            timeout=WAIT_SECONDS + 10,
        )
        page = await answer_of(response)
        for event in page["data"]:
            yield event
        after = page["end"]
        if after is None:
            return
