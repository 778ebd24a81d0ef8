"""Upgrades and downgrades: evaluations go on in the releases before and after, or are not lost."""

from __future__ import annotations

import os
import re
import signal
from itertools import cycle
from pathlib import Path

from tawebeval.sandbox.workspace import derive_log_pseudonym
from tests.integration.client import failure, text
from tests.integration.harness import until
from tests.integration.keepers import KeptDaemonTestCase
from tests.integration.releases import (
    AFTER_NEXT,
    MEMBER,
    NEXT,
    UNREAD_VERSION,
    make_next_release,
    make_release_after_next,
)
from tests.integration.rounds_case import EVALUATIONS, ROUNDS, RoundsCase

_WAIT = "echo ready; until [ -e ~/go ]; do sleep 0.1; done"


class RoundsTests(RoundsCase):
    """Evaluations of all kinds over upgrades to the next release, and downgrades."""

    async def setUp(self) -> None:
        await super().setUp()
        self.releases = cycle([make_next_release(self.folder / "next"), None])

    def start_daemon(self) -> None:
        """Start the other release."""
        self.daemon.use_release(next(self.releases))
        super().start_daemon()

    async def test_both_ways(self) -> None:
        """No event is lost and none comes twice, each status is right, and nothing is left."""
        await self.run_rounds(EVALUATIONS // 2, ROUNDS // 2, signal.SIGTERM)


class VersionTests(KeptDaemonTestCase):
    """Journals of a version that another release does not read."""

    async def setUp(self) -> None:
        await super().setUp()
        self.next = make_next_release(self.folder / "next")
        self.after_next = make_release_after_next(self.folder / "after-next")

    async def change_release(self, folder: Path | None, version: str) -> None:
        """Go on with a release, as `systemctl restart` does after an upgrade."""
        self.daemon.use_release(folder)
        if self.daemon.running:
            await self.daemon.end(signal.SIGTERM)
        self.daemon.start()
        await self.daemon.ready()
        self.assertEqual((await self.client.get("/health")).json["version"], version)

    async def fail_to_start(self, *identifiers: str) -> None:
        """Start this release, which cannot read the journals of these evaluations."""
        self.daemon.use_release(None)
        await self.daemon.end(signal.SIGTERM)
        self.daemon.start()
        await until(lambda: not self.daemon.running, "the daemon refuses to start")
        self.assertEqual(self.daemon.exit_status, 1)
        message = self.daemon.lines[-1]
        (name,) = re.findall("the journal of the evaluation (.*) cannot be read", message)
        self.assertIn(name, map(derive_log_pseudonym, identifiers))
        for words in (
            f"journal version {UNREAD_VERSION}",
            "install the release of tawebeval that ran before",
            "`systemctl restart tawebeval-keeper`, which loses them",
        ):
            self.assertIn(words, message)

    async def test_steps(self) -> None:
        """A release goes on with what its neighbours have left; after a refusal all is there."""
        ended = await self.begin("echo ended; echo no >&2; exit 3")
        before = await self.client.ended(ended)
        running = [await self.begin_and_wait(f"{_WAIT}; echo late") for _ in range(4)]
        queued = await self.begin("cat $SUBMISSION_FILE_SOLUTION")
        await self.change_release(self.next, NEXT)
        written = os.pread(self.open_journal(running[0]), 10_000, 0)
        self.assertIn(MEMBER.encode(), written)
        await self.change_release(self.after_next, AFTER_NEXT)
        await self.fail_to_start(ended, *running, queued)
        await self.change_release(self.next, NEXT)
        self.assertEqual(await self.client.status(ended), before)
        states = [(await self.client.status(each))["state"] for each in (*running, queued)]
        self.assertEqual(states, ["running"] * 4 + ["queued"])
        for home in self.daemon.state.glob("evaluations/*/home"):
            (home / "go").touch()
        for identifier in running:
            self.assertEqual(text(await self.client.follow(identifier)), "ready\nlate\n")
        self.assertEqual(text(await self.client.follow(queued)), "42\n")
        events = await self.client.follow(ended)
        self.assertEqual(text(events), "ended\n")
        self.assertEqual(failure(events, "exit")["stderr"], "no\n")
        self.daemon.check_log()

    async def test_dropped(self) -> None:
        """Another keeper has no journals, and the evaluations are lost."""
        await self.change_release(self.after_next, AFTER_NEXT)
        identifier = await self.begin_and_wait(_WAIT)
        await self.fail_to_start(identifier)
        await self.daemon.start_another_keeper()
        self.daemon.start()
        await self.daemon.ready()
        self.assertEqual((await self.client.ask(identifier)).code, 410)
        self.assertEqual(text(await self.client.follow(await self.begin("echo one"))), "one\n")
        await until(lambda: self.daemon.remains() == [], "nothing is left")
        self.daemon.check_log()
