"""Evaluators that run away: some of the ways once kept an evaluation from ending."""

from __future__ import annotations

from tests.integration.attacks.strays import StrayTests
from tests.integration.client import text
from tests.integration.harness import CONFIGURATION, UNSANDBOXED, DaemonTestCase, until
from tests.integration.processes import alive, new_word, processes

# Its environment, working directory and session are its own: nothing shows whose it is.
# A shell called `yes`: the real one prints more than `limits.output` before the evaluator ends.
HIDDEN = (
    "echo hidden; ln -s /bin/sh yes; cd /;"
    " exec env -i setsid $OLDPWD/yes -c 'while echo y; do :; done'"
)
# Without a sandbox it says who it is in `who` as well.
HIDDEN_OUTSIDE = (
    "ln -s /bin/sh yes; yes=$PWD/yes who=$PWD/who; cd /; exec env -i setsid sh -c"
    " 'echo $$ | tee $0; exec $1 -c \"while echo y; do :; done\"' $who $yes"
)


class RunawayTests(StrayTests, DaemonTestCase):
    configuration = CONFIGURATION + "[limits]\nprocesses = 2000\n"

    async def test_process_that_hides_and_prints_for_ever_does_not_delay_the_end(self) -> None:
        word = new_word()
        command = (
            f"cat > hide.sh <<'END'\n{HIDDEN} {word}\nEND\nsetsid env -i sh hide.sh &"
            " until grep -qsx yes /proc/[0-9]*/comm; do sleep .01; done; sleep .3"
        )
        identifier = await self.begin(command)
        status = await self.client.ended(identifier)
        self.assertEqual(processes(word), [])
        self.assertEqual(status["state"], "finished")
        self.assertIn("hidden", text(await self.client.follow(identifier)))


class UnsandboxedTests(StrayTests, DaemonTestCase):
    """Without a sandbox orphans are found by what they have inherited.

    Nothing holds these evaluators: they see the processes of the machine, so that what they print
    of them can be believed.
    """

    configuration = UNSANDBOXED

    async def test_log_warns_of_the_lack_of_a_sandbox(self) -> None:
        await self.daemon.logged("sandbox.kind")
        (line,) = [line for line in self.daemon.log.splitlines() if "sandbox.kind" in line]
        self.assertIn('sandbox.kind is "none": callers can do all', line)
        self.assertIn("all that the daemon's user can", line)

    async def test_process_that_hides_and_prints_for_ever_does_not_delay_the_end(self) -> None:
        command = (
            f"cat > hide.sh <<'END'\n{HIDDEN_OUTSIDE}\nEND\nsetsid env -i sh hide.sh &"
            " until grep -qsx yes /proc/$(cat who)/comm; do sleep .01; done; sleep .3"
        )
        identifier = await self.begin(command)
        self.assertEqual((await self.client.ended(identifier))["state"], "finished")
        pid = int(text(await self.client.follow(identifier)).splitlines()[0])
        await until(lambda: not alive(pid), "the writer has died of the closed pipe")
