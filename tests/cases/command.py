"""The commands that ask a server, against the daemon's site in memory."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from tawebeval.cli import evaluate, evaluations
from tawebeval.cli import main as command
from tawebeval.cli.runtime import ServerAccess, await_exit_status
from tawebeval.errors import RequestError
from tests.cases.client import ClientTestCase
from tests.fakes.world import OID

REPOSITORY = ("--repository", "https://example.org/p.git", "--commit", OID, "--evaluator", "./e")

UNSET = dict.fromkeys(("TAWEBEVAL_SERVER", "TAWEBEVAL_TOKEN", "TAWEBEVAL_TOKEN_FILE"))


class CommandTestCase(ClientTestCase):
    """The command, of which the part that asks runs in memory."""

    def setUp(self) -> None:
        super().setUp()
        self.server: ServerAccess | None = None
        self.meanwhile: Any = lambda: None
        self.file = Path(self.mktemp())
        self.file.write_bytes(b"print(1)\n")
        for module in (evaluate, evaluations):
            self.patch(module, "run_with_client", self.run_work)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.addCleanup(signal.signal, number, signal.getsignal(number))

    def run_work(self, server: ServerAccess, screen: Any, work: Any) -> None:
        """Do what `run_with_client` does, with another client."""
        self.server = server
        reactor = self.line.service.reactor
        status = self.line.wait(
            await_exit_status(screen, work(self.line.client, reactor), reactor), self.meanwhile
        )
        raise SystemExit(status)

    def run_command(
        self, *arguments: str, env: Mapping[str, str] | None = None, stdin: bytes | None = None
    ) -> Result:
        """Run it as from a shell; `stdin` is the content of stdin."""
        result = CliRunner(env=UNSET).invoke(command, arguments, env=env, input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

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
