"""The daemon as root starts it: whom it becomes, what it keeps, and what leads it astray."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from select import select
from unittest import SkipTest

from twisted.trial.unittest import TestCase

import tawebeval
from tawebeval.sandbox.bubblewrap import TOOLS_NAME
from tests.cases.certificates import make_certificate
from tests.cases.patience import LONG_PATIENCE, PATIENCE
from tests.integration.client import Client, text
from tests.integration.harness import (
    CONFIGURATION,
    TWISTD,
    DaemonTestCase,
    environment,
    new_token,
    until,
)
from tests.integration.ports import claim, free_port, listens
from tests.integration.repositories import GitRepository
from tests.integration.terminal import piped
from tests.integration.unprivileged import PYTHON, SERVICE, USER, temporary_folder

# Reports every module that is looked for as another user than root, and becomes twistd.
REPORTING = """\
import os, sys
def report(event, arguments):
    if event == "import" and os.geteuid():
        os.write(2, f"LATE IMPORT of {arguments[0]}\\n".encode())
sys.addaudithook(report)
sys.argv[0] = "twistd"
from twisted.scripts.twistd import run
run()
"""

# Prints the directory of the module for evaluators.
EVALUATOR = """\
import os, sys
sys.path.insert(0, os.environ["EVALUATION_TOOLS"] + "/lib")
import segi
print(os.path.dirname(segi.__file__))
"""


def status(pid: int) -> dict[str, list[str]]:
    """Return what /proc/PID/status says."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


class RightsTests(DaemonTestCase):
    """A daemon that runs, whoever has started it, without a sandbox that would protect it."""

    configuration = CONFIGURATION + '[sandbox]\nkind = "none"\n'

    def test_nothing_left(self) -> None:
        """It has no capability, and programs that it starts gain none; so has each thread."""
        threads = list(Path(f"/proc/{self.daemon.pid}/task").iterdir())
        self.assertTrue(threads)
        for thread in threads:
            now = status(int(thread.name))
            for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
                self.assertEqual(int(now[name][0], 16), 0, name)
            self.assertEqual(now["NoNewPrivs"], ["1"])
            self.assertNotIn("0", now["Uid"])

    def test_hidden(self) -> None:
        """What there is to see of its memory and environment is root's, as for no other process."""
        for name in ("environ", "mem", "maps"):
            self.assertEqual(Path(f"/proc/{self.daemon.pid}/{name}").stat().st_uid, 0)

    async def test_evaluators(self) -> None:
        """Evaluators are the daemon's user, with nothing more, and cannot look into the daemon."""
        uid = status(self.daemon.pid)["Uid"][0]
        events = await self.run_command(
            "id -u; grep -Ec 'Cap(Inh|Prm|Eff|Amb):.*[1-9a-f]' /proc/self/status;"
            f" cat /proc/{self.daemon.pid}/environ 2>/dev/null || echo refused;"
            f" head -c 1 /proc/{self.daemon.pid}/mem 2>/dev/null || echo refused"
        )
        self.assertEqual(text(events), f"{uid}\n0\nrefused\nrefused\n")


