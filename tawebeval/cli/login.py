"""`tawebeval login`, `logout` and `servers`: several servers with their tokens."""

from __future__ import annotations

import os
import re
import sys
from http.client import UNAUTHORIZED
from urllib.parse import urlsplit

import click

from tawebeval.cli.completion import complete_server
from tawebeval.cli.json_fields import JsonFields, add_json_option, print_list
from tawebeval.cli.output import Screen
from tawebeval.cli.runtime import (
    CommandContext,
    ServerAccess,
    check_server_url,
    check_token,
    make_screen,
    run_with_client,
    run_without_server,
)
from tawebeval.cli.servers import (
    SERVER_NAME_PATTERN,
    Keyring,
    StoredServer,
    edit_stored_servers,
    locate_server_file,
    read_servers,
)
from tawebeval.client import Forbidden
from tawebeval.errors import ConfigurationError

_MAX_TOKEN = 4096  # characters
_FIELDS = ("name", "url", "token", "default")
_HEADS = ("", "NAME", "TOKEN", "URL")


def _check_name(context: click.Context, _: click.Parameter, name: str | None) -> str | None:
    if name is not None and not SERVER_NAME_PATTERN.fullmatch(name):
        raise click.BadParameter(
            f"{name!r} cannot be a name; use up to 64 of the characters A-Z a-z 0-9 . _ -"
        )
    return name


def _check_url(context: click.Context, _: click.Parameter, url: str) -> str:
    try:
        return check_server_url(url if "://" in url else f"https://{url}")
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("url", callback=_check_url)
@click.option(
    "--name",
    metavar="NAME",
    callback=_check_name,
    help="Store the server under this name; by default, its host.",
)
@click.option(
    "--storage",
    type=click.Choice(["keyring", "file"]),
    help="Store the token there; by default in the keyring if there is one, otherwise in the file.",
)
def login(url: str, name: str | None, storage: str | None) -> None:
    """Store a server and your token for it.

    The command asks for the token without showing it, or reads the token from stdin if stdin is
    not a terminal. It checks the token with the server, and stores it in the keyring of your
    session (package keyring) or in ~/.config/tawebeval/servers.json, which only you can read. The
    server becomes the default of all commands.

    \b
      tawebeval login https://judge.example.org
      tawebeval login --name exam https://judge.example.org <token
      tawebeval list --server exam
    """  # noqa: D301
    screen = make_screen()
    name = name or derive_server_name(url)
    token = _ask_token()

    def work(context: CommandContext) -> None:
        try:
            next(iter(context.client.evaluations()), None)
        except Forbidden as error:  # a token may be valid and not permit a list
            if error.status == UNAUTHORIZED:
                raise
        place = store_login(name, StoredServer(url, token), storage, screen)
        kept = f"; the token is in {place}" if token else ""
        screen.show_message(f"stored {url} as {name}, the default server{kept}", "green")

    run_with_client(ServerAccess(url, token), screen, work)


def derive_server_name(url: str) -> str:
    """Return a name for the server of a URL: its host, and its port if one is given."""
    name = re.sub("[^A-Za-z0-9._-]", "-", urlsplit(url).netloc).strip("._-")
    return name[:64] or "server"


def _ask_token() -> str | None:
    """Return the token that the user types without an echo, or that stdin has; None for none."""
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
    return check_token(token.strip(), "token") or None


def store_login(name: str, server: StoredServer, storage: str | None, screen: Screen) -> str:
    """Store a server with its token as the default one, and return the place of the token.

    `storage` is "keyring" or "file"; None takes the keyring if there is one. Raises:
    ConfigurationError, OSError.
    """
    path = locate_server_file(os.environ)
    with edit_stored_servers(path) as stored:
        place = str(path)
        if server.token is not None and storage != "file":
            try:
                Keyring.open().store_token(name, server.url, server.token)
            except ConfigurationError as error:
                if storage == "keyring":
                    raise
                screen.show_message(
                    f"{error.problem.description}: the token goes to {path}", "yellow"
                )
            else:
                server, place = StoredServer(server.url, keyring=True), "the keyring"
        before = stored.servers.get(name)
        stored.servers[name] = server
        stored.default = name
    if before is not None and (before.url, before.keyring) != (server.url, server.keyring):
        remove_keyring_token(name, before, screen)
    return place


def remove_keyring_token(name: str, server: StoredServer, screen: Screen) -> None:
    """Remove the token of a server from the keyring, if it is there; show why it stays."""
    if server.keyring:
        try:
            Keyring.open().remove_token(name, server.url)
        except ConfigurationError as error:
            why = error.problem.description
            screen.show_message(f"a token stays in the keyring: {why}", "yellow")


@click.command()
@click.argument("name", required=False, shell_complete=complete_server)
def logout(name: str | None) -> None:
    """Remove a stored server and its token.

    Without NAME, the command removes the default server. The server still accepts the token: only
    its operator can revoke a token.
    """
    screen = make_screen()

    def work() -> None:
        with edit_stored_servers(locate_server_file(os.environ)) as stored:
            removed = name or stored.default
            if removed is None:
                raise ConfigurationError(
                    "there is no default server; name one of", "`tawebeval servers`"
                )
            server = stored.servers.pop(removed, None)
            if server is None:
                raise ConfigurationError(
                    f"no server is stored as {removed!r}", "`tawebeval servers` lists the servers"
                )
            if stored.default == removed:
                stored.default = None
        remove_keyring_token(removed, server, screen)
        screen.show_message(f"removed {removed} ({server.url})")

    run_without_server(screen, work)


@click.command()
@click.option(
    "--default",
    metavar="NAME",
    shell_complete=complete_server,
    help="Make this server the default of all commands.",
)
@add_json_option(_FIELDS)
def servers(default: str | None, json_fields: JsonFields | None) -> None:
    """List the servers of `tawebeval login`.

    A * marks the default server.

    \b
      tawebeval servers
      tawebeval servers --default exam
    """  # noqa: D301
    screen = make_screen()

    def work() -> None:
        path = locate_server_file(os.environ)
        if default is not None:
            with edit_stored_servers(path) as stored:
                if default not in stored.servers:
                    raise ConfigurationError(
                        f"no server is stored as {default!r}; name one of `tawebeval servers`"
                    )
                stored.default = default
            return
        stored = read_servers(path)
        found = [
            {"name": name, "url": one.url, "token": one.storage, "default": name == stored.default}
            for name, one in sorted(stored.servers.items())
        ]
        rows = [
            ("*" if one["default"] else "", one["name"], one["token"] or "none", one["url"])
            for one in found
        ]
        print_list(screen, found, json_fields, "{:<1} {:<24}  {:<8}  {}", [_HEADS, *rows])

    run_without_server(screen, work)
