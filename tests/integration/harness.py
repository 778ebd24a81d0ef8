"""The daemon as a process of its own, and test cases that share one."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from twisted.internet import reactor
from twisted.internet.error import ConnectError
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase
from twisted.web.client import ResponseNeverReceived

from tawebeval.daemon.startup import derive_daemon_label
from tawebeval.linux.starter_client import StarterClient
from tests.cases.patience import LONG_PATIENCE, PATIENCE
from tests.integration.cgroups import DELEGATED, enter_cgroup, remove_cgroup
from tests.integration.client import Client
from tests.integration.ports import free_port, listens
from tests.integration.processes import alive, children
from tests.integration.repositories import GitRepository
from tests.integration.unprivileged import find_program, give, temporary_folder

TWISTD, COMMAND = find_program("twistd"), find_program("tawebeval")

CONFIGURATION = """
[repositories]
protocols = ["file", "git", "http"]
private_networks = ["127.0.0.0/8"]

[evaluations]
running = 4
"""
UNSANDBOXED = CONFIGURATION + '[sandbox]\nkind = "none"\n[limits]\nprocesses = 2000\n'

CALLBACK_SECRET = "whsec_" + b64encode(b"not so secret, for it is a test").decode()


async def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Wait for `condition()`, or what it awaits, to be true and return it; fail after `seconds`.

    Asks less often the longer it waits: questions are most of the work while others wait.
    """
    began = time.monotonic()
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        waited = time.monotonic() - began
        if waited > seconds:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        await deferLater(reactor, min(max(waited / 10, 0.01), 0.1))


def environment(**more: str) -> dict[str, str]:
    """Return the environment for a daemon."""
    return {**os.environ, **more}


