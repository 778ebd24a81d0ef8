"""The options `--server` and `--token-file` of the client commands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tawebeval.cli.completion import complete_server
from tawebeval.cli.runtime import DEFAULT_SERVER, TOKEN_VARIABLE, find_server


def add_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options `--server` and `--token-file`, as its argument `server`."""

    @functools.wraps(command)
    def with_server(server: str | None, token_file: Path | None, **others: Any) -> None:
        command(server=find_server(click.get_current_context(), server, token_file), **others)

    for option in (
        click.option(
            "--server",
            envvar="TAWEBEVAL_SERVER",
            show_envvar=True,
            metavar="URL|NAME",
            shell_complete=complete_server,
            help="Send requests to this server: its URL, or its name in `tawebeval servers`. By"
            f" default the server of the last login, otherwise {DEFAULT_SERVER}.",
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
