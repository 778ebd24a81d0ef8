"""A log that nobody reads: the daemon goes on, tells what is missing, and ends when it is told."""

from __future__ import annotations

import re

from tests.integration.harness import TWISTD, Daemon, DaemonTestCase, until
from tests.integration.raw import Connection

_LINES = 7000  # more than a pipe and the daemon hold together
_AT_ONCE = 50
_GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"x" * 190)


class Unread(Daemon):
    """A daemon that writes its log to a pipe which it keeps open itself."""

    program = (
        *("sh", "-c", 'mkfifo -m 666 "$0" && exec 3<>"$0" "$@" >&3 2>&3'),
        *("pipe", str(TWISTD)),
    )


class UnreadLogTests(DaemonTestCase):
    configuration = """
        [log]
        access = true
        """

    async def setUp(self) -> None:
        type(self)._shared = Unread(self.configuration)
        await super().setUp()

    def ask(self, times: int = _LINES) -> None:
        with Connection(self.daemon.port) as connection:
            for _ in range(0, times, _AT_ONCE):
                connection.send(_GET * _AT_ONCE)
                for _ in range(_AT_ONCE):
                    connection.answer().problem(404)

    async def test_unread_log_stops_no_request_and_no_shutdown(self) -> None:
        self.ask()
        lost = await self.client.figure("log_events_lost_total")
        self.assertGreater(lost, 0)
        found = b""
        with open(self.daemon.folder / "pipe", "rb", buffering=0) as pipe:
            while b" earlier log events were lost" not in found:
                found += pipe.read(2**16)
                self.ask(_AT_ONCE)
        told = re.search(rb"up to (\d+) earlier log events", found)
        assert told is not None
        self.assertGreaterEqual(int(told[1]), lost)  # more may be lost by now
        self.ask(_LINES // 10)
        self.daemon.interrupt()
        await until(lambda: not self.daemon.running, "the daemon ends")


class EndTests(DaemonTestCase):
    async def test_last_lines_are_logged(self) -> None:
        await self.daemon.stop()
        self.assertIn("Server Shut Down.", self.daemon.lines[-1])
