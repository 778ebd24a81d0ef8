"""Programs that leave processes behind, or make very many of them, and what becomes of these."""

from __future__ import annotations

from typing import Any

from tests.integration.client import failure, python, text
from tests.integration.harness import until
from tests.integration.processes import descriptors, new_word, processes

# Leaves a process in a session of its own, in another directory, whose parent has gone; it says
# when that is there. By itself that ends later than any test.
_LEFT_BEHIND = """
import os, sys, time
told, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        os.write(1, b"there\\n")
        os.write(tell, b".")
        {before}
        time.sleep(600)
    os._exit(0)
os.read(told, 1)
{after}
"""
_CLOSE_EVERYTHING = "os.closerange(0, 10)"

# Each shell waits for the next one; the last says that all are there.
_DEEP = "if [ $1 -eq 0 ]; then echo deep; sleep 600; else sh $0 $(($1 - 1)) $2; :; fi"


class StrayTests:
    """What has run away is dead at the end, in the sandbox and without; for a `DaemonTestCase`.

    That must let evaluators have 2000 processes.
    """

    async def left_behind(self: Any, before: str) -> None:
        """Check that what is left behind is dead before the end is seen."""
        word = new_word()
        identifier = await self.begin(python(_LEFT_BEHIND.format(before=before, after=""), word))
        await self.client.ended(identifier)
        self.assertEqual(processes(word), [])
        self.assertEqual(text(await self.client.follow(identifier)), "there\n")

    async def test_a_daemon_that_holds_stdout_is_dead_at_the_end(self: Any) -> None:
        await self.left_behind(before="")

    async def test_a_daemon_that_has_closed_everything_is_dead_at_the_end(self: Any) -> None:
        ignore = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 13, 15)]"
        await self.left_behind(before=f"{_CLOSE_EVERYTHING}; {ignore}")

    async def test_a_daemon_is_dead_after_a_cancel(self: Any) -> None:
        word = new_word()
        program = _LEFT_BEHIND.format(before=_CLOSE_EVERYTHING, after="time.sleep(600)")
        identifier = await self.begin(python(program, word))

        def closed() -> list[int]:
            return [pid for pid in processes(word) if descriptors(pid) == []]

        await until(closed, "one has closed everything")
        await self.client.cancel(identifier)
        self.assertEqual(processes(word), [])

    async def test_very_deep_process_tree_is_killed_whole(self: Any) -> None:
        word = new_word()
        command = f"cat > deep.sh <<'END'\n{_DEEP}\nEND\nexec sh deep.sh 1100 {word}"
        identifier = await self.begin_and_wait(command, "deep")
        page = await self.client.page(identifier)
        await self.client.cancel(identifier)
        self.assertEqual(processes(word), [])
        failure(await self.client.follow(identifier, page["end"]), "cancelled")
