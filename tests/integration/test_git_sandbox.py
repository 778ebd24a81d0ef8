"""What git sees in its sandbox, asked by what an attacker would run in its place."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from functools import partial
from pathlib import Path

from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import TestCase

from tawebeval.git.command import GitResult, GitRunner
from tawebeval.git.remotes import Login
from tawebeval.git.repository import create_repository
from tawebeval.linux.child import spawn_child
from tawebeval.sandbox.bubblewrap import (
    READ_ONLY_ACCESS,
    SandboxAccess,
)
from tests.cases.patience import LONG_PATIENCE
from tests.integration.bare_repositories import make_sandbox
from tests.integration.harness import until
from tests.integration.processes import command_line, everybody


class SandboxTests(TestCase):
    """A cache with two repositories, a state directory, and a git that runs a script instead."""

    timeout = LONG_PATIENCE

    async def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tawebeval-test-")).resolve()
        self.addCleanup(shutil.rmtree, self.folder)
        box = make_sandbox(self.folder)
        self.git = GitRunner(reactor, partial(spawn_child, reactor), ("https",), box=box)
        self.own, self.other = self.folder / "own.git", self.folder / "other.git"
        for path in (self.own, self.other):
            create_repository(path)
        self.tree = self.folder / "tree"
        self.tree.mkdir()
        (self.folder / "key").write_text("a secret")

    async def run_script(
        self, script: str, reach: SandboxAccess = READ_ONLY_ACCESS, login: Login | None = None
    ) -> GitResult:
        """Return what becomes of a shell's script that git runs."""
        return await self.git.run_command(
            self.own, "-c", f"alias.attack=!{script}", "attack", reach=reach, login=login
        )

    async def check(
        self, script: str, printed: str, reach: SandboxAccess = READ_ONLY_ACCESS
    ) -> None:
        outcome = await self.run_script(script, reach)
        self.assertEqual(outcome.stdout.split(), printed.split(), outcome.stderr)

    async def test_git_sees_only_its_own_repository_and_system_files(self) -> None:
        await self.check(f"ls -A {self.folder}", "own.git")
        await self.check(f"cat {self.folder}/key {self.other}/HEAD || echo no", "no")
        await self.check("ls -d /home /root /var /opt /srv /run /sys 2>/dev/null || echo no", "no")
        await self.check("ls -A /tmp", self.folder.name)
        await self.check("cut -d: -f1 /etc/passwd", "evaluator nobody")
        await self.check("ls /etc/shadow /etc/gitconfig /etc/ssh || echo no", "no")
        hosts = "test -e /etc/hosts && echo hosts || echo no"
        await self.check(hosts, "no")
        await self.check(hosts, "hosts", SandboxAccess(has_network=True))

    async def test_git_command_writes_only_to_its_permitted_directories(self) -> None:
        everywhere = f"for d in {self.own} {self.tree} / /usr /etc /dev /dev/shm; do"
        script = f"{everywhere} touch $d/x 2>/dev/null && echo $d; done; true"
        await self.check(script, "")
        await self.check(script, f"{self.own}", SandboxAccess((self.own,)))
        await self.check(script, f"{self.tree}", SandboxAccess((self.tree,)))
        await self.run_script(f"touch {self.folder}/x", SandboxAccess((self.own,)))
        self.assertFalse((self.folder / "x").exists(), "it is another directory of that name")

    async def test_git_sees_no_process_and_no_descriptor_of_the_daemon(self) -> None:
        await self.check(f"test -e /proc/{os.getpid()}/comm && echo {os.getpid()}; echo $PPID", "2")
        outcome = await self.run_script("ls /proc/self/fd")
        self.assertLessEqual(len(outcome.stdout.split()), 4, outcome.stdout)
        await self.check("unshare --user true || echo no", "no")
        await self.check("grep ^CapEff: /proc/self/status", "CapEff: 0000000000000000")
        await self.check("grep ^Seccomp: /proc/self/status", "Seccomp: 2")

    async def test_only_a_fetch_has_a_network(self) -> None:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            port = server.getsockname()[1]
            script = f"bash -c 'echo >/dev/tcp/127.0.0.1/{port}' && echo connected || echo no"
            await self.check(script, "no")
            await self.check(script, "connected", SandboxAccess(has_network=True))

    async def test_login_is_read_once_and_in_no_environment_or_argument(self) -> None:
        login = Login("https://git.example.org", "judge", "s3cret")
        ask = "printf 'protocol=https\\nhost=%s\\n\\n' | git credential fill"
        ask += " | grep ^password || echo none;"
        outcome = await self.run_script(
            ask % "evil.example.org" + 2 * (ask % "git.example.org"), login=login
        )
        self.assertEqual(outcome.stdout.split(), ["none", "password=s3cret", "none"])
        script = "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline"
        outcome = await self.run_script(script, login=login)
        self.assertIn("GIT_CONFIG_NOSYSTEM", outcome.stdout)
        self.assertNotIn("s3cret", outcome.stdout)

    async def test_cancelled_command_leaves_no_process(self) -> None:
        started: list[bytes] = []
        seconds = f"{1000 + os.getpid()}.25"  # so long nobody else sleeps
        script = f"setsid sh -c 'echo ready; exec sleep {seconds}' & sleep {seconds}; wait"
        asked = Deferred.fromCoroutine(
            self.git.run_command(
                self.own, "-c", f"alias.a=!{script}", "a", on_stdout=started.append
            )
        )
        await until(lambda: b"ready" in b"".join(started), "it has started")

        def sleeping() -> list[int]:
            argv = f"sleep\0{seconds}\0".encode()
            return [pid for pid in everybody() if command_line(pid) == argv]

        await until(lambda: len(sleeping()) == 2, "both sleep")
        asked.cancel()
        await self.assertFailure(asked, CancelledError)
        self.assertEqual(sleeping(), [])
