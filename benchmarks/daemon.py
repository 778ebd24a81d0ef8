"""The real daemon, under twistd, with directories and an evaluator's repository of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import repositories
from benchmarks.client import Client, evaluate, fields
from benchmarks.measure import CannotRun
from benchmarks.running import Server, environment, free_port, running, wait_for
from tawebeval.daemon.startup import STARTER_SOCKET_VARIABLE

_CONFIGURATION = """\
listen = ["tcp:{port}:interface=127.0.0.1:backlog=1024"]
[repositories]
protocols = ["file", "http"]
private_networks = ["127.0.0.0/8"]
[sandbox]
kind = "{sandbox}"
{more}
[service]
drain = 0
"""
USUAL = """\
[evaluations]
running = 8
"""
MANY_CONNECTIONS = """\
[http]
connections = 5000
connections_per_address = 0
"""

SMALL, LARGE = 5, 250
"""Files in the trees of the two commits that every daemon knows."""

COMMAND = "/bin/echo hello"
"""What evaluators run where only their start counts."""

# What evaluators run: root's own Python may lie where no other user can.
PYTHON = sys.executable
if os.geteuid() == 0:
    PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or PYTHON

_PATIENCE = 20.0  # seconds, for the starter

# Runs a program as nobody; repositories and directories have to be that user's, too.
_AS_NOBODY = str(Path(__file__).parent.parent / "tests" / "as_nobody.py")
_UNPRIVILEGED = [_AS_NOBODY] if os.geteuid() == 0 else []


class Daemon(Server):
    """A daemon that runs, and a repository from which it has fetched both commits."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]], port: int, root: Path) -> None:
        self._start = start
        self._process = start()
        super().__init__(self._process.pid, port)
        self.state = root / "state"
        self.cache = root / "cache"
        self.log = root / "log"
        self.socket = root / "socket"
        path = root / "evaluator"
        trees = [repositories.tree(SMALL), repositories.tree(LARGE)]
        self._commits = dict(zip((SMALL, LARGE), repositories.make(path, trees), strict=True))
        give(path)
        self._url = f"file://{path}"

    def request(self, command: str, files: int = SMALL) -> bytes:
        """Return the request for an evaluation of the commit with a tree of so many files."""
        return evaluate(self._url, self._commits[files], command)

    def fields(self, command: str) -> Sequence[str]:
        """Return the fields of such a request, but for the submission, as NAME=VALUE."""
        named = fields(self._url, self._commits[SMALL], command)
        return [f"{name}={value}" for name, value in named.items()]

    def evaluate(
        self, client: Client, command: str, files: int = SMALL, environment: str = "default"
    ) -> str:
        """Begin an evaluation of a commit that is known; return its identifier."""
        return client.evaluate(self._url, self._commits[files], command, environment)

    def wait_until_listening(self) -> None:
        """Return when the daemon listens. Raises SystemExit, with its words, if it does not."""
        wait_for(self._process, self.port, "the daemon", self.log, self.log.with_name("errors"))

    def kill_and_start(self) -> None:
        """End the daemon by SIGKILL, and start it again. It need not listen yet."""
        self._process.kill()
        self._process.wait()
        self._process = self._start()
        self.pid = self._process.pid

    def consume(self, client: Client, identifier: str) -> None:
        """Read an evaluation to its very end, so that the daemon forgets it."""
        after = None
        while True:
            after = client.page(identifier, after)["end"]
            if after is None:
                return


@contextmanager
def daemon(
    sandbox: str = "none",
    more: str = USUAL,
    program: str | None = None,
    lasting: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Daemon]:
    """Run the daemon. Raises CannotRun where the sandbox does not work.

    `sandbox` is its setting `sandbox.kind`, and `more` are sections of its configuration. A
    `program` of `benchmarks.programs` measures it, and tells the result by `Daemon.socket`. One
    that is `lasting` has a starter: its evaluations outlive it. `variables` are added to its
    environment.
    """
    with TemporaryDirectory(prefix="tawebeval-benchmark-") as name, ExitStack() as stack:
        root = Path(name)
        port = free_port()
        configuration = _CONFIGURATION.format(port=port, sandbox=sandbox, more=more)
        give(root)
        (root / "tawebeval.toml").write_text(configuration)
        twistd = os.path.join(os.path.dirname(sys.executable), "twistd")
        started_by = [twistd]
        if program is not None:
            measuring = Path(__file__).parent / "programs" / f"{program}.py"
            started_by = [str(measuring), str(root / "socket")]
        command = [
            *(
                sys.executable,
                *_UNPRIVILEGED,
                *started_by,
                "--nodaemon",
                "--pidfile=",
                f"--logfile={root}/log",
            ),
            *("tawebeval", f"--config={root}/tawebeval.toml"),
        ]
        environ = {
            **environment(),
            **(variables or {}),
            "STATE_DIRECTORY": str(root / "state"),
            "CACHE_DIRECTORY": str(root / "cache"),
        }
        errors = root / "errors"
        stderr = stack.enter_context(errors.open("ab"))
        if lasting:
            environ[STARTER_SOCKET_VARIABLE] = stack.enter_context(_starter(root, environ))

        def start() -> subprocess.Popen[bytes]:
            return stack.enter_context(running(command, cwd=root, env=environ, stderr=stderr))

        started = Daemon(start, port, root)
        try:
            started.wait_until_listening()
        except SystemExit as error:
            if sandbox == "none":
                raise
            raise CannotRun(str(error).rstrip().rpartition("\n")[2]) from error
        with Client(port) as client:
            for files in (SMALL, LARGE):
                started.consume(client, started.evaluate(client, "true", files))
        yield started


@contextmanager
def _starter(root: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Run a starter; yield the path of its socket."""
    folder = root / "starter"
    folder.mkdir(mode=0o700)
    give(folder)
    path = folder / "socket"
    tawebeval = os.path.join(os.path.dirname(sys.executable), "tawebeval")
    command = [sys.executable, *_UNPRIVILEGED, tawebeval, "starter", "--socket", str(path)]
    with running(command, env=dict(variables)) as process:
        deadline = time.monotonic() + _PATIENCE
        while not path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise CannotRun("the starter does not start")
            time.sleep(0.05)
        yield str(path)


def give(path: Path) -> None:
    """Let a directory and all below it belong to whom the daemon becomes."""
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        for parent, _, names in os.walk(path):
            for name in ("", *names):
                os.chown(os.path.join(parent, name), nobody.pw_uid, nobody.pw_gid)
