"""The commands that ask a server, against the daemon's site in memory."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from tawebeval.cli import main as command
from tawebeval.cli.output import Screen
from tawebeval.cli.runtime import CommandContext, InterruptHandler, ServerAccess
from tawebeval.core.events import EventPage
from tawebeval.errors import RequestError
from tawebeval.evaluations.reading import EventReader
from tawebeval_client import Client, sync_client
from tawebeval_client.http import HttpRequest, RequestFailure, Response
from tests.cases.client import ClientTestCase, Line
from tests.fakes.world import OID

REPOSITORY = ("--repository", "https://example.org/p.git", "--commit", OID, "--evaluator", "./e")

UNSET: dict[str, str | None] = dict.fromkeys(
    ("TAWEBEVAL_SERVER", "TAWEBEVAL_TOKEN", "TAWEBEVAL_TOKEN_FILE")
)


class LineClient(Client):
    """A client whose requests go over a line, while the test's time goes on.

    `meanwhile` is called at every step of the time.
    """

    def __init__(self, line: Line, meanwhile: Callable[[], object], **settings: Any) -> None:
        found = line.client
        super().__init__(
            found.server,
            found.token,
            draw_random=found.draw_random,
            get_time=found.get_time,
            **settings,
        )
        self.line, self.meanwhile = line, meanwhile

    async def pause(self, seconds: float) -> None:
        self.line.wait(self.line.client.pause(seconds), self.meanwhile)

    async def exchange(self, request: HttpRequest) -> Response | RequestFailure:
        return self.line.wait(self.line.client.exchange(request), self.meanwhile)


class CommandTestCase(ClientTestCase):
    """The command, whose requests go to a daemon's site in memory."""

    def setUp(self) -> None:
        super().setUp()
        self.server: ServerAccess | None = None
        self.configuration = Path(self.mktemp()).absolute()
        self.meanwhile: Any = lambda: None
        self.file = Path(self.mktemp())
        self.file.write_bytes(b"print(1)\n")

        make_client = ServerAccess.make_client

        def note_server(server: ServerAccess, screen: Screen) -> Client:
            self.server = server
            return make_client(server, screen)

        def connect(url: str, token: str | None, **settings: Any) -> Client:
            return LineClient(self.line, lambda: self.meanwhile(), **settings)

        self.patch(ServerAccess, "make_client", note_server)
        self.patch(sync_client, "Client", connect)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.addCleanup(signal.signal, number, signal.getsignal(number))

    def run_command(
        self, *arguments: str, env: Mapping[str, str] | None = None, stdin: bytes | None = None
    ) -> Result:
        """Run it as from a shell; `stdin` is the content of stdin."""
        unset = {**UNSET, "XDG_CONFIG_HOME": str(self.configuration)}
        result = CliRunner(env=unset).invoke(command, arguments, env=env, input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def make_context(self, screen: Screen) -> CommandContext:
        server = ServerAccess("http://localhost:8080")
        client = LineClient(self.line, lambda: self.meanwhile())
        return CommandContext(server, client, screen, InterruptHandler())

    def lose(self, *errors: RequestError) -> None:
        """Let the server answer these to all who read, polls that wait included; then the last."""
        answers = iter(errors)
        lost, read_page_now = self.line.service.registry.events, EventReader.read_page_now

        def page(reader: EventReader, *arguments: Any, **others: Any) -> EventPage:
            if reader is lost:
                raise next(answers, errors[-1])
            return read_page_now(reader, *arguments, **others)

        # Each request for a page reads it at once, and a poll waits only if this has none.
        self.patch(EventReader, "read_page_now", page)

    def end(self, status: int = 0) -> Any:
        """Return what lets the evaluator print and end, once it has been started."""

        def meanwhile() -> None:
            children = self.line.service.world.spawn.children
            if children and children[-1].is_running:
                children[-1].print(b"hello\n" + self.block('{"type": "x", "n": 1.50}'))
                children[-1].end(status)

        return meanwhile
