"""What the commands share: options, the reactor, signals and exit statuses."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import attrs
import click
from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from tawebeval.cli.output import OutputError, Screen, wants_colour
from tawebeval.client import ClientError, Refused, Unavailable
from tawebeval.client.http import is_loopback
from tawebeval.client.settings import normalize_server_url
from tawebeval.client.twisted_client import TwistedClient as Client
from tawebeval.daemon.runtime import use_monotonic_clock
from tawebeval.errors import ConfigurationError, format_size
from tawebeval.linux.ownership import read_secret_file

GOOD, FAILED, WRONG, UNREACHABLE = 0, 1, 2, 3
INTERRUPTED, UNREAD = 130, 141
"""The exit statuses; these two are those of a shell for SIGINT and SIGPIPE."""

TOKEN_VARIABLE = "TAWEBEVAL_TOKEN"  # noqa: S105  (the name of a variable)

_UPLOAD_SECONDS = 1.0  # of an upload without a progress bar
_BAR_SECONDS = 0.1  # between two updates of the bar
_BAR_WIDTH = 30  # characters

_START_DAEMON = (
    "is the daemon running? Start it with `tawebeval serve`, or name another with `--server`"
)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Command = TypeVar("Command", bound=Callable[..., Any])


class Utf8Argument(click.ParamType[str]):
    """Text that can be encoded as UTF-8; arguments of a process may be any bytes."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text. Raises BadParameter."""
        try:
            str(value).encode()
        except UnicodeEncodeError:
            self.fail("not UTF-8", param, ctx)
        return str(value)


UTF8_ARGUMENT = Utf8Argument()


@attrs.frozen
class ServerAccess:
    """The URL of a server, and the token for it, None without one."""

    url: str
    token: str | None = attrs.field(repr=False, default=None)

    def make_client(self, reactor: Any, screen: Screen) -> Client:
        """Return a client that shows its retries on `screen`; warn of a token in clear text."""
        if self.token and self.url.startswith("http:") and not is_loopback(self.url):
            screen.show_message(
                f"warning: {self.url} gets the token in clear text; try"
                f" https{self.url.removeprefix('http')}",
                "yellow",
            )
        notes = RetryMessages(screen)
        return Client(
            self.url,
            self.token,
            reactor=reactor,
            told=notes.on_retry,
            answered=notes.on_recovery,
            uploaded=UploadBar(screen, reactor).show,
        )


@attrs.define
class UploadBar:
    """The progress of an upload that takes longer than a second; only a terminal shows it."""

    _screen: Screen
    _clock: Any
    _next: float | None = None  # the time before which nothing is shown

    def show(self, sent: int, total: int) -> None:
        """Show the progress in bytes."""
        now = self._clock.seconds()
        if self._next is None or sent == total:
            # The next attempt begins a new upload.
            self._next = None if sent == total else now + _UPLOAD_SECONDS
        elif now >= self._next:
            self._next = now + _BAR_SECONDS
            done = _BAR_WIDTH * sent // total
            bar = "#" * done + "-" * (_BAR_WIDTH - done)
            sizes = f"{format_size(sent)} of {format_size(total)}"
            self._screen.show_progress(f"uploading [{bar}] {100 * sent // total}% ({sizes})")


@attrs.define
class RetryMessages:
    """Messages about the retries of a client; only a terminal shows them."""

    _screen: Screen
    _waiting: bool = False

    def on_retry(self, why: str, seconds: float) -> None:
        """Show why a request has failed, and the seconds until the next attempt."""
        self._waiting = True
        self._screen.show_progress(f"{why}; retrying in {seconds:.0f} s")

    def on_recovery(self) -> None:
        """Show that the server has answered again."""
        if self._waiting and self._screen.shows_progress:
            self._screen.show_message("the server answers again")
        self._waiting = False


def add_server_options(command: Command) -> Command:
    """Give a command the options `--server` and `--token-file`, as `server` and `token`."""

    def find(context: click.Context, _: click.Parameter, path: Path | None) -> str | None:
        return _find_token(path)

    def check(context: click.Context, _: click.Parameter, url: str) -> str:
        try:
            return normalize_server_url(url)
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
            help="Send requests to this server.",
        ),
        click.option(
            "--token-file",
            "token",
            envvar="TAWEBEVAL_TOKEN_FILE",
            show_envvar=True,
            type=click.Path(path_type=Path, dir_okay=False),
            callback=find,
            help=f"Read the token from this file. {TOKEN_VARIABLE} may hold the token itself.",
        ),
    ):
        command = option(command)
    return command


