"""Clients that nobody here wrote: what browsers have, and Python's requests."""

from __future__ import annotations

import time
from typing import Any

import requests
from twisted.internet.threads import deferToThread

from tests.cases.patience import PATIENCE
from tests.integration.client import Event, joined
from tests.integration.harness import DaemonTestCase

COMMAND = (
    "printf 'half of '; sleep 0.1; echo a line; seq 1 500;"
    r""" printf '\n%s\n{"a": [1, null]}\n%s\n' "$EVALUATION_DATA_BEGIN" "$EVALUATION_DATA_END";"""
    " echo ü"
)
PRINTED = [
    "half of a line\n" + "".join(f"{number}\n" for number in range(1, 501)),
    [{"a": [1, None]}],
    "ü\n",
]


def poll(url: str) -> list[Event]:
    """Return the events, as a client gets them that polls by docs/api.md."""
    events: list[Event] = []
    after: str | None = ""
    with requests.Session() as session:
        session.trust_env = False
        while after is not None:
            answer = session.get(f"{url}/events", params={"after": after}, timeout=PATIENCE)
            answer.raise_for_status()
            page: dict[str, Any] = answer.json()
            events += page["data"]
            after = page["end"]
            time.sleep(int(answer.headers.get("Retry-After", 0)) / 10)
    return events


class RequestsTests(DaemonTestCase):
    """Python's requests."""

    async def test_plain_polling(self) -> None:
        """A form, and pages without waiting, up to the end."""
        files = {"submission[source]": ("solution.py", b"print()")}
        form = {
            "repository[url]": self.repository.url,
            "commit_oid": self.commit,
            "evaluator_cmd": COMMAND,
        }

        def evaluate() -> str:
            with requests.Session() as session:
                session.trust_env = False
                url = f"{self.daemon.url}/evaluate"
                answer = session.post(url, data=form, files=files, timeout=PATIENCE)
                answer.raise_for_status()
                return str(answer.json()["evaluation_id"])

        identifier = await deferToThread(evaluate)
        self.client.evaluations.append(identifier)
        events = await deferToThread(poll, f"{self.daemon.url}/evaluation/{identifier}")
        self.assertEqual(joined(events), PRINTED)
