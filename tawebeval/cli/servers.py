"""Which server a command asks, and `tawebeval login` and `logout`.

`tawebeval login` stores servers with their tokens in a file that only its owner can read. A command
asks the server of its option `--server`, of the environment, or of the last login.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from http import HTTPStatus
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from tawebeval.cli.runtime import (
    TOKEN_VARIABLE,
    ServerAccess,
    make_screen,
    open_command_context,
    report_failure,
)
from tawebeval.errors import ConfigurationError
from tawebeval.linux.filetree import replace_private_file
from tawebeval.linux.privileges import get_user_name, parse_text_file
from tawebeval_client import Forbidden
from tawebeval_client.operations import normalize_server_url

_DEFAULT_SERVER = "http://127.0.0.1:8080"
_OTHERS_MODE = 0o077
_MAX_TOKEN = 4096  # characters


class StoredServers(msgspec.Struct, omit_defaults=True):
    """The token of each stored server by its URL, empty for a server that needs none.

    `default_url` is the URL that commands use without `--server`.
    """

    tokens: dict[str, str] = {}
    default_url: str | None = msgspec.field(default=None, name="default")


def locate_stored_servers(environment: Mapping[str, str]) -> Path:
    """Return the path of the file. Raises: ConfigurationError."""
    folder = environment.get("XDG_CONFIG_HOME", "")
    if not folder.startswith("/"):  # as the XDG Base Directory Specification says
        try:
            folder = str(Path.home() / ".config")
        except RuntimeError:
            raise ConfigurationError("no home directory is known; set HOME") from None
    return Path(folder, "tawebeval", "servers.json")


def read_stored_servers(path: Path) -> StoredServers:
    """Return the servers in a file; none if it does not exist. Blocks.

    Raises: ConfigurationError, also if the file belongs to another user, who could choose the
    server that gets the submissions, or if other users have access to it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read()
    except FileNotFoundError:
        return StoredServers()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot read the file: {error.strerror}") from None
    if status.st_uid != os.geteuid():
        owner, user = get_user_name(status.st_uid), get_user_name(os.geteuid())
        raise ConfigurationError(
            f"{path}: the file belongs to {owner}, and the command runs as {user}",
            f"remove the file, or set XDG_CONFIG_HOME to a directory of {user}",
        )
    mode = stat.S_IMODE(status.st_mode)
    if excess := mode & _OTHERS_MODE:
        raise ConfigurationError(
            f"{path}: other users have access to the file and its tokens"
            f" (mode {mode:04o}, {excess:03o} is too much)",
            f"chmod 600 {path}",
        )
    try:
        return msgspec.json.decode(content, type=StoredServers)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path}: {error}", "mend or remove the file, and run `tawebeval login` again"
        ) from None


@contextmanager
def edit_stored_servers(path: Path) -> Iterator[StoredServers]:
    """Yield the servers in a file, and write them at the end of the block. Blocks.

    Another process waits until then. Raises: ConfigurationError.
    """
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as opened:
            folder = os.open(target.parent, os.O_RDONLY)
            opened.callback(os.close, folder)
            with suppress(OSError):  # NFS locks no directories
                fcntl.flock(folder, fcntl.LOCK_EX)
            servers = read_stored_servers(path)
            yield servers
            content = msgspec.json.format(msgspec.json.encode(servers), indent=2)
            replace_private_file(target, content + b"\n")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot write the file: {error.strerror}") from None


