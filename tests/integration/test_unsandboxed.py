"""Without a sandbox: what the daemon does about processes that run away, as far as it can.

Everything else is tested with the sandbox. Here nothing holds the evaluators: they see the
processes of the machine, so that what they print of them can be believed.
"""

from __future__ import annotations

from tests.integration.attacks.strays import StrayTests
from tests.integration.client import text
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until
from tests.integration.processes import alive

# Its environment, working directory and session are its own: nothing shows whose it is.
# Who it is it says in `who` as well.
HIDDEN = "who=$PWD/who; cd /; exec env -i setsid sh -c 'echo $$ | tee $0; exec yes' $who"


class UnsandboxedTests(StrayTests, DaemonTestCase):
    """Orphans are found by what they have inherited."""

    configuration = CONFIGURATION + '[sandbox]\nkind = "none"\n[limits]\nprocesses = 2000\n'

    async def test_the_log_warns(self) -> None:
        """Every start says what the lack of a sandbox means."""
        await self.daemon.logged("sandbox.kind")
        (line,) = [line for line in self.daemon.log.splitlines() if "sandbox.kind" in line]
        self.assertIn('sandbox.kind is "none": callers can do all', line)
        self.assertIn("all that the daemon's user can", line)

    async def test_it_is_none(self) -> None:
        """These tests are what they say: evaluators see the machine, and who started them."""
        pid = self.daemon.pid
        self.assertEqual(text(await self.run_command("echo $PPID")), f"{pid}\n")

    async def test_one_that_hides_and_prints_for_ever(self) -> None:
        """The end waits for none who still writes; its pipe is closed, which is its own end."""
        command = (
            f"cat > hide.sh <<'END'\n{HIDDEN}\nEND\nsetsid env -i sh hide.sh &"
            " until grep -qsx yes /proc/$(cat who)/comm; do sleep .01; done; sleep .3"
        )
        identifier = await self.begin(command)
        self.assertEqual((await self.client.ended(identifier))["state"], "finished")
        pid = int(text(await self.client.follow(identifier)).splitlines()[0])
        await until(lambda: not alive(pid), "the writer has died of the closed pipe")
