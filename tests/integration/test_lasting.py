"""Evaluations that outlive the daemon: their events are complete and exact, whatever ends it."""

from __future__ import annotations

from tests.integration.client import failure, text
from tests.integration.starters import SharedKeptDaemonTestCase


class LastingTests(SharedKeptDaemonTestCase):
    async def follow(self, identifier: str) -> str:
        """Read all events; return what was printed as text."""
        return text(await self.client.follow(identifier))

    async def test_running_evaluation_outlives_the_daemon(self) -> None:
        identifier, gate = await self.begin_and_hold("echo late; echo no >&2; exit 3")
        before = await self.client.status(identifier)
        await self.daemon.restart()
        after = await self.client.status(identifier)
        self.assertEqual(after["state"], "running")
        for name in ("created", "running", "seed", "commit_oid", "tree_oid", "limits"):
            self.assertEqual(after[name], before[name], name)
        gate.write_text("\n")
        events = await self.client.follow(identifier)
        self.assertEqual(text(events), "readylate\n")
        error = failure(events, "exit")
        self.assertEqual((error["status"], error["stderr"]), (3, "no\n"))

    async def test_queued_evaluations_keep_their_order(self) -> None:
        holding = [await self.begin_and_wait("echo ready; sleep 600") for _ in range(4)]
        waiting = [await self.begin(f"echo {n}; cat $SUBMISSION_FILE_SOLUTION") for n in range(6)]
        await self.daemon.restart()
        places = [(await self.client.status(one))["queue_place"] for one in waiting]
        self.assertEqual(places, list(range(6)))
        for identifier in holding:
            await self.client.cancel(identifier)
        texts = [await self.follow(one) for one in waiting]
        self.assertEqual(texts, [f"{n}\n42\n" for n in range(6)])
