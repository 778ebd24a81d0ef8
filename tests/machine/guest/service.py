"""The installed service: its unit, its callers' view of it, and commands around it."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

UNIT, SOCKET = "tawebeval.service", "tawebeval.socket"
STARTER = "tawebeval-starter.service"
CONFIGURATION = Path("/etc/tawebeval/tawebeval.toml")
DOCUMENTS = Path("/usr/share/doc/tawebeval")
STATE, CACHE = Path("/var/lib/tawebeval"), Path("/var/cache/tawebeval")
HOLD = "mkfifo $TEMPORARY_DIRECTORY/go; echo ready; read -r line <$TEMPORARY_DIRECTORY/go"
"""With it an evaluator prints `ready`, and waits for `let_go`."""
PATIENCE = 1800.0
"""Seconds for one thing to happen, on an emulated processor that others use, too."""

_BOUNDARY = "part-of-a-form"
_REPOSITORY = Path("/srv/problem")


def run(*command: str, given: str = "") -> str:
    """Return what a command prints; raises AssertionError with its words if it fails."""
    done = attempt(*command, given=given)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def attempt(*command: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Return how a command ends."""
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=PATIENCE)


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition to hold, and return its value. Raises AssertionError."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.1)
    return value


def show(what: str, unit: str = UNIT) -> str:
    """Return a property of a unit."""
    return run("systemctl", "show", "--value", "--property", what, unit)


def journal() -> str:
    """Return what the service, and systemd about it, have said since the boot."""
    run("journalctl", "--sync")
    return run("journalctl", "--boot", "--unit", UNIT, "--output=cat")


def is_ready() -> bool:
    """Tell whether the daemon is ready for work."""
    try:
        return ask("GET", "/health/ready")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def override(*lines: str, units: Sequence[str] = (UNIT, STARTER)) -> None:
    """Stop the units, and change some as `systemctl edit` does; the others are as shipped.

    What is so already stays as it is.
    """
    text = "\n".join(["[Service]", *lines, ""]) if lines else ""
    wanted = {unit: text if unit in units else "" for unit in (UNIT, STARTER)}
    files = {unit: Path(f"/etc/systemd/system/{unit}.d/check.conf") for unit in wanted}
    if wanted == {unit: path.read_text() if path.exists() else "" for unit, path in files.items()}:
        return
    for unit, path in files.items():
        shutil.rmtree(path.parent, ignore_errors=True)
        if wanted[unit]:
            path.parent.mkdir()
            path.write_text(wanted[unit])
    run("systemctl", "daemon-reload")
    run("systemctl", "stop", UNIT, STARTER)


def configure(text: str) -> None:
    """Restart the service with this configuration, if it has another one."""
    if CONFIGURATION.read_text() != text:
        CONFIGURATION.write_text(text)
        run("systemctl", "restart", UNIT)


def documented(pattern: str, page: str) -> str:
    """Return what a page of the documentation shows: the group of a pattern."""
    found = re.search(pattern, (DOCUMENTS / "docs" / page).read_text(), re.MULTILINE)
    assert found is not None, f"docs/{page} has no {pattern}"
    return found[1]


def examine() -> list[dict[str, str]]:
    """Return what the documented doctor finds."""
    shown = documented(r"^# (systemd-run (?:.*\\\n)*.* doctor .*)", "install.md")
    command = [*shlex.split(shown.replace("\\\n", " ")), "--json"]
    findings = json.loads(attempt(*command).stdout)
    assert len(findings) > 10, findings
    return list(findings)


def ask(method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    """Return the status and the document that the daemon answers to its first caller."""
    words = Path("/etc/tawebeval/first-token").read_text().split()
    (token,) = (word for word in words if word.startswith("tawebeval_"))
    connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=PATIENCE)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {token}", **headers})
        response = connection.getresponse()
        content = response.read()
        return response.status, json.loads(content) if content else None
    finally:
        connection.close()


def repository() -> str:
    """Return the commit of a repository that evaluations may name, made if there is none yet."""
    git = ("git", "-C", str(_REPOSITORY), "-c", "user.name=me", "-c", "user.email=me@example.org")
    if not _REPOSITORY.exists():
        _REPOSITORY.mkdir()
        (_REPOSITORY / "README").write_text("an evaluator\n")
        for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "An evaluator")):
            run(*git, *words)
    return run(*git, "rev-parse", "HEAD")


def begin(command: str, url: str = f"file://{_REPOSITORY}") -> str:
    """Begin an evaluation of a shell command; return its identifier."""
    fields = {
        'submission[solution]"; filename="solution.txt': "42\n",
        "repository[url]": url,
        "commit_oid": repository(),
        "evaluator_cmd": command,
    }
    body = "".join(
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    form = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}
    status, document = ask("POST", "/evaluate", f"{body}--{_BOUNDARY}--\r\n".encode(), **form)
    assert status == 200, document
    identifier: str = document["evaluation_id"]
    return identifier


def begin_python(program: str, arguments: str = "") -> str:
    """Begin an evaluation of a program in Python; return its identifier.

    `arguments` are words for the shell.
    """
    return begin(f"exec python3 -c {shlex.quote(program)} {arguments}")


def let_go() -> None:
    """Let the evaluator that waits go on."""
    (gate,) = STATE.glob("evaluations/*/tmp/go")
    gate.write_text("\n")


class Outcome:
    """All that an evaluation has printed, and the error that it ended with, if it did."""

    def __init__(self) -> None:
        self.text = ""
        self.error: dict[str, Any] = {}

    def add(self, page: dict[str, Any]) -> None:
        """Add the events of a page."""
        for event in page["data"]:
            if event["type"] == "text":
                self.text += event["payload"]
            else:
                self.error = event["payload"]


def wait_for_state(identifier: str, state: str) -> None:
    """Wait until an evaluation is in a state, without a look at its events."""

    def is_there() -> bool:
        status, document = ask("GET", f"/evaluation/{identifier}")
        assert status == 200, document
        return bool(document["state"] == state)

    wait_until(is_there, f"an evaluation is {state}")


def follow(identifier: str, until: str | None = None) -> Outcome:
    """Return the outcome of an evaluation, or what there is of it once a word was printed."""
    outcome, after = Outcome(), ""
    deadline = time.monotonic() + PATIENCE
    while until is None or until not in outcome.text:
        assert time.monotonic() < deadline, f"evaluation does not end; printed {outcome.text!r}"
        status, page = ask("GET", f"/evaluation/{identifier}/events?wait=10&after={after}")
        assert status == 200, page
        outcome.add(page)
        if page["end"] is None:
            break
        after = page["end"]
    return outcome
