"""What the client commands share: signals, exit statuses, and the client."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import attrs
import click

from tawebeval.cli.output import Screen, StdoutWriteError, should_use_colour
from tawebeval.errors import ConfigurationError
from tawebeval_client import ClientError, Refused, Unavailable
from tawebeval_client.http import is_loopback

if TYPE_CHECKING:
    from tawebeval_client import Client

GOOD, FAILED, WRONG, UNREACHABLE, NOT_ACCEPTED = 0, 1, 2, 3, 4
INTERRUPTED, UNREAD = 130, 141
"""The exit statuses; these two are those of a shell for SIGINT and SIGPIPE."""


TOKEN_VARIABLE = "TAWEBEVAL_TOKEN"  # noqa: S105  (the name of a variable)

_START_DAEMON = (
    "is the daemon running? Start it with `tawebeval serve`, or name another with `--server`"
)

_GIVE_TOKEN = (
    f"run `tawebeval login`, name the file of the token by `--token-file`, or set {TOKEN_VARIABLE}"
)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@attrs.frozen
class ServerAccess:
    """The URL of a server, and the token for it, None without one.

    `server_options` are those of the command line that named them.
    """

    url: str
    token: str | None = attrs.field(repr=False, default=None)
    server_options: tuple[str, ...] = ()

    def make_client(self, screen: Screen) -> Client:
        """Return a client that shows its retries on `screen`; warn of a token in clear text."""
        from tawebeval_client import Client  # late: help and `try` do without httpx

        if self.token and self.url.startswith("http:") and not is_loopback(self.url):
            screen.show_message(
                f"warning: {self.url} gets the token in clear text; try"
                f" https{self.url.removeprefix('http')}",
                "yellow",
            )
        notes = RetryMessages(screen)
        return Client(self.url, self.token, on_retry=notes.on_retry, on_recovery=notes.on_recovery)


@attrs.define
class RetryMessages:
    """Messages about the retries of a client: the first of each outage."""

    _screen: Screen
    _waiting: bool = False

    def on_retry(self, why: str, seconds: float) -> None:
        """Show why a request has failed, unless the outage was shown before."""
        if not self._waiting:
            self._screen.show_message(f"{why}; retrying")
        self._waiting = True

    def on_recovery(self) -> None:
        """Show on a terminal that the server has answered again."""
        if self._waiting and self._screen.can_show_progress:
            self._screen.show_message("the server answers again")
        self._waiting = False


def make_screen(**settings: Any) -> Screen:
    """Return the screen on stdout and stderr, with these attributes. Raises UsageError."""
    if sys.stdout is None:
        raise click.UsageError("stdout is closed; to discard the output, redirect it: >/dev/null")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        # Programs get UTF-8 whatever the locale is.
        encoding = stream.encoding if stream.isatty() else "utf-8"
        stream.reconfigure(encoding=encoding, errors="replace")  # type: ignore[union-attr]
    return Screen(sys.stdout, sys.stderr, should_use_colour(sys.stderr, os.environ), **settings)


@attrs.define
class CommandContext:
    """What a client command works with, and its exit status."""

    server: ServerAccess
    client: Client
    screen: Screen
    interrupt_handler: InterruptHandler
    exit_status: int = GOOD


@contextmanager
def open_command_context(server: ServerAccess, screen: Screen) -> Iterator[CommandContext]:
    """Yield the context of a command; exit with its status at the end, and print why it failed."""
    interrupt_handler = InterruptHandler()
    with handle_signals(interrupt_handler.on_signal):
        try:
            with server.make_client(screen) as client:
                context = CommandContext(server, client, screen, interrupt_handler)
                yield context
                status = context.exit_status
        except (ClientError, ConfigurationError, Interrupted, StdoutWriteError, OSError) as error:
            status = report_failure(error, screen)
    raise SystemExit(compute_exit_status(status, interrupt_handler.received_signals))


class Interrupted(Exception):
    """A signal has ended what the command was doing."""


@attrs.define
class InterruptHandler:
    """Handler of SIGINT, SIGTERM and SIGHUP that raises Interrupted, once.

    The next SIGINT or SIGTERM ends the process. A further SIGHUP has no effect, as the shell and
    the kernel may both send one.
    """

    received_signals: list[int] = attrs.field(factory=list)
    _is_held: bool = False
    _is_pending: bool = False

    @contextmanager
    def defer_interrupt(self) -> Iterator[None]:
        """Raise Interrupted only at the end of this block, for a signal that comes meanwhile."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_pending:
            self._is_pending = False
            raise Interrupted

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Raise Interrupted for the first signal. To be called by `handle_signals`."""
        self.received_signals.append(number)
        if number == signal.SIGHUP and len(self.received_signals) > 1:
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


def compute_exit_status(status: int, received: Sequence[int]) -> int:
    """Return the exit status of a command that has received signals: `status` after Ctrl-C."""
    return 128 + received[0] if received and received[0] != signal.SIGINT else status


def report_failure(error: Exception, screen: Screen) -> int:
    """Print why work has ended, and return the exit status for it."""
    words, status = str(error), WRONG
    match error:
        case Interrupted():
            words, status = "interrupted", INTERRUPTED
        case Unavailable():
            words += f"; {_START_DAEMON}" if error.is_refused_connection else ""
            status = UNREACHABLE
        case Refused(status=401):
            words += f"; {_GIVE_TOKEN}"
        case StdoutWriteError(is_broken_pipe=True):
            return UNREAD
        case Refused() | StdoutWriteError() | ConfigurationError():
            pass
        case OSError():  # of a file of the submission
            words = f"{error.filename}: {error.strerror}"
        case _:
            raise error
    screen.show_message(words, "red")
    return status
