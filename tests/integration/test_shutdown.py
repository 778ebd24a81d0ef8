"""The daemon's end and its beginning again, while there are evaluations."""

from __future__ import annotations

from tests.integration.client import python
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until
from tests.integration.processes import new_word, processes
from tests.integration.raw import Connection

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('there', flush=True)
time.sleep(600)
"""


class ShutdownTests(DaemonTestCase):
    """Each test stops the daemon, and starts it again for the next."""

    configuration = CONFIGURATION.replace("running = 4", "running = 1").replace("0.3", "0.8")

    async def begin_again(self) -> None:
        """Start the daemon that was stopped."""
        await until(lambda: not self.daemon.running, "the daemon stops")
        self.assertEqual(self.daemon.leftovers(), [])
        self.daemon.start()
        await self.daemon.ready()

    async def test_a_stubborn_evaluator_does_not_outlive_the_daemon(self) -> None:
        word = new_word()
        await self.begin_and_wait(python(STUBBORN, word), "there")
        self.assertNotEqual(processes(word), [])
        self.daemon.interrupt()
        await until(lambda: not self.daemon.running, "the daemon stops")
        self.assertEqual(processes(word), [])
        await self.begin_again()

    async def test_cancel_during_the_stop_is_no_defect(self) -> None:
        identifier = await self.begin_and_wait(python(STUBBORN), "there")
        with Connection(self.daemon.port) as connection:
            health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
            self.assertEqual(connection.ask(health).code, 200)
            known = len(self.daemon.log)
            self.daemon.interrupt()
            await until(lambda: "SIGTERM" in self.daemon.log[known:], "it has begun to stop")
            cancel = f"DELETE /evaluation/{identifier} HTTP/1.1\r\nHost: localhost\r\n\r\n"
            connection.send(cancel.encode())
            await self.begin_again()
        self.daemon.check_log()

    async def test_identifiers_outlive_a_restart(self) -> None:
        lost, read = await self.begin("exec sleep 600"), await self.begin("true")
        await self.client.cancel(lost)
        end = (await self.client.ended(read)) and (await self.client.page(read))["end"]
        self.assertIsNone((await self.client.page(read, end))["end"])
        created = (await self.client.status(lost))["created"]
        self.daemon.interrupt()
        await self.begin_again()
        self.assertEqual(await self.client.page(read, end), {"begin": end, "end": None, "data": []})
        self.assertEqual((await self.client.page(lost, end))["end"], None)
        for path in ("/events", "/events?after=0", ""):
            problem = (await self.client.get(f"/evaluation/{lost}{path}")).problem(410)
            self.assertGreater(problem["started"], created)
            forged = lost[:-1] + ("A" if lost[-1] != "A" else "B")
            (await self.client.get(f"/evaluation/{forged}{path}")).problem(404)
        (await self.client.get(f"/evaluation/{forged}/events?after={end}")).problem(404)
