"""Submit a file and follow its evaluation, with the standard library alone.

Run `python3 follow.py SERVER REPOSITORY COMMIT FILE`.
"""

import decimal
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from typing import Any


def integer(digits: str) -> int | decimal.Decimal:
    """Read an integer of any length, which `int` refuses beyond 4,300 digits."""
    return int(digits) if len(digits) < 4000 else decimal.Decimal(digits)


def request(
    url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, attempts: int = 8
) -> tuple[Any, Mapping[str, str]]:
    """Repeat a request; return JSON and headers."""
    for failures in range(attempts):
        delay = min(0.1 * 2.0**failures, 10)
        try:
            message = urllib.request.Request(url, body, dict(headers or {}))
            with urllib.request.urlopen(message, timeout=60) as response:
                return json.load(response, parse_int=integer), response.headers
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise RuntimeError(f"{url}: {error.code}: {json.load(error)['message']}") from None
            delay = max(delay, int(error.headers.get("Retry-After") or 0))
        except (OSError, ValueError, http.client.HTTPException):
            pass  # no answer, or an incomplete one
        time.sleep(delay)
    raise RuntimeError(f"{url}: no usable answer")


def evaluate(base: str, fields: Mapping[str, str], name: str, content: bytes) -> str:
    """Submit fields and a file; return the identifier."""
    boundary = uuid.uuid4().hex
    start = f"--{boundary}\r\nContent-Disposition: form-data; name="
    form = "".join(f'{start}"{field}"\r\n\r\n{value}\r\n' for field, value in fields.items())
    form += f'{start}"submission[source]"; filename="{name}"\r\n\r\n'
    body = form.encode() + content + f"\r\n--{boundary}--\r\n".encode()
    headers = {
        "Content-Type": f"multipart/form-data; boundary={boundary}",
        "Idempotency-Key": uuid.uuid4().hex,
    }
    answer, _ = request(f"{base}/evaluate", body, headers)
    return str(answer["evaluation_id"])


def events(base: str, identifier: str, after: str | None = "") -> Iterator[dict[str, Any]]:
    """Yield the events, each once and in order."""
    while after is not None:
        url = f"{base}/evaluation/{identifier}/events?wait=25&after={after}"
        page, headers = request(url, attempts=66)  # 10 minutes
        yield from page["data"]
        after = page["end"]
        if after is not None and not page["data"] and "Preference-Applied" not in headers:
            time.sleep(float(headers.get("Retry-After") or 0.5))


if __name__ == "__main__":
    base, repository, commit, file = sys.argv[1:]
    fields = {
        "repository[url]": repository,
        "commit_oid": commit,
        "evaluator_cmd": "sh evaluator.sh",
    }
    with open(file, "rb") as source:
        identifier = evaluate(base, fields, file, source.read())
    for event in events(base, identifier):
        if event["type"] == "text":
            print(event["payload"], end="", flush=True)
        else:
            print("DATA", json.dumps(event["payload"]))
