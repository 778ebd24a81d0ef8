"""The commands that ask a server, against the daemon's site in memory."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from tawebeval.cli import main as command
from tawebeval.cli.output import Screen
from tawebeval.cli.runtime import CommandContext, Interruptions, ServerAccess
from tawebeval.errors import RequestError
from tests.cases.client import ClientTestCase, Line
from tests.fakes.world import OID

REPOSITORY = ("--repository", "https://example.org/p.git", "--commit", OID, "--evaluator", "./e")

UNSET: dict[str, str | None] = dict.fromkeys(
    ("TAWEBEVAL_SERVER", "TAWEBEVAL_TOKEN", "TAWEBEVAL_TOKEN_FILE")
)


class LineClient:
    """A client that blocks while the test's time goes on; `meanwhile` is called at every step."""

    def __init__(self, line: Line, meanwhile: Callable[[], object]) -> None:
        self._line, self._meanwhile = line, meanwhile

    def __enter__(self) -> LineClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._line.client, name)

        def call(*arguments: Any, **named: Any) -> Any:
            found = method(*arguments, **named)
            return self._iterate(found) if hasattr(found, "__anext__") else self._wait(found)

        return call

    def _iterate(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                item = self._wait(items.__anext__())
            except StopAsyncIteration:
                return
            yield item

    def _wait(self, found: Awaitable[Any]) -> Any:
        return self._line.wait(found, self._meanwhile)


class CommandTestCase(ClientTestCase):
    """The command, whose requests go to a daemon's site in memory."""

    def setUp(self) -> None:
        super().setUp()
        self.server: ServerAccess | None = None
        self.configuration = Path(self.mktemp()).absolute()
        self.meanwhile: Any = lambda: None
        self.file = Path(self.mktemp())
        self.file.write_bytes(b"print(1)\n")

        def make_client(server: ServerAccess, screen: Screen) -> LineClient:
            self.server = server
            return LineClient(self.line, lambda: self.meanwhile())

        self.patch(ServerAccess, "make_client", make_client)
        self.patch(ServerAccess, "make_quiet_client", lambda _: LineClient(self.line, lambda: None))
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
        """Return what a command works with."""
        client: Any = LineClient(self.line, lambda: self.meanwhile())
        server = ServerAccess("http://localhost:8080")
        return CommandContext(server, client, screen, Interruptions())

    def lose(self, *errors: RequestError) -> None:
        """Let the server answer these to all who read, polls that wait included; then the last."""
        answers = iter(errors)

        def page(*_: object, **__: object) -> None:
            raise next(answers, errors[-1])

        self.patch(self.line.service.registry, "read_page", page)

    def end(self, status: int = 0) -> Any:
        """Return what lets the evaluator print and end, once it has been started."""

        def meanwhile() -> None:
            children = self.line.service.world.spawn.children
            if children and children[-1].is_running:
                children[-1].print(b"hello\n" + self.block('{"type": "x", "n": 1.50}'))
                children[-1].end(status)

        return meanwhile