def _find_token(path: Path | None) -> str | None:
    """Return the token in a file, or without a path that in the environment."""
    if path is None:
        token, where = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
    else:
        try:
            token, where = read_secret_file(path, str.strip), str(path)
        except ConfigurationError as error:
            raise click.BadParameter(str(error)) from None
        if not token:
            raise click.BadParameter(f"{path} has no token; put the token alone into it")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise click.BadParameter(f"{where}: a token is one word of ASCII characters without spaces")
    return token or None


def make_screen(*, lines: bool = False, times: bool = False) -> Screen:
    """Return the screen on stdout and stderr; `lines` prints events as JSON. Raises UsageError.

    `times` is whether the events have times, which are shown with `lines` only.
    """
    if times and not lines:
        raise click.UsageError("--times needs --events, which prints the times")
    if sys.stdout is None:
        raise click.UsageError("stdout is closed; to discard the output, redirect it: >/dev/null")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        # Programs get UTF-8 whatever the locale is.
        encoding = stream.encoding if stream.isatty() else "utf-8"
        stream.reconfigure(encoding=encoding, errors="replace")  # type: ignore[union-attr]
    return Screen(sys.stdout, sys.stderr, wants_colour(sys.stderr, os.environ), lines)


def run_with_client(
    server: ServerAccess, screen: Screen, work: Callable[[Client, Any], Awaitable[int]]
) -> NoReturn:
    """Run the reactor for `work(client, reactor)`, and exit with the status that it returns."""

    async def with_client(reactor: Any) -> int:
        async with server.make_client(reactor, screen) as client:
            return await work(client, reactor)

    run_reactor(screen, with_client)


def run_reactor(
    screen: Screen, work: Callable[[Any], Awaitable[int]], *, cleans_up: bool = False
) -> NoReturn:
    """Run the reactor for `work(reactor)`, and exit with the status that it returns.

    For `cleans_up` see `cancel_on_signals`. Exceptions other than those of `await_exit_status` are
    raised.
    """
    # Imported late: it installs the reactor.
    from twisted.internet import reactor as installed

    reactor: Any = installed
    results: list[int | Failure] = []

    def begin() -> None:
        done = Deferred.fromCoroutine(await_exit_status(screen, work(reactor), reactor, cleans_up))
        done.addBoth(results.append).addBoth(lambda _: reactor.stop())

    use_monotonic_clock(reactor)
    reactor.callWhenRunning(begin)
    reactor.run(installSignalHandlers=False)
    (result,) = results
    if isinstance(result, Failure):
        result.raiseException()
    raise SystemExit(result)


async def await_exit_status(
    screen: Screen, work: Awaitable[int], reactor: Any, cleans_up: bool = False
) -> int:
    """Return the exit status of `work`, which signals cancel; print why it failed."""

    async def whole() -> int:
        return await work

    with cancel_on_signals(lambda: deferred.cancel(), reactor, cleans_up) as received:
        deferred = Deferred.fromCoroutine(whole())
        try:
            status = await deferred
        except (ClientError, CancelledError, OutputError, OSError) as error:
            status = _report(error, screen)
    if received and received[0] != signal.SIGINT:
        return 128 + received[0]
    return status


@contextmanager
def cancel_on_signals(
    cancel: Callable[[], object], reactor: Any, cleans_up: bool = False
) -> Iterator[list[int]]:
    """Have SIGINT, SIGTERM and SIGHUP call `cancel` in the reactor; yield those received.

    The next SIGINT or SIGTERM ends the process, or calls `cancel` again if the command `cleans_up`.
    A further SIGHUP has no effect, as the shell and the kernel may both send one. A signal that
    was ignored before, as by nohup(1), stays ignored.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGHUP and len(received) > 1:
            return
        if not cleans_up:  # set here: the reactor may be blocked
            for fatal in (signal.SIGINT, signal.SIGTERM):
                signal.signal(fatal, signal.SIG_DFL)
        reactor.callFromThread(cancel)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handle)
    try:
        yield received
    finally:
        for number in handled:
            signal.signal(number, before[number])


def _report(error: Exception, screen: Screen) -> int:
    """Print why work has ended, and return the exit status for it."""
    match error:
        case CancelledError():
            words, status = "interrupted", INTERRUPTED
        case Unavailable(is_refused_connection=True):
            words, status = f"{error}; {_START_DAEMON}", UNREACHABLE
        case Unavailable():
            words, status = str(error), UNREACHABLE
        case Refused(status=401):
            words, status = (
                f"{error}; name its file by `--token-file`, or set {TOKEN_VARIABLE}",
                WRONG,
            )
        case Refused():
            words, status = str(error), WRONG
        case OutputError():
            words, status = str(error), UNREAD if error.is_broken_pipe else WRONG
        case OSError():  # of a file of the submission
            words, status = f"{error.filename}: {error.strerror}", WRONG
        case _:
            raise error
    if status != UNREAD:
        screen.show_message(words, "red")
    return status
