"""What all commands that ask a server have in common: where it is, the token, the end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import attrs
import click
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import react

from tawebeval.cli.screen import Screen, wants_colour
from tawebeval.client import Client, Refused, Unavailable
from tawebeval.client.client import base_url
from tawebeval.errors import ConfigurationError
from tawebeval.secretfiles import read_secrets

GOOD, FAILED, WRONG, UNREACHABLE, INTERRUPTED, UNREAD = 0, 1, 2, 3, 130, 141
"""The exit statuses; the last two as shells have them for SIGINT and SIGPIPE."""

TOKEN = "TAWEBEVAL_TOKEN"  # noqa: S105  (the name of a variable)

Command = TypeVar("Command", bound=Callable[..., Any])


@attrs.frozen
class Server:
    """A server, and the token for it, if there is one."""

    url: str
    token: str | None = attrs.field(repr=False, default=None)

    def client(self, reactor: Any, screen: Screen) -> Client:
        """Return a client of it, which tells on a terminal when it has to wait."""

        def told(why: str, seconds: float) -> None:
            screen.progress(f"{why}; trying again in {seconds:.0f} s")

        return Client(self.url, self.token, reactor=reactor, told=told)


def asks_server(command: Command) -> Command:
    """Give a command the options `--server` and `--token-file`, as the argument `server`."""

    def find(context: click.Context, _: click.Parameter, path: Path | None) -> str | None:
        return _token(path)

    def check(context: click.Context, _: click.Parameter, url: str) -> str:
        try:
            return base_url(url)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    for option in (
        click.option(
            "--server",
            envvar="TAWEBEVAL_SERVER",
            default="http://127.0.0.1:8080",
            show_default=True,
            show_envvar=True,
            metavar="URL",
            callback=check,
            help="Where the server is.",
        ),
        click.option(
            "--token-file",
            "token",
            envvar="TAWEBEVAL_TOKEN_FILE",
            show_envvar=True,
            type=click.Path(path_type=Path, dir_okay=False),
            callback=find,
            help=f"A file with the token for it, if it wants one. The variable {TOKEN} may have"
            " the token itself.",
        ),
    ):
        command = option(command)
    return command


def _token(path: Path | None) -> str | None:
    """Return the token: from a file that is named, or else from the environment."""
    if path is None:
        token, where = os.environ.get(TOKEN, "").strip(), TOKEN
    else:
        try:
            token, where = read_secrets(path, str.strip), str(path)
        except ConfigurationError as error:
            raise click.BadParameter(str(error)) from None
        if not token:
            raise click.BadParameter(f"{path}: there is no token in it")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise click.BadParameter(f"{where}: a token is one word without any spaces")
    return token or None


def make_screen(*, lines: bool = False) -> Screen:
    """Return what shows events on stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        # What was printed is UTF-8, and for programs it stays so.
        encoding = stream.encoding if stream.isatty() else "utf-8"
        stream.reconfigure(encoding=encoding, errors="replace")  # type: ignore[union-attr]
    return Screen(sys.stdout, sys.stderr, wants_colour(sys.stderr, os.environ), lines)


@contextmanager
def interrupted(call: Callable[[], object], reactor: Any) -> Iterator[None]:
    """Within it the first Ctrl-C makes a call in the reactor, and the next ends the program."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        reactor.callFromThread(call)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(server: Server, screen: Screen, work: Callable[[Client, Any], Awaitable[int]]) -> NoReturn:
    """Run the reactor until `work(client, reactor)` has its exit status, and exit with it."""

    async def working(reactor: Any) -> int:
        async with server.client(reactor, screen) as client:
            return await work(client, reactor)

    run_reactor(screen, working)


def run_reactor(screen: Screen, work: Callable[[Any], Awaitable[int]]) -> NoReturn:
    """Run the reactor until `work(reactor)` has its exit status, and exit with it."""

    async def main(reactor: Any) -> None:
        raise SystemExit(await judged(screen, work(reactor), reactor))

    react(lambda reactor: Deferred.fromCoroutine(main(reactor)))
    raise AssertionError("react does not return")


async def judged(screen: Screen, work: Awaitable[int], reactor: Any) -> int:
    """Return the exit status of `work`, and say why where it could not be done."""

    async def whole() -> int:
        return await work

    # It is begun within, for it may say itself what Ctrl-C is to do.
    with interrupted(lambda: deferred.cancel(), reactor):
        deferred = Deferred.fromCoroutine(whole())
        try:
            return await deferred
        except Unavailable as error:
            screen.note(str(error), "red")
            return UNREACHABLE
        except Refused as error:
            screen.note(_advice(error), "red")
            return WRONG
        except CancelledError:
            screen.note("interrupted", "red")
            return INTERRUPTED
        except BrokenPipeError:
            # Python would try once more, at its end, to write what nobody reads.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return UNREAD
        except OSError as error:  # of a file of the submission
            screen.note(f"{error.filename}: {error.strerror}", "red")
            return WRONG


def _advice(error: Refused) -> str:
    if error.status == 401:
        return f"{error} (set {TOKEN}, or use --token-file)"
    return str(error)
