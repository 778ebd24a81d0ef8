"""What the client commands share: options, signals and exit statuses."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import attrs
import click

from tawebeval.cli.output import OutputError, Screen, draw_bar, wants_colour
from tawebeval.client import Client, ClientError, Refused, Unavailable
from tawebeval.client.settings import normalize_server_url
from tawebeval.client.http import is_loopback
from tawebeval.core.backoff import Backoff
from tawebeval.errors import ConfigurationError, format_size
from tawebeval.linux.ownership import read_secret_file

GOOD, FAILED, WRONG, UNREACHABLE = 0, 1, 2, 3
INTERRUPTED, UNREAD = 130, 141
"""The exit statuses; these two are those of a shell for SIGINT and SIGPIPE."""

TOKEN_VARIABLE = "TAWEBEVAL_TOKEN"  # noqa: S105  (the name of a variable)

_UPLOAD_SECONDS = 1.0  # of an upload without a progress bar
_BAR_SECONDS = 0.1  # between two updates of the bar

_START_DAEMON = (
    "is the daemon running? Start it with `tawebeval serve`, or name another with `--server`"
)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_ONE_ATTEMPT = Backoff(max_attempts=1, first_delay=1, longest_delay=1, longest_retry_after=1)

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

    def make_client(self, screen: Screen) -> Client:
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
            told=notes.on_retry,
            answered=notes.on_recovery,
            uploaded=UploadBar(screen).show,
        )

    def make_quiet_client(self) -> Client:
        """Return a client that shows nothing, and makes one attempt of each request."""
        return Client(self.url, self.token, asking=_ONE_ATTEMPT)


@attrs.define
class UploadBar:
    """The progress of an upload that takes longer than a second; only a terminal shows it."""

    _screen: Screen
    _get_time: Callable[[], float] = time.monotonic
    _next: float | None = None  # the time before which nothing is shown

    def show(self, sent: int, total: int) -> None:
        """Show the progress in bytes."""
        now = self._get_time()
        if self._next is None or sent == total:
            # The next attempt begins a new upload.
            self._next = None if sent == total else now + _UPLOAD_SECONDS
        elif now >= self._next:
            self._next = now + _BAR_SECONDS
            sizes = f"{format_size(sent)} of {format_size(total)}"
            self._screen.show_progress(
                f"uploading {draw_bar(sent, total)} {100 * sent // total}% ({sizes})"
            )


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


@attrs.frozen
class CommandContext:
    """What a client command works with."""

    server: ServerAccess
    client: Client
    screen: Screen
    interruptions: Interruptions


def run_with_client(
    server: ServerAccess, screen: Screen, work: Callable[[CommandContext], int]
) -> NoReturn:
    """Exit with the status that `work` returns; print why it failed."""
    with Interruptions() as interruptions:
        try:
            with server.make_client(screen) as client:
                status = work(CommandContext(server, client, screen, interruptions))
        except (ClientError, Interrupted, OutputError, OSError) as error:
            status = report_failure(error, screen)
    raise SystemExit(find_exit_status(status, interruptions.received))


class Interrupted(Exception):
    """A signal has ended what the command was doing."""


@attrs.define
class Interruptions:
    """A context in which SIGINT, SIGTERM and SIGHUP raise Interrupted, once.

    The next SIGINT or SIGTERM ends the process. A further SIGHUP has no effect, as the shell and
    the kernel may both send one.
    """

    received: list[int] = attrs.field(factory=list)
    _is_held: bool = False
    _is_pending: bool = False
    _restored: ExitStack = attrs.field(factory=ExitStack)

    def __enter__(self) -> Interruptions:
        self._restored.enter_context(handle_signals(self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._restored.close()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Raise Interrupted only at the end of this block, for a signal that comes meanwhile."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_pending:
            self._is_pending = False
            raise Interrupted

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if number == signal.SIGHUP and len(self.received) > 1:
            return
        for fatal in (signal.SIGINT, signal.SIGTERM):
            signal.signal(fatal, signal.SIG_DFL)
        if not self._is_held:
            raise Interrupted
        self._is_pending = True


@contextmanager
def handle_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have SIGINT, SIGTERM and SIGHUP call `handle`.

    A signal that was ignored before, as by nohup(1), stays ignored.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def find_exit_status(status: int, received: Sequence[int]) -> int:
    """Return the exit status of a command that has received signals: `status` after Ctrl-C."""
    return 128 + received[0] if received and received[0] != signal.SIGINT else status


def report_failure(error: Exception, screen: Screen) -> int:
    """Print why work has ended, and return the exit status for it."""
    match error:
        case Interrupted():
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
