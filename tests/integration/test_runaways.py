"""Evaluators that run away in ways that once kept an evaluation from ending."""

from __future__ import annotations

import contextlib
import os

from tests.integration.client import failure, text
from tests.integration.harness import DaemonTestCase, alive, until

# Its environment, working directory and session are its own: nothing shows whose it is.
HIDDEN = "cd /; exec env -i setsid sh -c 'echo $$; exec yes'"
# Each shell waits for the next one; the last says that all are there.
DEEP = "if [ $1 -eq 0 ]; then echo deep; sleep 60; else sh $0 $(($1 - 1)); :; fi"


class RunawayTests(DaemonTestCase):
    """What they leave neither holds up the end nor fills the memory."""

    async def test_one_that_hides_and_prints_for_ever(self) -> None:
        """The end waits for none who still writes; its pipe is closed, which is its own end."""
        command = f"cat > hide.sh <<'END'\n{HIDDEN}\nEND\nsetsid env -i sh hide.sh & sleep .3"
        identifier = await self.begin(command)
        status = await self.client.ended(identifier)
        self.assertEqual(status["state"], "finished")
        printed = text(await self.client.follow(identifier))
        pid = int(printed.splitlines()[0])
        await until(lambda: not alive(pid), "the writer has died of the closed pipe")

    async def test_a_very_deep_process_tree(self) -> None:
        """A tree deeper than Python recurses is killed whole."""
        identifier = await self.begin(f"cat > deep.sh <<'END'\n{DEEP}\nEND\nexec sh deep.sh 1100")
        page = await self.client.page(identifier, wait=30)
        self.assertEqual(text(page["data"]).strip(), "deep")
        await self.client.cancel(identifier)
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                self.assertNotIn(b"deep.sh", file.read())
        page = await self.client.page(identifier, page["end"])
        failure(page["data"], "cancelled")

    async def test_an_exit_with_a_full_ring(self) -> None:
        """One that has exited has ended, though nobody has read what it printed."""
        identifiers = [await self.begin("yes a | head -c 300000") for _ in range(6)]
        for identifier in identifiers:
            self.assertEqual((await self.client.ended(identifier))["state"], "finished")
        for identifier in identifiers:
            self.assertEqual(text(await self.client.follow(identifier)), "a\n" * 150_000)
