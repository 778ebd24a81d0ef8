"""A site whose back end submits and gets the result, while the browser follows the events.

    TAWEBEVAL_SERVER=... TAWEBEVAL_TOKEN=... WEBHOOK_SECRET=whsec_... judge_site.py PORT

docs/integrate.md explains it. A real site has users, and a database in place of `results`.
"""

import base64
import hashlib
import hmac
import json
import os
import sys
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tawebeval_client import Client, ClientError, NamedFile

MOST_BYTES = 1 << 20  # of a request
PORT = int(sys.argv[1])
SERVER = os.environ["TAWEBEVAL_SERVER"]
PAGE = Path(__file__).with_name("judge_site.html").read_text("utf-8").replace("SERVER", SERVER)

client = Client(SERVER, os.environ["TAWEBEVAL_TOKEN"])
results: dict[str, Any] = {}


def submit(source: bytes) -> dict[str, str]:
    """Begin an evaluation; return its identifier and a link that only reads it."""
    identifier = client.evaluate_problem(
        "inversions",
        {"source": NamedFile("solution.py", source)},
        callback_url=f"http://127.0.0.1:{PORT}/ended",
        metadata={"user": "ann"},
    )
    link = client.make_link(identifier, lifetime=3600)
    return {"id": identifier, "link": str(link["link"])}


def verify(headers: Mapping[str, str], body: bytes) -> Any:
    """Return the status in a callback. Raises ValueError, KeyError."""
    identifier, sent = headers["webhook-id"], headers["webhook-timestamp"]
    if abs(time.time() - int(sent)) > 300:
        raise ValueError("the timestamp is more than 5 minutes off")
    key = base64.b64decode(os.environ["WEBHOOK_SECRET"].removeprefix("whsec_"))
    content = f"{identifier}.{sent}.".encode() + body
    expected = b"v1," + base64.b64encode(hmac.digest(key, content, hashlib.sha256))
    signatures = headers["webhook-signature"].encode().split()
    if not any(hmac.compare_digest(expected, signature) for signature in signatures):
        raise ValueError("wrong signature")
    return json.loads(body)


class Site(BaseHTTPRequestHandler):
    """Answers the browser and the daemon."""

    timeout = 10

    def do_GET(self) -> None:
        """Send the page, or the result of an evaluation (null until its callback arrives)."""
        if self.path == "/":
            return self.answer(200, PAGE.encode(), "text/html")
        if self.path.startswith("/result/"):
            result = results.get(self.path.removeprefix("/result/"))
            return self.answer(200, json.dumps(result).encode())
        return self.answer(404)

    def do_POST(self) -> None:
        """Take a submission of the browser, or a callback of the daemon."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            return self.answer(413)
        body = self.rfile.read(int(length))
        if self.path == "/submit":
            try:
                return self.answer(200, json.dumps(submit(body)).encode())
            except ClientError as error:
                return self.answer(502, json.dumps({"error": str(error)}).encode())
        try:
            status = verify({name.lower(): value for name, value in self.headers.items()}, body)
        except (ValueError, KeyError):
            return self.answer(401)
        # The daemon may repeat a callback: it stores the same result again.
        results[status["evaluation_id"]] = {name: status[name] for name in ("state", "results")}
        return self.answer(204)

    def answer(self, status: int, body: bytes = b"", kind: str = "application/json") -> None:
        """Send an answer."""
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", PORT), Site) as server:
        print(f"open http://127.0.0.1:{PORT}/", flush=True)
        server.serve_forever()
