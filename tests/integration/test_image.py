"""The OCI image, run by podman and crun: the doctor, and an evaluation in the sandbox."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SkipTest

from tawebeval import __version__
from tests.cases.patience import LONG_PATIENCE
from tests.integration.client import Client, text
from tests.integration.containers import OPTIONS, PROGRAMS, Podman, list_resource_options
from tests.integration.harness import RepositoryTestCase, until
from tests.integration.ports import free_port, listens
from tests.integration.unprivileged import temporary_folder
from tests.machine.roots import image_base
from tests.run import ROOT

IMAGE = f"tawebeval:{__version__}"
CONFIGURATION = """
[repositories]
protocols = ["file"]
[evaluations]
running = 1
"""
DOCTOR = ("doctor", "--json", "--config", "/etc/tawebeval/tawebeval.toml")


def build(folder: Path) -> Path:
    """Build the image; return its archive. Blocks, for a minute."""
    with ExitStack() as made:
        base = made.enter_context(image_base())
        command = ["scripts/image", "--base", base, "--pip", sys.executable, folder / "image"]
        subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LONG_PATIENCE
        )
    return folder / "image" / "tawebeval.oci.tar"


class ImageTests(RepositoryTestCase):
    timeout = 10 * LONG_PATIENCE  # the first test builds the image
    _podman: ClassVar[Podman | None] = None
    _to_run: ClassVar[set[str]] = set()

    def __init__(self, name: str = "runTest") -> None:
        super().__init__(name)
        self._to_run.add(name)

    async def setUp(self) -> None:
        lacking = [name for name in PROGRAMS if shutil.which(name) is None]
        if lacking:
            raise SkipTest(f"without {', '.join(lacking)}")
        if os.geteuid() and "NoNewPrivs:\t1" in Path("/proc/self/status").read_text():
            raise SkipTest("newuidmap(1) has no privilege here (PR_SET_NO_NEW_PRIVS)")
        self.addCleanup(self._remove_after_the_last)
        if self._podman is None:
            type(self)._podman = await deferToThread(self._load)
        await super().setUp()
        self.configuration = self.folder / "tawebeval.toml"
        self.configuration.write_text(CONFIGURATION)
        for path in (self.folder, self.configuration):  # the daemon is another user in there
            path.chmod(0o755)

    @staticmethod
    def _load() -> Podman:
        folder = temporary_folder("tawebeval-image-")
        folder.chmod(0o755)
        podman = Podman(folder)
        podman.load(build(folder))
        shutil.rmtree(folder / "image")
        return podman

    def _remove_after_the_last(self) -> None:
        self._to_run.discard(self._testMethodName)
        if not self._to_run and self._podman is not None:
            self._podman.remove()
            type(self)._podman = None

    @property
    def podman(self) -> Podman:
        assert self._podman is not None, "set up"
        return self._podman

    def mount(self) -> list[str]:
        given = f"--volume={self.configuration}:/etc/tawebeval/tawebeval.toml:ro"
        return [given, f"--volume={self.repository.folder}:{self.repository.folder}:ro"]

    async def examine(self, *options: str) -> dict[str, list[dict[str, Any]]]:
        """Return the findings of the doctor in a container with these options, by their parts."""
        words = ("run", "--rm", "--network=none", *list_resource_options(), *options)
        done = await deferToThread(self.podman.run, *words, *self.mount(), IMAGE, *DOCTOR)
        self.assertIn(done.returncode, (0, 1, 2), done.stderr)
        found: dict[str, list[dict[str, Any]]] = {}
        for finding in json.loads(done.stdout):
            found.setdefault(finding["part"], []).append(finding)
        return found

    async def test_documented_options_let_the_sandbox_work(self) -> None:
        found = await self.examine(*OPTIONS)
        self.assertEqual(found["user"][0]["what"], "the daemon runs as tawebeval")
        self.assertEqual(found["sandbox"][0]["what"], "/usr/bin/bwrap works", found)
        self.assertEqual(found["trees"][0]["health"], "ok", found)
        health = {each["health"] for findings in found.values() for each in findings}
        self.assertNotIn("broken", health, found)
        for limit in found["limits"]:
            self.assertNotIn("other processes are in the cgroup", limit["what"])
            if limit["health"] != "ok":
                # Where the host mounts version 1 of cgroups no option of the engine helps.
                self.assertRegex(limit["remedy"], "docs/install.md|unified_cgroup_hierarchy=1")

    async def test_daemon_in_a_container_runs_evaluators(self) -> None:
        port = free_port()
        words = ("run", "--rm", "--network=host", *list_resource_options(), *OPTIONS, *self.mount())
        served = ("serve", "--config", "/etc/tawebeval/tawebeval.toml")
        listen = ("--listen", f"tcp:{port}:interface=127.0.0.1")
        log = self.folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.podman.build_command(*words, IMAGE, *served, *listen),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

        def is_listening() -> bool:
            assert process.poll() is None, log.read_text()
            return listens(port)

        async def stop() -> None:
            await deferToThread(self.podman.run, "stop", "--all", f"--time={LONG_PATIENCE:.0f}")
            await until(lambda: process.poll() is not None, "the container ends", LONG_PATIENCE)

        self.addCleanup(stop)
        await until(is_listening, "the daemon listens", LONG_PATIENCE)
        async with Client(f"http://127.0.0.1:{port}") as client:
            self.assertEqual((await client.get("/health")).code, 200)
            command = (
                "id -u; uname -n; cat README; python3 -c 'print(6 * 7)'; ls /etc/tawebeval || :"
            )
            identifier = await client.evaluate(self.repository.url, self.commit, command)
            events = await client.follow(identifier)
            self.assertEqual(text(events), "1000\nevaluation\nan evaluator\n42\n")
        words = ("exec", "--latest", "--user=999:999", "cat", "/proc/1/comm")
        first = await deferToThread(self.podman.run, *words)
        self.assertEqual(first.stdout, "tini\n", first.stderr)  # it reaps what has lost its parent
        await stop()
        self.assertNotIn("Traceback", log.read_text())

    async def test_image_has_no_secret_and_no_writable_file(self) -> None:
        script = (
            "ls /etc/tawebeval; find /var/log /tmp -type f -size +0; id -u; cat /etc/machine-id;"
            " find / -xdev -perm -0002 ! -type l ! -type c ! -perm -1000; /usr/bin/tawebeval token"
            " add alice --file /tmp/tokens >/dev/null 2>&1 && echo made"
        )
        words = ("run", "--rm", "--network=none", *list_resource_options(), "--entrypoint=/bin/sh")
        done = await deferToThread(self.podman.run, *words, IMAGE, "-c", script)
        self.assertEqual(done.stdout, "tawebeval.toml\n999\nmade\n", done.stderr)