class Daemon:
    """`twistd tawebeval` with a state, a cache, a configuration and a port of its own.

    It can be started again after it was stopped, and finds then what it left. `program` is what
    is given the options.
    """

    program: Sequence[str] = (str(TWISTD),)

    def __init__(
        self,
        configuration: str = CONFIGURATION,
        drain: float = 0,
        name: str = "",
        **environment: str,
    ) -> None:
        self.folder = temporary_folder("tawebeval-")
        self.state = self.folder / "state"
        self.cache = self.folder / "cache"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        service = f"\n[service]\ndrain = {drain}\nname = '{name}'\n"
        self.configuration = configuration + service
        (self.folder / "tawebeval.toml").write_text(self.configuration)
        self._log = self.folder / "log"
        self._checked = 0
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.remove)

    def start(self, *options: str) -> None:
        """Start the process with further options; `ready` waits until it answers."""
        assert TWISTD.exists(), f"there is no twistd beside {sys.executable}: install tawebeval"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *enter_cgroup(self.folder.name),
                    *(*self.program, "--nodaemon", "--pidfile=", "tawebeval"),
                    *("--config", str(self.folder / "tawebeval.toml")),
                    *("--listen", f"tcp:{self.port}:interface=127.0.0.1"),
                    *options,
                ],
                cwd=self.folder,
                env=environment(
                    STATE_DIRECTORY=str(self.state),
                    CACHE_DIRECTORY=str(self.cache),
                    **self._environment,
                ),
                stdin=subprocess.PIPE,  # kept open: an evaluator that got it would wait
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    async def ready(self) -> None:
        """Wait until `GET /health` answers."""
        async with Client(self.url) as client:

            def ended() -> bool:
                assert self.running, f"the daemon has ended:\n{self.log}"
                return listens(self.port)

            while True:
                await until(ended, "the daemon listens")
                # A child of a killed daemon keeps the port open until it executes its program.
                with contextlib.suppress(ConnectError, ResponseNeverReceived):
                    assert (await client.get("/health")).code == 200
                    return

    @property
    def pid(self) -> int:
        """The process identifier of the daemon that was started last."""
        assert self._process is not None, "start it first"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def lines(self) -> list[str]:
        """The lines that it has logged; of the last one there may be only a part as yet."""
        return self.log.rpartition("\n")[0].splitlines()

    async def logged(self, words: str, times: int = 1) -> None:
        """Wait until words are in the log, so often: a thread writes it."""
        await until(lambda: self.log.count(words) >= times, f"{words!r} is in the log")

    async def reload(self, tables: str) -> None:
        """Let it read its configuration again, with these tables at its end."""
        words = "the configuration: reloaded from"
        times, file = self.log.count(words), self.folder / "tawebeval.toml"
        file.write_text(self.configuration + tables)
        os.kill(self.pid, signal.SIGHUP)
        await self.logged(words, times + 1)

    @property
    def memory(self) -> int:
        """Its resident memory in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def interrupt(self) -> None:
        if self.running:
            os.kill(self.pid, signal.SIGTERM)

    async def stop(self) -> None:
        """Stop it, and fail where something of it is left."""
        self.interrupt()
        await until(lambda: not self.running, "the daemon stops")
        assert self._process is not None
        assert self._process.returncode == -signal.SIGTERM, self.log
        assert self.leftovers() == []
        assert self.cgroups() == []
        self.check_log()

    async def kill(self) -> None:
        """End it as a loss of power would."""
        os.kill(self.pid, signal.SIGKILL)
        await until(lambda: not self.running, "the daemon is dead")

    def remove(self) -> None:
        """See to it that nothing at all is left, whatever has happened."""
        if self.running and self._process is not None:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            client = StarterClient.connect(self.starter_socket)
            client.stop_starter()
            client.close()
        for group in self.cgroups():
            with contextlib.suppress(OSError):  # its end may still be under way
                group.rmdir()
        remove_cgroup(self.folder.name)
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.remove)

    def cgroups(self) -> list[Path]:
        """Return the daemon's control groups, those within others first."""
        name = f"/tawebeval-{derive_daemon_label(self.state)}"
        # os.walk passes over what is removed meanwhile, and gives the inner ones last.
        found = [path for path, _, _ in os.walk(DELEGATED or "") if name in path]
        return [Path(path) for path in reversed(found)]

    def leftovers(self, dead: bool = True) -> list[str]:
        """Return what there is of evaluations: children, `dead` ones too, directories, forms."""
        found = self.children() if self.running else []
        return [f"child {pid}" for pid in found if dead or alive(pid)] + self.remains()

    def children(self) -> list[int]:
        """Return its children and those of its starter, also dead ones, but not the starter."""
        found = children(self.pid)
        starter = self.find_starter()
        return [pid for pid in (*found, *(children(starter) if starter else ())) if pid != starter]

    @property
    def starter_socket(self) -> Path:
        return self.state / "starter" / "socket"

    def find_in_homes(self, name: str) -> list[Path]:
        """Return the files of a name in the homes of evaluators, on this machine or on nodes."""
        homes = ("evaluations/*/home", "evaluations/*/tawebeval-*/home")
        return [path for home in homes for path in self.state.glob(f"{home}/{name}")]

    def find_starter(self) -> int | None:
        """Return the process of its own starter; None without."""
        try:
            client = StarterClient.connect(self.starter_socket)
        except OSError:
            return None
        client.close()
        return client.pid

    def remains(self) -> list[str]:
        """Return what there is of them besides children: directories, forms, control groups."""
        found: list[str] = []
        for name in ("evaluations", "uploads"):
            found += (str(path) for path in (self.state / name).glob("*") if not is_kept(path))
        return found + [str(path) for path in self.used_groups()]

    def used_groups(self) -> list[Path]:
        return [path for path in self.cgroups() if path.name.startswith("evaluation-")]

    async def nothing_left(self, dead: bool = True) -> None:
        """Wait until nothing is left of any evaluation, nor a `dead` child that was not reaped."""
        try:
            await until(lambda: not self.leftovers(dead), "nothing is left")
        except AssertionError as error:
            raise AssertionError(f"{error}, but {self.leftovers(dead)}") from None

    def check_log(self) -> None:
        """Fail where a defect stands in what was logged since the last time."""
        fresh = self.log[self._checked :]
        self._checked += len(fresh)
        own = re.sub(r"(?m)end of stderr: .*$", "", fresh)  # of evaluators, which may fail
        for word in ("Traceback", "Unhandled"):
            assert word not in own, fresh


def is_kept(directory: Path) -> bool:
    """Tell whether a directory has only events and what a rerun needs, or is removed just now."""
    try:
        found = set(os.listdir(directory))
        return bool(found) and found <= {"output", "request", "submission"}
    except FileNotFoundError:
        return True


