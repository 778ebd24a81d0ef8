"""Without a sandbox: what the daemon does about processes that run away, as far as it can.

Everything else is tested with the sandbox. Here nothing holds the evaluators: they see the
processes of the machine, so that what they print of them can be believed.
"""

from __future__ import annotations

import os

from tests.integration.attacks.strays import DEEP, LEFT_BEHIND
from tests.integration.client import python, text
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until
from tests.integration.processes import alive, new_word, processes

# Its environment, working directory and session are its own: nothing shows whose it is.
HIDDEN = "cd /; exec env -i setsid sh -c 'echo $$; exec yes'"


class UnsandboxedTests(DaemonTestCase):
    """Orphans are found by what they have inherited."""

    configuration = CONFIGURATION + '[sandbox]\nkind = "none"\n[limits]\nprocesses = 2000\n'

    async def test_the_log_warns(self) -> None:
        """Every start says what the lack of a sandbox means, and who the evaluators are."""
        (line,) = [line for line in self.daemon.log.splitlines() if "sandbox.kind" in line]
        self.assertIn('sandbox.kind is "none": whoever can send a request can do', line)
        uid = 65534 if os.geteuid() == 0 else os.geteuid()
        self.assertIn(f"user {uid} can", line)

    async def test_it_is_none(self) -> None:
        """These tests are what they say: evaluators see the machine, and who started them."""
        pid = self.daemon.pid
        self.assertEqual(text(await self.run_command("echo $PPID")), f"{pid}\n")

    async def left_behind(self, before: str) -> None:
        """Check that what is left behind is dead before the end is seen."""
        word = new_word()
        identifier = await self.begin(python(LEFT_BEHIND.format(before=before, after=""), word))
        await self.client.ended(identifier)
        self.assertEqual(processes(word), [])
        self.assertEqual(text(await self.client.follow(identifier)), "there\n")

    async def test_a_daemon_that_holds_stdout_is_dead_at_the_end(self) -> None:
        """One that ran away to a session of its own delays no end, and outlives none."""
        await self.left_behind(before="")

    async def test_a_daemon_that_has_closed_everything_is_dead_at_the_end(self) -> None:
        """So does one with which nothing is shared any more."""
        await self.left_behind(before="os.closerange(0, 10)")

    async def test_a_daemon_is_dead_after_a_cancel(self) -> None:
        """What ran away is found also where the evaluation is cancelled."""
        word = new_word()
        program = LEFT_BEHIND.format(before="os.closerange(0, 10)", after="time.sleep(60)")
        identifier = await self.begin(python(program, word))

        def closed() -> list[int]:
            return [pid for pid in processes(word) if os.listdir(f"/proc/{pid}/fd") == []]

        await until(closed, "one has closed everything")
        await self.client.cancel(identifier)
        self.assertEqual(processes(word), [])

    async def test_one_that_hides_and_prints_for_ever(self) -> None:
        """The end waits for none who still writes; its pipe is closed, which is its own end."""
        command = f"cat > hide.sh <<'END'\n{HIDDEN}\nEND\nsetsid env -i sh hide.sh & sleep .3"
        identifier = await self.begin(command)
        self.assertEqual((await self.client.ended(identifier))["state"], "finished")
        pid = int(text(await self.client.follow(identifier)).splitlines()[0])
        await until(lambda: not alive(pid), "the writer has died of the closed pipe")

    async def test_a_very_deep_process_tree(self) -> None:
        """A tree deeper than Python recurses is killed whole."""
        word = new_word()
        command = f"cat > deep.sh <<'END'\n{DEEP}\nEND\nexec sh deep.sh 1100 {word}"
        identifier = await self.begin(command)
        page = await self.client.page(identifier, wait=30)
        self.assertEqual(text(page["data"]).strip(), "deep")
        await self.client.cancel(identifier)
        self.assertEqual(processes(word), [])
