"""Completion of names that a server or the file of servers knows.

The shell waits for the answer, so it has 1.5 seconds, and every failure is silent. No token
is sent in clear text over a network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from threading import Thread
from typing import Any, TypeAlias

import click
from click.shell_completion import CompletionItem

from tawebeval.cli.runtime import find_server
from tawebeval.cli.servers import locate_server_file, read_servers

_TIMEOUT = 1.5  # seconds
_MAX_ENTRIES = 1000  # of a list of the server
_MAX_ITEMS = 100
_MAX_HELP = 60  # characters
_NAME = re.compile("[A-Za-z0-9._-]{1,100}")
# Shells write the help to the terminal.
_UNSAFE = re.compile(r"[^\w .,:;()+/=-]+")

NameAndHelp: TypeAlias = tuple[str, str]
"""A name, and what it stands for."""

ShellCompleter: TypeAlias = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _complete(find: Callable[[click.Context], Iterable[NameAndHelp]]) -> ShellCompleter:
    """Return the callback of a parameter whose names `find` yields."""

    def complete(
        context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        items: list[CompletionItem] = []

        def collect() -> None:
            with suppress(Exception):  # the prompt of a shell is no place for a message
                items.extend(islice(_make_items(find(context), incomplete), _MAX_ITEMS))

        thread = Thread(target=collect, daemon=True)
        thread.start()
        thread.join(_TIMEOUT)
        return list(items)

    return complete


def _make_items(found: Iterable[NameAndHelp], incomplete: str) -> Iterator[CompletionItem]:
    """Yield items without a character that a shell or a terminal may act on."""
    for name, help_ in found:
        if name.startswith(incomplete) and _NAME.fullmatch(name):
            words = " ".join(_UNSAFE.sub(" ", help_).split())
            yield CompletionItem(name, help=words[:_MAX_HELP] or None)


def _request(context: click.Context, name: str) -> Iterator[dict[str, Any]]:
    """Yield what a method of the client returns or yields for the server of a command."""
    options = context.params
    server = find_server(context, options.get("server"), options.get("token_file"))
    if server.sends_token_unencrypted:
        return  # a command warns of it, and the shell asks without being told to
    with server.make_quiet_client() as client:
        yield from islice(getattr(client, name)(), _MAX_ENTRIES)


def _find_problems(context: click.Context) -> Iterator[NameAndHelp]:
    for one in _request(context, "problems"):
        yield one["name"], str(one.get("title", ""))


def _find_environments(context: click.Context) -> Iterator[NameAndHelp]:
    for one in _request(context, "environments"):
        yield one["name"], str(one.get("description", ""))


def _find_evaluations(context: click.Context) -> Iterator[NameAndHelp]:
    """Yield the evaluations, the newest first."""
    found = list(_request(context, "evaluations"))
    for one in sorted(found, key=lambda one: one["created"], reverse=True):
        yield one["evaluation_id"], f"{one['state']} {one.get('problem') or ''}"


def _find_servers(context: click.Context) -> Iterator[NameAndHelp]:
    for name, server in sorted(read_servers(locate_server_file(os.environ)).servers.items()):
        yield name, server.url


complete_problem = _complete(_find_problems)
complete_environment = _complete(_find_environments)
complete_evaluation = _complete(_find_evaluations)
complete_server = _complete(_find_servers)