class RootTestCase(TestCase):
    """Tests that only root can make, with a folder of root's which everybody can enter."""

    timeout = LONG_PATIENCE

    def setUp(self) -> None:
        if USER is None:
            raise SkipTest("only root can become another user: run the tests as root")
        self.user = USER
        self.folder = Path(tempfile.mkdtemp(prefix="tawebeval-test-")).resolve()
        self.folder.chmod(0o755)
        self.addCleanup(shutil.rmtree, self.folder)
        self.state, self.cache = self.folder / "state", self.folder / "cache"
        self.port = free_port()
        self.log = self.folder / "log"

    def start(
        self, *options: str, settings: str = SERVICE, twistd: tuple[str, ...] = (), **more: str
    ) -> subprocess.Popen[bytes]:
        """Start a daemon with these settings, options of its own, and options of twistd."""
        configuration = self.folder / "tawebeval.toml"
        configuration.write_text(settings)
        variables = environment(
            STATE_DIRECTORY=str(self.state), CACHE_DIRECTORY=str(self.cache), **more
        )
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [
                    *self.twistd(),
                    *("--nodaemon", "--pidfile=", *twistd, "tawebeval"),
                    *(f"--config={configuration}", *options),
                    f"--listen=tcp:{self.port}:interface=127.0.0.1",
                ],
                cwd=self.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def twistd(self) -> tuple[str, ...]:
        """Return the command that twistd is."""
        return (str(TWISTD),)

    def refused(self, **options: object) -> str:
        """Return what a daemon says that does not start."""
        code = self.start(**options).wait(PATIENCE)  # type: ignore[arg-type]
        said = self.log.read_text()
        self.assertGreater(code, 0, said)
        self.assertNotIn("Traceback", said)
        return said

    async def settled(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until a daemon listens or has ended; tell whether it listens."""
        await until(lambda: process.poll() is not None or listens(self.port), "it starts or ends")
        return process.poll() is None

    async def ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until a daemon answers."""
        self.assertTrue(await self.settled(process), self.log.read_text())
        async with Client(f"http://127.0.0.1:{self.port}") as client:
            self.assertEqual((await client.get("/health")).code, 200)

    async def stop(self, process: subprocess.Popen[bytes]) -> str:
        """Stop a daemon; return what it has logged, in which there is no defect."""
        process.terminate()
        await until(lambda: process.poll() is not None, "it stops")
        said = self.log.read_text()
        self.assertNotIn("Traceback", said)
        self.assertNotIn("Unhandled", said)
        return said

    def assert_dropped(self, pid: int) -> None:
        """Hold that a process is the user in every way."""
        now = status(pid)
        self.assertEqual(now["Uid"], [str(self.user.pw_uid)] * 4)
        self.assertEqual(now["Gid"], [str(self.user.pw_gid)] * 4)
        groups = os.getgrouplist(self.user.pw_name, self.user.pw_gid)
        self.assertEqual(set(map(int, now["Groups"])), set(groups))
        self.assertEqual(int(now["CapBnd"][0], 16), 0)


class DropTests(RootTestCase):
    """Root becomes the user."""

    async def test_dropped(self) -> None:
        """User, groups and the bounding set: nothing of root's is left."""
        process = self.start()
        await self.ready(process)
        self.assert_dropped(process.pid)
        self.assertIn(
            f"changed from root to the user {self.user.pw_name}", await self.stop(process)
        )

    async def test_low_port(self) -> None:
        """Ports below 1024 can be listened on."""
        self.port = next(filter(claim, range(1023, 0, -1)))
        process = self.start()
        await self.ready(process)
        self.assert_dropped(process.pid)
        await self.stop(process)

    async def test_unix_socket(self) -> None:
        """A UNIX socket is the user's, who can remove it; root makes none in its own folders."""
        folder = temporary_folder()
        self.addCleanup(shutil.rmtree, folder)
        process = self.start(f"--listen=unix:{folder}/socket")
        await self.ready(process)
        self.assertEqual((folder / "socket").stat().st_uid, self.user.pw_uid)
        await self.stop(process)
        self.assertEqual(list(folder.iterdir()), [])

    async def test_daemonized(self) -> None:
        """In the background it is the same."""
        file = self.folder / "pid"
        configuration = self.folder / "tawebeval.toml"
        configuration.write_text(SERVICE)
        subprocess.run(
            [
                *(str(TWISTD), f"--pidfile={file}", f"--logfile={self.log}", "tawebeval"),
                f"--config={configuration}",
                f"--listen=tcp:{self.port}:interface=127.0.0.1",
            ],
            cwd=self.folder,
            env=environment(STATE_DIRECTORY=str(self.state), CACHE_DIRECTORY=str(self.cache)),
            stdin=subprocess.DEVNULL,
            check=True,
            timeout=PATIENCE,
        )
        pid = int(file.read_text())
        process = os.pidfd_open(pid)  # for its number may soon be another's
        self.addCleanup(os.close, process)
        self.addCleanup(_kill, process)
        self.assert_dropped(pid)
        signal.pidfd_send_signal(process, signal.SIGTERM)
        await until(lambda: _has_ended(process), "it stops")
        self.assertNotIn("Traceback", self.log.read_text())

    async def test_uid_of_twistd(self) -> None:
        """`twistd --uid` is no way to start without the setting, and none round it."""
        for options in (("--uid=nobody",), ("--euid", "--uid=nobody"), ("--uid=0",), ("--gid=0",)):
            self.assertIn("service.user", self.refused(settings="", twistd=options))
        for options in (("--euid", "--uid=0"), ("--uid=0", "--gid=0"), ("--uid=1",)):
            self.assertNotEqual(self.start(twistd=options).wait(PATIENCE), 0)
        for options in ((f"--uid={self.user.pw_uid}",), ("--euid", f"--uid={self.user.pw_uid}")):
            process = self.start(twistd=options)
            await self.ready(process)
            self.assert_dropped(process.pid)
            await self.stop(process)

    async def test_tokens(self) -> None:
        """A file of tokens that only root can read does, once; the log says so, twice."""
        token, line = new_token("alice")
        file = self.folder / "tokens"
        file.write_text(line)
        file.chmod(0o600)
        process = self.start(settings=f"{SERVICE}\n[callers]\ntokens = '{file}'")
        await self.ready(process)
        words = f"{file} (callers.tokens): the daemon's user cannot read the file"
        await until(lambda: words in self.log.read_text(), "it is logged")
        process.send_signal(signal.SIGHUP)
        await until(lambda: "nothing is changed" in self.log.read_text(), "it is logged")
        async with Client(f"http://127.0.0.1:{self.port}", token) as alice:
            (await alice.get("/evaluation/x")).problem(404)
        self.assertIn(f"{file}: cannot read the file: Permission denied", await self.stop(process))


class PythonTests(RootTestCase):
    """Python itself may lie where the user cannot read."""

    def twistd(self) -> tuple[str, ...]:
        """Return a twistd that reports late imports."""
        return (sys.executable, "-c", REPORTING)

    async def test_imports(self) -> None:
        """From the drop to the end no module is looked for: evaluations, errors, HTTPS, SIGHUP."""
        certificate = make_certificate(self.folder, "localhost")
        port = free_port()
        process = self.start(
            f"--listen=ssl:{port}:interface=127.0.0.1:privateKey={certificate}",
            settings=CONFIGURATION + SERVICE,
        )
        await self.ready(process)
        async with Client(f"http://127.0.0.1:{self.port}") as client:
            for url in ("http://name.invalid/x", "http://127.0.0.1:1/x", "file:///nowhere"):
                await client.follow(await client.evaluate(url, "0" * 40, "true"))
            (await client.get("/nowhere")).problem(404)
        said = subprocess.run(
            ["curl", "--insecure", "--silent", f"https://127.0.0.1:{port}/health"],
            capture_output=True,
            timeout=PATIENCE,
        ).stdout
        self.assertIn(b"ok", said)
        process.send_signal(signal.SIGHUP)
        await until(lambda: "reloaded from" in self.log.read_text(), "SIGHUP is logged")
        self.assertNotIn("LATE IMPORT", await self.stop(process))

    async def test_unreadable(self) -> None:
        """Where the user cannot read Python a warning says so, and elsewhere there is none."""
        process = self.start()
        await self.ready(process)
        library = Path(os.__file__).parent
        able = subprocess.run(
            ["ls", str(library)],
            user=self.user.pw_uid,
            group=self.user.pw_gid,
            extra_groups=[],
            capture_output=True,
        )
        warned = f"{library}: the daemon's user cannot read" in await self.stop(process)
        self.assertEqual(warned, able.returncode != 0)


class ClosedDirectoryTests(RootTestCase):
    """tawebeval in a directory that root alone can read, as `/root` is."""

    def setUp(self) -> None:
        super().setUp()
        self.closed = self.folder / "closed"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(tawebeval.__file__).parent, self.closed / "tawebeval", ignore=ignored)
        subprocess.run(["chmod", "-R", "go=", str(self.closed)], check=True)

    async def test_daemon_runs_evaluator(self) -> None:
        """An evaluator is fetched and run, and finds the tools, in the sandbox and without one."""
        repository = GitRepository(self.folder / "repository")
        repository.write("evaluator.py", EVALUATOR)
        commit = repository.commit()
        for kind in ("auto", "none"):
            settings = f'{CONFIGURATION}{SERVICE}[sandbox]\nkind = "{kind}"\n'
            process = self.start(settings=settings, PYTHONPATH=str(self.closed))
            await self.ready(process)
            async with Client(f"http://127.0.0.1:{self.port}") as client:
                command = f"{PYTHON} evaluator.py && command -v tawebeval-run"
                identifier = await client.evaluate(repository.url, commit, command)
                events = await client.follow(identifier)
            tools = "/evaluation/tools" if kind == "auto" else self.state / "accounts" / TOOLS_NAME
            self.assertEqual(text(events), f"{tools}/lib\n{tools}/bin/tawebeval-run\n")
            self.assertIn(f"{self.closed}/tawebeval: the daemon", await self.stop(process))

    async def test_doctor_finds_no_fault_of_the_sandbox(self) -> None:
        """`tawebeval doctor` runs the sandbox as the user, too."""
        configuration = self.folder / "tawebeval.toml"
        configuration.write_text(SERVICE)
        variables = {"STATE_DIRECTORY": str(self.state), "CACHE_DIRECTORY": str(self.cache)}
        options = ("doctor", "--json", "--config", str(configuration))
        done = await piped("", *options, cwd=self.closed, PYTHONPATH=str(self.closed), **variables)
        broken = [each for each in json.loads(done.stdout) if each["health"] == "broken"]
        self.assertEqual(broken, [], done.stderr)


