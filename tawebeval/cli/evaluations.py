"""`tawebeval follow`, `status`, `cancel` and `list`."""

from __future__ import annotations

import json
from typing import Any

import click
from twisted.internet.defer import CancelledError

from tawebeval.cli.evaluate import FILES, LINES
from tawebeval.cli.follow import Reading
from tawebeval.cli.output import escaped
from tawebeval.cli.runtime import GOOD, Server, asks_server, make_screen, run
from tawebeval.cli.saving import Folder
from tawebeval.cli.words import TEXT
from tawebeval.client import Client
from tawebeval.client.events import split_cursor

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
IDENTIFIER = click.argument("identifier", metavar="ID", type=TEXT)


def _cursor(context: click.Context, _: click.Parameter, cursor: str | None) -> str | None:
    try:
        split_cursor(cursor)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return cursor


@click.command()
@IDENTIFIER
@click.option(
    "--after",
    "cursor",
    metavar="CURSOR",
    type=TEXT,
    callback=_cursor,
    help="Where to go on, instead of at the beginning.",
)
@FILES
@LINES
@asks_server
def follow(
    identifier: str,
    cursor: str | None,
    folder: Folder | None,
    lines: bool,
    server: str,
    token: str | None,
) -> None:
    """Show the events of the evaluation ID, as they come.

    What was read once, and acknowledged by reading on, is not there any more: that is said, and
    what is there is shown; `tawebeval status` tells how much is discarded. Ctrl-C stops following,
    says where it was, and the evaluation goes on.

    The exit status is that of `tawebeval evaluate`. So it is 1 where nothing is kept of the
    evaluation, because the server has lost it or it was read to its end before, and 2 where the
    server has never had such a one.

    \b
      ID=$(tawebeval evaluate --detach --evaluator ./evaluate solution.py)
      tawebeval follow $ID
    """  # noqa: D301
    screen = make_screen(lines=lines)

    async def work(client: Client, reactor: Any) -> int:
        reading = Reading(client, identifier, screen, cursor)
        try:
            return await reading.follow(reactor, folder)
        except CancelledError:
            screen.note(f"`{reading.resumption}` goes on here")
            raise

    run(Server(server, token), screen, work)


@click.command()
@IDENTIFIER
@JSON
@asks_server
def status(identifier: str, as_json: bool, server: str, token: str | None) -> None:
    """Show how the evaluation ID is doing.

    \b
      tawebeval status $ID
      tawebeval status --json $ID | jq .usage
    """  # noqa: D301

    async def work(client: Client, reactor: Any) -> int:
        document = await client.status(identifier)
        screen.print(_dump(document) if as_json else table(document))
        return GOOD

    screen = make_screen()
    run(Server(server, token), screen, work)


@click.command()
@IDENTIFIER
@asks_server
def cancel(identifier: str, server: str, token: str | None) -> None:
    """End the evaluation ID; return when nothing of it runs.

    One that has ended stays as it is. What was printed can still be read.
    """

    async def work(client: Client, reactor: Any) -> int:
        await client.cancel(identifier)
        return GOOD

    run(Server(server, token), make_screen(), work)


@click.command("list")
@JSON
@asks_server
def list_(as_json: bool, server: str, token: str | None) -> None:
    """List your own evaluations that the server has not forgotten.

    \b
      tawebeval list
      tawebeval list --json | jq -r '.[] | select(.state == "running").evaluation_id'
    """  # noqa: D301

    async def work(client: Client, reactor: Any) -> int:
        found = [evaluation async for evaluation in client.evaluations()]
        if as_json:
            screen.print(_dump(found))
        for one in () if as_json else found:
            screen.print(escaped("{evaluation_id}  {state:<9}  {created}".format(**one)))
        return GOOD

    screen = make_screen()
    run(Server(server, token), screen, work)


def _dump(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def table(document: dict[str, Any]) -> str:
    """Return a status as lines; what is null, and so not known yet, is left out."""
    lines = []
    for name, value in document.items():
        if value is None or value == "":
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{k}: {v}" for k, v in value.items() if v is not None)
        first, *others = str(value).rstrip("\n").split("\n")
        lines.append(f"{name:<15} {first}")
        lines += [f"{'':<15} {line}" for line in others]
    return escaped("\n".join(lines))
