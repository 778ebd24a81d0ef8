"""A daemon that has no more file descriptors: told clearly, survived, and over when there are."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path

from twisted.trial.unittest import SkipTest

from tests.integration.client import failure, text
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until
from tests.integration.processes import threads
from tests.integration.raw import Connection
from tests.integration.unprivileged import USER

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MANY = 60
_SETTLED = 10  # looks that show the same


class DescriptorsTests(DaemonTestCase):
    """Their limit is lowered while the daemon runs, by its own user: others may not."""

    configuration = CONFIGURATION

    async def setUp(self) -> None:
        await super().setUp()
        self.assertEqual(text(await self.run_command("cat README")), "an evaluator\n")
        self.most = self.limit()[1]
        self.addCleanup(self.allow, self.most)

    def limit(self) -> tuple[int, int]:
        """Return how many the daemon may have, and to how many it may raise that."""
        (line,) = (
            line
            for line in Path(f"/proc/{self.daemon.pid}/limits").read_text().splitlines()
            if line.startswith("Max open files")
        )
        soft, hard = line.split()[3:5]
        return int(soft), int(hard)

    def allow(self, count: int) -> None:
        become = (
            ("setpriv", f"--reuid={USER.pw_uid}", f"--regid={USER.pw_gid}", "--clear-groups")
            if USER
            else ()
        )
        command = ("prlimit", f"--pid={self.daemon.pid}", f"--nofile={count}:{self.most}")
        subprocess.run([*become, *command], check=True)

    async def allow_more(self, count: int) -> None:
        """Let the daemon have so many more than it has, when it has closed what it need not."""
        pid, seen = self.daemon.pid, [0]
        if not os.access(f"/proc/{pid}/fd", os.R_OK):
            raise SkipTest("only root may see the descriptors of a daemon")

        def settled() -> bool:
            if set(threads(pid)) != {"S"}:  # it is slow, and not at its end
                seen.append(0)
            seen.append(len(os.listdir(f"/proc/{pid}/fd")))
            return len(set(seen[-_SETTLED:])) == 1

        await until(settled, "it opens and closes nothing")
        self.allow(seen[-1] + count)

    async def test_evaluations_without_descriptors_are_lost_with_the_reason(self) -> None:
        lines, lost = self.daemon.log.count(": lost: "), 0
        for more in range(1, 5):  # for its form; its tree, stdout, stderr and events need four
            await self.allow_more(more)
            answer = await self.client.post(self.repository.url, self.commit, "cat README")
            if answer.code != 200:
                answer.problem(503)
                continue
            events = await self.client.follow(answer.json["evaluation_id"])
            if text(events) != "an evaluator\n":
                self.assertIn("Too many open files", failure(events, "lost")["message"])
                lost += 1
        self.assertGreater(lost, 0)
        self.allow(self.most)
        self.assertEqual(text(await self.run_command("cat README")), "an evaluator\n")
        # A line for each, and a traceback for none: a defect would have one.
        await self.daemon.logged(": lost: ", lines + lost)
        self.assertEqual(self.daemon.log.count(": lost: "), lines + lost)

    async def test_connections_beyond_the_limit_are_closed(self) -> None:
        with Connection(self.daemon.port) as there, contextlib.ExitStack() as others:
            self.assertEqual(there.ask(HEALTH).code, 200)
            await self.allow_more(5)
            for _ in range(MANY):
                others.enter_context(socket.create_connection(("127.0.0.1", self.daemon.port)))
            for _ in range(3):
                self.assertEqual(there.ask(HEALTH).code, 200)
            await self.daemon.logged("no file descriptor is free")
            self.assertEqual(self.daemon.log.count("no file descriptor is free"), 1)
            self.assertNotIn("EMFILE", self.daemon.log)
        self.allow(self.most)
        self.assertEqual(text(await self.run_command("cat README")), "an evaluator\n")
