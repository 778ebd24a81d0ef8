"""The start with nothing configured, and `tawebeval doctor` on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from typing import Any

from twisted.trial.unittest import SynchronousTestCase, TestCase

from tests.cases.patience import LONG_PATIENCE, PATIENCE
from tests.integration.client import Client, text
from tests.integration.harness import COMMAND, TWISTD, environment, until
from tests.integration.ports import free_port, listens
from tests.integration.repositories import GitRepository
from tests.integration.unprivileged import USER, temporary_folder

START = (str(TWISTD), "--nodaemon", "--pidfile=", "tawebeval")


class StartupTests(TestCase):
    timeout = LONG_PATIENCE

    def setUp(self) -> None:
        self.folder = temporary_folder()
        self.addCleanup(shutil.rmtree, self.folder)
        self.environment = environment(HOME=str(self.folder))
        for name in ("STATE_DIRECTORY", "CACHE_DIRECTORY", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
            self.environment.pop(name, None)
        if USER:  # whose home is no home
            self.environment["XDG_STATE_HOME"] = str(self.folder / ".local" / "state")
            self.environment["XDG_CACHE_HOME"] = str(self.folder / ".cache")

    async def test_daemon_without_configuration_serves_fetches_and_stops(self) -> None:
        port = free_port()
        log = self.folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*START, f"--listen=tcp:{port}:interface=127.0.0.1"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.addCleanup(process.wait)
        self.addCleanup(lambda: process.poll() is None and process.kill())

        await until(lambda: listens(port), "it listens")
        repository = GitRepository(self.folder / "repository")
        commit = repository.commit()
        async with Client(f"http://127.0.0.1:{port}") as client:
            answer = await client.post(repository.url, commit, "true")
            self.assertIn("https", str(answer.problem(400)["message"]))
            url = "https://127.0.0.1:1/nobody"
            events = await client.follow(await client.evaluate(url, commit, "true"))
            self.assertEqual(events[-1]["payload"]["reason"], "repository")
            self.assertEqual(text(events), "")
        self.assertEqual((self.folder / ".local/state/tawebeval/key").stat().st_mode & 0o777, 0o600)
        self.assertTrue((self.folder / ".cache/tawebeval/repositories").is_dir())
        os.kill(process.pid, signal.SIGTERM)
        await until(lambda: process.poll() is not None, "it stops")
        self.assertEqual(process.returncode, -signal.SIGTERM)
        self.assertNotIn("Traceback", log.read_text())


class DoctorTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = temporary_folder()
        self.addCleanup(shutil.rmtree, self.folder)
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.temporary.chmod(0o1777)
        self.state, self.cache = (self.folder / "places" / name for name in ("state", "cache"))

    def run_command(self, *around: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
        """Return the exit status, and the findings by their parts; `around` runs the command."""
        before = sorted(self.folder.rglob("*"))
        ran = subprocess.Popen(
            [*around, str(COMMAND), "doctor", "--json"],
            env={
                **os.environ,
                "TMPDIR": str(self.temporary),
                "PLACES": str(self.state.parent),
                "STATE_DIRECTORY": str(self.state),
                "CACHE_DIRECTORY": str(self.cache),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(ran.kill)
        said, complained = ran.communicate(timeout=PATIENCE)
        self.assertNotIn("Traceback", complained)
        self.assertEqual(sorted(self.folder.rglob("*")), before)
        groups = (path for path, _, _ in os.walk("/sys/fs/cgroup"))
        own = f"tawebeval-doctor-{ran.pid}"
        self.assertEqual([path for path in groups if own in path.split("/")], [])
        found: dict[str, list[dict[str, Any]]] = {}
        for each in json.loads(said):
            found.setdefault(each["part"], []).append(each)
        worst = {each["health"] for part in found.values() for each in part}
        self.assertEqual(ran.returncode, 2 if "broken" in worst else int("weaker" in worst))
        return ran.returncode, found

    def test_doctor_reports_a_working_sandbox_and_git(self) -> None:
        status, found = self.run_command()
        self.assertLess(status, 2, found)
        self.assertEqual(found["sandbox"][0]["health"], "ok")
        self.assertIn("git version", found["git"][0]["what"])
        self.assertEqual(len(found["limits"]), 4)
        if USER is not None:  # an ordinary user without cgroups
            self.assertEqual(status, 1, found)
            self.assertEqual({each["health"] for each in found["permissions"]}, {"ok"})
            self.assertEqual({each["health"] for each in found["limits"]}, {"weaker"})
            self.assertIn("cgroup", found["limits"][0]["remedy"])