def add_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command `--server` and `--token-file`, and its argument `context` for the server.

    It has not itself the options `--events` and `--exit-status`, which are the screen's.
    """

    @wraps(command)
    def with_server(
        server: str | None,
        token_file: Path | None,
        *,
        lines: bool = False,
        exits_by_verdict: bool = False,
        **others: Any,
    ) -> None:
        access = find_server_access(click.get_current_context(), server, token_file)
        screen = make_screen(lines=lines, exits_by_verdict=exits_by_verdict)
        with open_command_context(access, screen) as context:
            command(context=context, **others)

    for option in (
        click.option(
            "--server",
            envvar="TAWEBEVAL_SERVER",
            show_envvar=True,
            metavar="URL",
            help="Send requests to this server. By default the server of the last login, otherwise"
            f" {_DEFAULT_SERVER}.",
        ),
        click.option(
            "--token-file",
            envvar="TAWEBEVAL_TOKEN_FILE",
            show_envvar=True,
            type=click.Path(path_type=Path, dir_okay=False),
            help=f"Read the token from this file. {TOKEN_VARIABLE} may hold the token itself.",
        ),
    ):
        with_server = option(with_server)
    return with_server


def find_server_access(
    context: click.Context, server: str | None, token_file: Path | None
) -> ServerAccess:
    """Return the server of the options, and the token for it. Raises BadParameter. Blocks.

    The default server gets its stored token, unless the command line names a file. A URL gets the
    token of the environment, or else the one that is stored for this URL.
    """
    given: dict[str, str] = {}
    for name, value in (("server", server), ("token_file", token_file)):
        if value and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            given[f"--{name.replace('_', '-')}"] = str(value)
    try:
        if server:
            url = normalize_server_url(server)
            token = _read_token(token_file)
            if not token:
                token = read_stored_servers(locate_stored_servers(os.environ)).tokens.get(url, "")
        else:
            stored = read_stored_servers(locate_stored_servers(os.environ))
            url = normalize_server_url(stored.default_url or _DEFAULT_SERVER)
            token = "" if "--token-file" in given else stored.tokens.get(url, "")
            token = token or _read_token(token_file)
    except (ConfigurationError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--server") from None
    token = _check_token(token, url)
    return ServerAccess(url, token or None, tuple(itertools.chain.from_iterable(given.items())))


def _read_token(path: Path | None) -> str:
    """Return the token in a file, or without a path that in the environment, perhaps empty."""
    if path is None:
        return _check_token(os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE)
    try:
        token = parse_text_file(path, str.strip)
    except ConfigurationError as error:
        raise click.BadParameter(str(error), param_hint="--token-file") from None
    if not token:
        raise click.BadParameter(f"{path} has no token; put the token alone into it")
    return _check_token(token, str(path))


def _check_token(token: str, where: str) -> str:
    """Return a token. Raises BadParameter if it cannot be one."""
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise click.BadParameter(f"{where}: a token is one word of ASCII characters without spaces")
    return token


def _parse_url_argument(context: click.Context, _: click.Parameter, url: str | None) -> str | None:
    try:
        return url and normalize_server_url(url if "://" in url else f"https://{url}")
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("url", callback=_parse_url_argument)
def login(url: str) -> None:
    """Store a server and your token for it.

    The command asks for the token without showing it, or reads the token from stdin if stdin is
    not a terminal. It checks the token with the server, and stores it in
    ~/.config/tawebeval/servers.json, which only you can read. The server becomes the default of
    all commands.

    \b
      tawebeval login https://judge.example.org
      tawebeval login https://judge.example.org <token
    """  # noqa: D301
    screen = make_screen()
    token = _ask_token()
    with open_command_context(ServerAccess(url, token or None), screen) as context:
        try:
            next(iter(context.client.evaluations()), None)
        except Forbidden as error:  # a token may be valid and not permit a list
            if error.status == HTTPStatus.UNAUTHORIZED:
                raise
        path = locate_stored_servers(os.environ)
        with edit_stored_servers(path) as stored:
            stored.tokens[url] = token
            stored.default_url = url
        kept = f"; the token is in {path}" if token else ""
        screen.show_message(f"{url} is the default server now{kept}", "green")


def _ask_token() -> str:
    """Return the token that the user types without an echo, or that stdin has, perhaps empty."""
    if sys.stdin is None:
        raise click.UsageError("stdin is closed; write the token to it")
    if sys.stdin.isatty():
        token = click.prompt(
            "Token (empty if the server needs none)",
            default="",
            show_default=False,
            hide_input=True,
            err=True,
        )
    else:
        token = sys.stdin.buffer.readline(_MAX_TOKEN + 2).decode("utf-8", "replace").strip()
    if len(token) > _MAX_TOKEN:
        raise click.UsageError(f"a token has at most {_MAX_TOKEN} characters")
    return _check_token(token.strip(), "token")


@click.command()
@click.argument("url", required=False, callback=_parse_url_argument)
def logout(url: str | None) -> None:
    """Remove a stored server and its token.

    Without URL, the command removes the default server. The server still accepts the token: only
    its operator can revoke a token.
    """
    screen = make_screen()
    try:
        path = locate_stored_servers(os.environ)
        stored = read_stored_servers(path)
        removed = url or stored.default_url
        if removed is None:
            raise ConfigurationError("there is no default server; name one")
        if removed not in stored.tokens:
            known = ", ".join(sorted(stored.tokens)) or "none"
            raise ConfigurationError(f"no login at {removed} is stored; stored are: {known}")
        with edit_stored_servers(path) as stored:
            stored.tokens.pop(removed, None)
            if stored.default_url == removed:
                stored.default_url = None
    except ConfigurationError as error:
        raise SystemExit(report_failure(error, screen)) from None
    screen.show_message(f"removed {removed}")
