"""The real daemon, under twistd, with directories and an evaluator's repository of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.client import Client
from benchmarks.running import Server, environment, free_port, running

_START = 20.0  # seconds
_CONFIGURATION = """\
listen = ["tcp:{port}:interface=127.0.0.1"]
[repositories]
protocols = ["file"]
[sandbox]
kind = "{sandbox}"
{more}
"""
_USUAL = """\
[evaluations]
running = 8
"""

# What evaluators run: root's own Python may lie where no other user can.
PYTHON = sys.executable
if os.geteuid() == 0:
    PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or PYTHON

# What root has to say besides; repositories and directories have to be that user's, too.
_UNPRIVILEGED = """\
[service]
user = "nobody"
"""


class Daemon(Server):
    """A daemon that runs, and a repository with one commit from which it has already fetched."""

    def __init__(self, pid: int, port: int, root: Path, url: str, commit: str) -> None:
        super().__init__(pid, port)
        self.state = root / "state"
        self.log = root / "log"
        self.objects = root / "objects"
        self._url = url
        self._commit = commit

    def evaluate(self, client: Client, command: str) -> str:
        """Begin an evaluation of the known commit; return its identifier."""
        return client.evaluate(self._url, self._commit, command)

    def consume(self, client: Client, identifier: str) -> None:
        """Read an evaluation to its very end, so that the daemon forgets it."""
        after = None
        while True:
            after = client.page(identifier, after)["end"]
            if after is None:
                return


@contextmanager
def daemon(
    profile: str | None = None,
    sandbox: str = "none",
    more: str = _USUAL,
    counted: bool = False,
) -> Iterator[Daemon]:
    """Run the daemon; with `profile` under cProfile, whose statistics go to that file.

    `sandbox` is its setting `sandbox.kind`, and `more` are sections of its configuration. Of one
    that is `counted`, `Daemon.objects` is a socket which tells what objects there are in it.
    """
    with TemporaryDirectory(prefix="tawebeval-benchmark-") as name:
        root = Path(name)
        url, commit = _repository(root / "evaluator")
        port = free_port()
        configuration = _CONFIGURATION.format(port=port, sandbox=sandbox, more=more)
        if os.geteuid() == 0:
            configuration += _UNPRIVILEGED
            nobody = pwd.getpwnam("nobody")
            for path in (root, root / "evaluator", root / "evaluator" / ".git"):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
        (root / "tawebeval.toml").write_text(configuration)
        twistd = os.path.join(os.path.dirname(sys.executable), "twistd")
        profiling = (
            [f"--profile={profile}", "--profiler=cprofile", "--savestats"] if profile else []
        )
        program = [twistd]
        if counted:
            program = ["-m", "benchmarks.programs.counted", str(root / "objects")]
        command = [
            *(sys.executable, *program, "--nodaemon", "--pidfile=", f"--logfile={root}/log"),
            *(*profiling, "tawebeval", f"--config={root}/tawebeval.toml"),
        ]
        directories = {
            "STATE_DIRECTORY": str(root / "state"),
            "CACHE_DIRECTORY": str(root / "cache"),
        }
        with running(command, cwd=root, env={**environment(), **directories}) as process:
            _await(process, port, root / "log")
            started = Daemon(process.pid, port, root, url, commit)
            with Client(port) as client:
                started.consume(client, started.evaluate(client, "true"))
            yield started


def _repository(path: Path) -> tuple[str, str]:
    """Make a repository with a commit of one file; return its URL and the commit's OID."""
    path.mkdir()
    (path / "README").write_text("An evaluator.\n")

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost"]
        command += ["-c", "commit.gpgSign=false", "-c", "init.defaultBranch=main"]
        done = subprocess.run(
            [*command, *arguments], cwd=path, check=True, stdout=subprocess.PIPE, text=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    git("add", ".")
    git("commit", "--quiet", "--message=An evaluator")
    return f"file://{path}", git("rev-parse", "HEAD")


def _await(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return when the daemon answers."""
    deadline = time.monotonic() + _START
    while True:
        try:
            with Client(port) as client:
                client.get("/health")
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                text = log.read_text() if log.exists() else ""
                raise SystemExit(f"the daemon does not start:\n{text}") from None
            time.sleep(0.05)
        else:
            return
