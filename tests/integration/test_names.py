"""Two daemons with names behind HAProxy, by the configuration of `etc/proxies`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

from twisted.trial.unittest import TestCase

from tests.integration.client import Client, text
from tests.integration.harness import Daemon, free_port, until
from tests.integration.repositories import GitRepository
from tests.integration.unprivileged import temporary_folder

CONFIGURATION = (
    Path(__file__).resolve().parent.parent.parent / "etc" / "proxies" / "haproxy-several.cfg"
)
HAPROXY = shutil.which("haproxy", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


class NamedTests(TestCase):
    """Clients have one address, and each evaluation is asked of the daemon that has it."""

    timeout = 60
    if HAPROXY is None:
        skip = "there is no haproxy (Debian package of that name)"

    async def setUp(self) -> None:
        self.folder = temporary_folder()
        self.addCleanup(shutil.rmtree, self.folder)
        self.repository = GitRepository(self.folder / "repository")
        self.repository.write("README", "an evaluator\n")
        self.commit = self.repository.commit()
        self.daemons = [self.start(name) for name in ("a", "b")]
        for daemon in self.daemons:
            await daemon.ready()
        port = self.start_proxy()
        self.client = Client(f"http://127.0.0.1:{port}")
        self.addCleanup(self.client.close)

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        await until(listens, "haproxy listens")

    def start(self, name: str) -> Daemon:
        """Start a daemon of that name."""
        daemon = Daemon()
        self.addCleanup(daemon.remove)
        with (daemon.folder / "tawebeval.toml").open("a") as file:
            file.write(f'name = "{name}"\n')  # the section that is written last is [service]
        daemon.start()
        return daemon

    def start_proxy(self) -> int:
        """Start HAProxy before both; return its port."""
        port = free_port()
        text = CONFIGURATION.read_text()
        for place, number in (
            ("bind :80", port),
            ("127.0.0.1:8081", self.daemons[0].port),
            ("127.0.0.1:8082", self.daemons[1].port),
        ):
            self.assertIn(place, text)
            text = text.replace(place, f"{place.rpartition(':')[0]}:{number}")
        path = self.folder / "haproxy.cfg"
        path.write_text(text.replace(f"bind :{port}", f"bind 127.0.0.1:{port}"))
        with (self.folder / "haproxy.log").open("wb") as log:
            process = subprocess.Popen(
                [str(HAPROXY), "-db", "-f", str(path)], stdout=log, stderr=log
            )
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)
        return port

    async def evaluate(self, command: str = "echo hello", **headers: str) -> str:
        """Begin an evaluation; return its identifier."""
        return await self.client.evaluate(
            self.repository.url, self.commit, command, headers=headers
        )

    async def test_each_finds_its_own(self) -> None:
        """Both get some of the evaluations; all of what is asked of one reaches the right one."""
        found = [await self.evaluate() for _ in range(4)]
        self.assertEqual({identifier.partition("-")[0] for identifier in found}, {"a", "b"})
        for identifier in found:
            self.assertEqual((await self.client.status(identifier))["evaluation_id"], identifier)
            for _ in range(2):  # or it could be the right one's turn
                older = await self.client.get(f"/evaluation_events?evaluation={identifier}")
                self.assertEqual(older.code, 200, older.body)
            doubled = await self.client.get(f"//evaluation//{identifier}/events")
            self.assertEqual(doubled.code, 200, doubled.body)
            events = await self.client.follow(identifier)
            self.assertEqual(text(events), "hello\n")
            self.assertEqual((await self.client.get(f"/evaluation/{identifier}")).code, 410)

    async def test_cancel(self) -> None:
        """Cancelling goes to the right one, too."""
        for identifier in [await self.evaluate("exec sleep 600") for _ in range(2)]:
            await self.client.cancel(identifier)
        for daemon in self.daemons:
            await daemon.nothing_left()

    async def test_keys(self) -> None:
        """A form that is sent again with its key has the answer of the first time."""
        for number in range(4):
            headers = {"Idempotency-Key": f"key-{number}"}
            first, again = [await self.evaluate(**headers) for _ in range(2)]
            self.assertEqual(first, again)

    async def test_away(self) -> None:
        """What a daemon has that is away is told by a problem, and the other one goes on."""
        identifiers = [await self.evaluate() for _ in range(2)]
        await self.daemons[0].kill()
        for identifier in identifiers:
            answer = await self.client.get(f"/evaluation/{identifier}")
            if identifier.startswith("a-"):
                answer.problem(503)
            else:
                self.assertEqual(answer.code, 200)

    async def test_unknown(self) -> None:
        """What nobody has is answered all the same: 404, as a problem."""
        own = (await self.evaluate()).partition("-")[2]
        for identifier in (own, f"any-{own}", f"c-{own}", "a", "x" * 40):
            (await self.client.get(f"/evaluation/{identifier}")).problem(404)
        self.assertEqual((await self.client.get("/health")).code, 200)