class DirectoriesTests(RootTestCase):
    """State and cache, where root and the user meet."""

    def owners(self, directory: Path) -> set[int]:
        """Return whose a directory is, and all in it."""
        return {path.lstat().st_uid for path in (directory, *directory.rglob("*"))}

    async def test_of_root(self) -> None:
        """What an earlier daemon of root left is refused with the remedy, which helps."""
        for part in ("state/evaluations/old", "state/uploads", "cache/repositories/old"):
            (self.folder / part).mkdir(parents=True)
        for _ in range(2):
            said = self.refused()
            remedy = said[said.index("chown -R") :].splitlines()[0]
            subprocess.run(remedy, shell=True, check=True)
        process = self.start()
        await self.ready(process)
        self.assertEqual(list((self.state / "evaluations").iterdir()), [])
        await self.stop(process)

    async def test_links_within(self) -> None:
        """Links that the user has put into its state lead root to nothing of root's."""
        secret = self.folder / "secret"
        precious = _made(self.folder / "precious")
        _made(precious / "thing")
        secret.write_text("x" * 32)
        secret.chmod(0o600)
        for name in ("lock", "key", "key.new", "uploads", "evaluations"):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.state)
            os.chown(_made(self.state), self.user.pw_uid, self.user.pw_gid)
            link = self.state / name
            link.symlink_to(precious if name in ("uploads", "evaluations") else secret)
            os.chown(link, self.user.pw_uid, self.user.pw_gid, follow_symlinks=False)
            process = self.start()
            if await self.settled(process):
                await self.ready(process)
                await self.stop(process)
            self.assertEqual(process.poll() == -signal.SIGTERM, name in ("uploads", "evaluations"))
            self.assertEqual(secret.stat().st_mode & 0o777, 0o600)
            self.assertEqual(self.owners(precious) | self.owners(secret), {0})
            self.assertEqual(secret.read_text(), "x" * 32)
            self.assertTrue((precious / "thing").exists())


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _has_ended(process: int) -> bool:
    """Tell whether the process of a pidfd has ended."""
    return bool(select([process], [], [], 0)[0])


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
