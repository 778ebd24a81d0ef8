"""Receive the callbacks of a tawebeval server, and print the verdicts of evaluations.

    WEBHOOK_SECRET=whsec_... webhook_receiver.py PORT

Only callbacks with a valid signature of the last five minutes count (Standard Webhooks). The server
repeats a callback until it gets a status of 2xx; its identifier tells a repetition.
"""

import json
import os
import sys
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from standardwebhooks import Webhook, WebhookVerificationError

MOST_BYTES = 1 << 20  # of a callback
MOST_SEEN = 10_000  # identifiers of callbacks that are remembered

webhook = Webhook(os.environ["WEBHOOK_SECRET"])
seen: OrderedDict[str, None] = OrderedDict()


class Receiver(BaseHTTPRequestHandler):
    """Answers each callback."""

    timeout = 10

    def do_POST(self) -> None:
        """Verify a callback and print what it says."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            return self.answer(413)
        body = self.rfile.read(int(length))
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            webhook.verify(body, headers)
        except (WebhookVerificationError, ValueError):  # the latter for a broken header
            return self.answer(401)
        if headers["webhook-id"] not in seen:
            seen[headers["webhook-id"]] = None
            if len(seen) > MOST_SEEN:
                seen.popitem(last=False)
            status = json.loads(body)
            print(f"{status['evaluation_id']}: {status['state']}", flush=True)
        return self.answer(204)

    def answer(self, status: int) -> None:
        """Answer without a body."""
        self.send_response(status)
        self.end_headers()


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver) as server:
        print(f"listening on port {server.server_port}", flush=True)
        server.serve_forever()