@functools.cache
def make_plain_repository() -> tuple[GitRepository, str]:
    """Return a repository that tests share, and its one commit: so it is fetched only once."""
    folder = temporary_folder("tawebeval-repository-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    repository = GitRepository(folder / "repository")
    repository.write("README", "an evaluator\n")
    return repository, repository.commit()


class RepositoryTestCase(TestCase):
    """Each test has a `folder` of its own.

    In it is a `repository`, a copy of the plain one with its `commit`, if the test asks for it.
    """

    timeout = LONG_PATIENCE
    daemon: Daemon
    client: Client

    async def setUp(self) -> None:
        self.folder = temporary_folder()
        self.addCleanup(shutil.rmtree, self.folder)
        self.commit = make_plain_repository()[1]

    @functools.cached_property
    def repository(self) -> GitRepository:
        return GitRepository(self.folder / "repository", make_plain_repository()[0])

    async def start_own(self, configuration: str, **environment: str) -> None:
        """Start a daemon of the test's own, and a client of it."""
        self.daemon = Daemon(configuration, **environment)
        self.addCleanup(self.daemon.remove)
        self.daemon.start()
        await self.daemon.ready()
        self.client = Client(self.daemon.url)
        self.addCleanup(self.client.close)

    def configure_callbacks(self, secret: str = CALLBACK_SECRET) -> str:
        """Return settings for callbacks to this machine, with one secret for all callers."""
        secrets = self.folder / "secrets"
        secrets.write_text(f"* {secret}\n")
        secrets.chmod(0o600)
        give(secrets)
        networks = "['127.0.0.0/8', '::1/128']"  # either may be the first one of localhost
        return f"[callbacks]\nsecrets = '{secrets}'\nprivate_networks = {networks}\n"

    async def begin(self, command: str, **more: Any) -> str:
        """Begin an evaluation in the test's repository; return its identifier.

        `more` is for `Client.post`: files, headers, and other fields of the form.
        """
        has_own = "repository" in vars(self)
        repository = self.repository if has_own else make_plain_repository()[0]
        return await self.client.evaluate(repository.url, self.commit, command, **more)

    async def begin_and_wait(self, command: str, word: str = "ready", **fields: str) -> str:
        """Begin a command, and wait until it has printed `word` on a line."""
        identifier = await self.begin(command, **fields)
        await self.client.printed(identifier, word)
        return identifier

    async def begin_and_hold(self, rest: str) -> tuple[str, Path]:
        """Begin a command, and wait until it has printed `ready` and waits itself.

        Return its identifier, and the pipe to write to, a line, for it to go on with the `rest`.
        """
        gate = f"gate-{uuid4().hex}"
        command = f"mkfifo ~/{gate}; printf ready; read line < ~/{gate}; {rest}"
        identifier = await self.begin_and_wait(command)
        (path,) = self.daemon.find_in_homes(gate)
        return identifier, path


class DaemonTestCase(RepositoryTestCase):
    """Tests that share a daemon with the tests before them, if these want the same one.

    It is stopped after the last of these tests, which fails if that fails: a test after it would
    pass when it is run again alone. After each test nothing may be left of its evaluations, and no
    defect in the log.
    """

    configuration: ClassVar[str] = CONFIGURATION
    daemon_name: ClassVar[str] = ""
    environment: ClassVar[Mapping[str, str]] = {}
    drain: ClassVar[float] = 0
    _to_run: ClassVar[dict[str, DaemonTestCase]] = {}  # in this order
    _shared: ClassVar[tuple[object, Daemon] | None] = None
    _is_last: bool

    def __init__(self, name: str = "runTest") -> None:
        super().__init__(name)
        if hasattr(self, name) and not self.getSkip()[0]:
            self._to_run[self.id()] = self

    async def setUp(self) -> None:
        while self.id() in self._to_run:  # before it there may be some that were skipped
            del self._to_run[next(iter(self._to_run))]
        wanted = self._describe_daemon()
        following = next(iter(self._to_run.values()), None)
        self._is_last = following is None or following._describe_daemon() != wanted
        self.addCleanup(self._stop_after_the_last)
        if DaemonTestCase._shared is not None and DaemonTestCase._shared[0] != wanted:
            await self._stop_shared()
        if DaemonTestCase._shared is None:
            DaemonTestCase._shared = wanted, self.make_daemon()
        self.daemon = DaemonTestCase._shared[1]
        if not self.daemon.running:  # not yet, or because a test that failed has stopped it
            await self.start_daemon()
        await self.daemon.ready()
        self.client = Client(self.daemon.url)
        await super().setUp()
        self.addCleanup(self._settle)

    def _describe_daemon(self) -> object:
        """Return what is equal for tests that may share a daemon."""
        cls = type(self)
        settings = self.configuration, self.drain, self.daemon_name, dict(self.environment)
        return settings, cls.make_daemon, cls.start_daemon, cls.options

    def make_daemon(self) -> Daemon:
        return Daemon(self.configuration, self.drain, self.daemon_name, **self.environment)

    async def start_daemon(self) -> None:
        self.daemon.start(*self.options())

    def options(self) -> tuple[str, ...]:
        """Return further options with which the daemon is started."""
        return ()

    async def run_command(self, command: str, **more: Any) -> list[dict[str, Any]]:
        """Return the events of a command that is run in the test's repository."""
        return await self.client.follow(await self.begin(command, **more))

    async def _settle(self) -> None:
        """End what the test has left running, and look at what remains."""
        try:
            if self.daemon.running:
                await self.client.cancel_all()
            await self.daemon.nothing_left(dead=self._is_last)
        finally:
            await self.client.close()
            self.daemon.check_log()

    async def _stop_after_the_last(self) -> None:
        if self._is_last:
            await self._stop_shared()

    @staticmethod
    async def _stop_shared() -> None:
        if DaemonTestCase._shared is not None:
            (_, daemon), DaemonTestCase._shared = DaemonTestCase._shared, None
            try:
                await daemon.stop()
            finally:
                daemon.remove()


@functools.cache
def new_token(name: str) -> tuple[str, str]:
    """Return a token and its line, from the command that operators use."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens")
        done = subprocess.run(
            [COMMAND, "token", "add", name, "--file", path],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
        )
        return done.stdout.strip(), path.read_text().strip()
