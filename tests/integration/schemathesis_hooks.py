"""What schemathesis loads for `tests.integration.test_description`, in its own process.

Forms come as it makes them, but in those that might begin an evaluation the evaluator is replaced:
nothing that was made up is run. Every second one has ended before it is asked for. Events are asked
for in all the ways there are, and good cursors, which no schema can tell, are cursors that there
may be. Every answer is noted in a file.
"""

from __future__ import annotations

import json
import os
import re
import time
from itertools import cycle
from typing import Any
from urllib.request import urlopen

import schemathesis
from schemathesis import Case, HookContext, Response

from tests.cases.patience import PATIENCE

SETTINGS: dict[str, Any] = json.loads(os.environ["TAWEBEVAL_SCHEMATHESIS"])
"""`url` is the daemon's, `evaluator` has the fields of a form that say what is run, `answers` is
the path of the file."""

EVENTS = "/evaluation/{id}/events"

_accepted = cycle(
    [
        *("application/json", "text/event-stream", "*/*", "application/jsonl"),
        *("application/json", "application/x-ndjson", "*/*", "text/html"),
    ]
)
_awaited = cycle([True, False])
_cursors = cycle(["end", "0", "1", "end", "", "2"])


@schemathesis.hook
def before_call(context: HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    """Bend a request before it is sent."""
    if isinstance(case.body, dict) and case.body.get("evaluator_cmd"):
        case.body |= SETTINGS["evaluator"]
    if case.operation.path == EVENTS:
        case.headers["Accept"] = next(_accepted)
    if "events" in case.operation.path:
        if re.fullmatch("[A-Za-z0-9_-]+", str(case.query.get("after", ""))):
            case.query["after"] = next(_cursors)
        if re.fullmatch("[0-9]{1,15}", str(case.query.get("skip", ""))):
            case.query["skip"] = "0"


@schemathesis.hook
def after_call(context: HookContext, case: Case, response: Response) -> None:
    """Note an answer: method, path, status."""
    with open(SETTINGS["answers"], "a") as answers:
        print(case.method, case.operation.path, response.status_code, file=answers)
    begun = (case.method, case.operation.path, response.status_code) == ("POST", "/evaluate", 200)
    if begun and next(_awaited):
        _wait_for_end(response.json()["evaluation_id"])


def _wait_for_end(identifier: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with urlopen(f"{SETTINGS['url']}/evaluation/{identifier}") as status:
            if json.load(status)["ended"]:
                return
        time.sleep(0.01)
