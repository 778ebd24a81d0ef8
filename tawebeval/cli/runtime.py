"""What all commands that ask a server have in common: where it is, the token, the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import attrs
import click
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import react

from tawebeval.cli.interrupting import interrupted
from tawebeval.cli.output import Screen, wants_colour
from tawebeval.cli.streams import OutputLost
from tawebeval.client import Client, ClientError, Refused, Unavailable
from tawebeval.client.client import base_url
from tawebeval.daemon.monotonic import count_monotonically
from tawebeval.errors import ConfigurationError
from tawebeval.linux.secretfiles import read_secrets

GOOD, FAILED, WRONG, UNREACHABLE = 0, 1, 2, 3
INTERRUPTED, UNREAD, TERMINATED = 130, 141, 143
"""The exit statuses; these as shells have them for SIGINT, SIGPIPE and SIGTERM."""

TOKEN = "TAWEBEVAL_TOKEN"  # noqa: S105  (the name of a variable)

Command = TypeVar("Command", bound=Callable[..., Any])


@attrs.frozen
class Server:
    """A server, and the token for it, if there is one."""

    url: str
    token: str | None = attrs.field(repr=False, default=None)

    def client(self, reactor: Any, screen: Screen) -> Client:
        """Return a client of it, which tells on a terminal when it has to wait."""
        waiting = False

        def told(why: str, seconds: float) -> None:
            nonlocal waiting
            waiting = True
            screen.progress(f"{why}; trying again in {seconds:.0f} s")

        def answered() -> None:
            nonlocal waiting
            if waiting and screen.shows_progress:
                screen.note("connected again")
            waiting = False

        return Client(self.url, self.token, reactor=reactor, told=told, answered=answered)


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
    """Return what shows events on stdout and stderr. Raises UsageError."""
    if sys.stdout is None:
        raise click.UsageError("stdout is closed; to see nothing of it: >/dev/null")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # for all that follows
    for stream in (sys.stdout, sys.stderr):
        # What was printed is UTF-8, and for programs it stays so.
        encoding = stream.encoding if stream.isatty() else "utf-8"
        stream.reconfigure(encoding=encoding, errors="replace")  # type: ignore[union-attr]
    return Screen(sys.stdout, sys.stderr, wants_colour(sys.stderr, os.environ), lines)


def run(server: Server, screen: Screen, work: Callable[[Client, Any], Awaitable[int]]) -> NoReturn:
    """Run the reactor until `work(client, reactor)` has its exit status, and exit with it."""

    async def working(reactor: Any) -> int:
        async with server.client(reactor, screen) as client:
            return await work(client, reactor)

    run_reactor(screen, working)


def run_reactor(
    screen: Screen,
    work: Callable[[Any], Awaitable[int]],
    again: Callable[[], object] | None = None,
) -> NoReturn:
    """Run the reactor until `work(reactor)` has its exit status, and exit with it.

    However that comes about, `work` has ended then. A second Ctrl-C calls `again`, or without that
    ends the program.
    """
    status = TERMINATED

    async def main(reactor: Any) -> None:
        nonlocal status
        count_monotonically(reactor)
        # Not before: the reactor has a way of its own with signals, and a start ends with that.
        await begun(reactor)
        status = await judged(screen, work(reactor), reactor, again)

    def begin(reactor: Any) -> Deferred[None]:
        working = Deferred.fromCoroutine(main(reactor))

        def end() -> Deferred[None]:
            working.cancel()
            return working

        reactor.addSystemEventTrigger("before", "shutdown", end)
        return working

    try:
        react(begin)
    except SystemExit as end:  # which knows only of what went wrong in there
        raise SystemExit(end.code or status) from None
    raise AssertionError("react does not return")


def begun(reactor: Any) -> Deferred[None]:
    """Return when the reactor runs."""
    running: Deferred[None] = Deferred()
    reactor.callWhenRunning(running.callback, None)
    return running


async def judged(
    screen: Screen,
    work: Awaitable[int],
    reactor: Any,
    again: Callable[[], object] | None = None,
) -> int:
    """Return the exit status of `work`, and say why where it could not be done."""

    async def whole() -> int:
        return await work

    # It is begun within, for it may say itself what Ctrl-C is to do.
    with interrupted(lambda: deferred.cancel(), reactor, again) as interruption:
        deferred = Deferred.fromCoroutine(whole())
        try:
            status = await deferred
        except (ClientError, CancelledError, OutputLost, OSError) as error:
            status = _status_of(error, screen)
    return interruption.status(status)


def _status_of(error: Exception, screen: Screen) -> int:
    """Return the exit status of what ended a piece of work, and say what it was."""
    match error:
        case CancelledError():
            words, status = "interrupted", INTERRUPTED
        case Unavailable():
            words, status = str(error), UNREACHABLE
        case Refused():
            words, status = _advice(error), WRONG
        case OutputLost():
            words, status = str(error), UNREAD if error.unread else WRONG
        case OSError():  # of a file of the submission
            words, status = f"{error.filename}: {error.strerror}", WRONG
        case _:
            raise error
    if status != UNREAD:
        screen.note(words, "red")
    return status


def _advice(error: Refused) -> str:
    if error.status == 401:
        return f"{error} (set {TOKEN}, or use --token-file)"
    return str(error)
