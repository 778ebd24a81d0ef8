"""`etc/proxies`: what proxies are told fits what the daemon does by default.

That they work is shown by `tests/integration/test_proxies.py`.
"""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration
from tawebeval.web.streams import HEARTBEAT_SECONDS

ROOT = Path(__file__).resolve().parent.parent
PROXIES = ROOT / "etc" / "proxies"
HAPROXY = ("haproxy.cfg", "haproxy-several.cfg")
UNITS = {"s": 1, "h": 3600}


# As Python called them before 3.13, in the words of earlier RFCs.
OLDER_PHRASES = {414: "Request-URI Too Long"}


class ProxiesTests(SynchronousTestCase):
    configuration = Configuration()

    def read(self, name: str) -> str:
        return (PROXIES / name).read_text("utf-8")

    def seconds(self, name: str, setting: str) -> int:
        (found,) = re.findall(rf"^\s*{setting} (\d+)([sh]);?$", self.read(name), re.MULTILINE)
        return int(found[0]) * UNITS[found[1]]

    def test_proxies_close_idle_connections_before_the_daemon_does(self) -> None:
        for name, setting in (
            ("nginx.conf", "keepalive_timeout"),
            *((name, "timeout http-keep-alive") for name in HAPROXY),
            ("Caddyfile", "keepalive"),
        ):
            self.assertLess(self.seconds(name, setting), self.configuration.http.idle_timeout)

    def test_proxy_timeouts_are_longer_than_the_longest_quiet_stream(self) -> None:
        # JSON Lines are quiet for as long as an evaluator may run and print nothing.
        configuration = self.configuration
        longest = max(configuration.polls.wait, HEARTBEAT_SECONDS, configuration.limits.wall_clock)
        sides = tuple(f"timeout {side}" for side in ("client", "server", "tunnel"))
        for name, settings in (
            ("nginx.conf", ("proxy_read_timeout", "proxy_send_timeout")),
            *((name, sides) for name in HAPROXY),
        ):
            for setting in settings:
                self.assertGreater(self.seconds(name, setting), 2 * longest)

    def test_proxies_answer_with_problem_documents(self) -> None:
        for name, count in (
            ("nginx.conf", 3),
            *((name, 5) for name in HAPROXY),
            ("Caddyfile", 1),
        ):
            documents = [json.loads(each) for each in re.findall(r"{\"type.*}", self.read(name))]
            self.assertEqual(len(documents), count, name)
            for document in documents:
                self.assertEqual(document["type"], "about:blank")
                status = document["status"]
                phrases = {HTTPStatus(status).phrase, OLDER_PHRASES.get(status)}
                self.assertIn(document["title"], phrases)
                self.assertEqual(document["detail"], document["message"])
