"""Test cases that share a machine on which tawebeval is installed as a system service."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from benchmarks.booted import Connection, installed, missing, wait_until
from tawebeval.core.tokens import generate_token
from tests.cases.patience import PATIENCE
from tests.fakes.world import straw
from tests.integration.raw import BOUNDARY, body_of, part
from tests.integration.repositories import GitRepository

SERVICE = "tawebeval.service"
SOCKET = "tawebeval.socket"
STARTER = "tawebeval-starter.service"
TOKENS = "/etc/tawebeval/tokens"
STATE = "/var/lib/tawebeval"
TOKEN, LINE = generate_token("alice", straw())

CONFIGURATION = """
[repositories]
protocols = ["file"]

[evaluations]
running = 1

[service]
drain = 0
"""

GATE = "mkfifo $TEMPORARY_DIRECTORY/go"
WAIT = "read -r line <$TEMPORARY_DIRECTORY/go; echo $line"
"""With these an evaluator waits for `let_go`."""

_DROP_IN = "/run/systemd/system/tawebeval.service.d/test.conf"


@functools.cache
def repository() -> tuple[GitRepository, str]:
    """Return a repository that can be copied onto a machine, and its one commit."""
    folder = Path(tempfile.mkdtemp(prefix="tawebeval-problem-"))
    atexit.register(shutil.rmtree, folder)
    made = GitRepository(folder / "problem")
    made.write("README", "an evaluator\n")
    return made, made.commit()


class ServiceTestCase(SynchronousTestCase):
    """Each test begins with the socket open, nothing running, and the unit as it was installed."""

    def setUp(self) -> None:
        lacking = missing()
        if lacking:
            raise SkipTest(lacking)
        self.machine = installed()
        self.addCleanup(self.clear)
        self.clear()
        problem, self.commit = repository()
        self.machine.copy(problem.folder, "/srv/problem")
        self.configure(CONFIGURATION)
        self.write(TOKENS, f"{LINE}\n")
        self.machine.run("chmod", "600", TOKENS)
        self.control("daemon-reload")
        self.control("start", SOCKET)

    def clear(self) -> None:
        """Have nothing left of the test before."""
        self.control("stop", SOCKET, SERVICE, STARTER)
        self.machine.attempt("systemctl", "reset-failed", SOCKET, SERVICE, STARTER)
        for name in (_DROP_IN, TOKENS, "/srv/problem"):
            self.machine.run("rm", "-rf", name)
        self.machine.run("journalctl", "--rotate", "--vacuum-time=1us", "--quiet")

    # The operator

    def control(self, *words: str) -> str:
        """Return what `systemctl` prints for a command that succeeds."""
        return self.machine.run("systemctl", *words)

    def show(self, what: str, unit: str = SERVICE) -> str:
        return self.control("show", "--value", "--property", what, unit)

    def write(self, path: str, text: str) -> None:
        self.machine.write(path, text)

    def configure(self, text: str) -> None:
        self.write("/etc/tawebeval/tawebeval.toml", text)

    def override(self, *lines: str) -> None:
        self.write(_DROP_IN, "\n".join(["[Service]", *lines, ""]))
        self.control("daemon-reload")

    def start(self) -> int:
        self.control("start", SERVICE)
        return int(self.show("MainPID"))

    def journal(self) -> str:
        """Return what the service has logged in this test, with what systemd says of it."""
        return self.machine.journal("--unit", SERVICE)

    def logged(self, words: str) -> None:
        wait_until(lambda: words in self.journal(), f"{words!r} is in the journal")

    def until(self, what: str, value: str) -> None:
        wait_until(lambda: self.show(what) == value, f"{what} is {value!r}")

    # A caller

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Connection:
        """Send a request as a caller with a token, and wait for nothing."""
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        return self.machine.connection().ask(method, path, body, **{**bearer, **headers})

    def healthy(self) -> None:
        status, document = self.ask("GET", "/health").answer()
        self.assertEqual((status, document["status"]), (200, "ok"))

    def post(self, command: str, solution: bytes = b"42\n") -> tuple[int, Any]:
        fields = {
            "repository[url]": b"file:///srv/problem",
            "commit_oid": self.commit.encode(),
            "evaluator_cmd": command.encode(),
        }
        file = part("submission[solution]", solution, "solution.txt")
        body = body_of([file, *(part(name, value) for name, value in fields.items())])
        form = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
        return self.ask("POST", "/evaluate", body, **form).answer()

    def begin(self, command: str) -> str:
        status, document = self.post(command)
        self.assertEqual(status, 200, document)
        identifier: str = document["evaluation_id"]
        return identifier

    def let_go(self) -> None:
        """Let the evaluator that waits print `done`."""
        self.machine.run("sh", "-c", f"echo done >$(find {STATE}/evaluations -name go -type p)")

    def wait_for_events(self, identifier: str, after: str | None = None) -> Connection:
        """Ask for the next page, which comes when there is something."""
        cursor = f"&after={after}" if after else ""
        return self.ask("GET", f"/evaluation/{identifier}/events?wait=25{cursor}")

    def follow(self, identifier: str, after: str | None = None) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        while True:
            status, page = self.wait_for_events(identifier, after).answer()
            self.assertEqual(status, 200, page)
            events += page["data"]
            after = page["end"]
            if after is None:
                return events

    def printed(self, identifier: str, word: str) -> str:
        """Wait until an evaluation has printed a word; return the cursor after it."""
        after, printed = None, ""
        deadline = time.monotonic() + PATIENCE
        while word not in printed:  # its line's end is known only with what follows
            self.assertLess(time.monotonic(), deadline, printed)
            _, page = self.wait_for_events(identifier, after).answer()
            printed += text(page["data"])
            after = page["end"]
        assert after is not None
        return after


def text(events: list[dict[str, Any]]) -> str:
    """Return what was printed."""
    return "".join(event["payload"] for event in events if event["type"] == "text")


def reasons(events: list[dict[str, Any]]) -> list[str]:
    """Return why an evaluation has failed, if it has."""
    return [event["payload"]["reason"] for event in events if event["type"] == "data"]
