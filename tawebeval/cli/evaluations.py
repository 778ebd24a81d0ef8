"""`tawebeval follow`, `status`, `cancel` and `list`."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import click
from twisted.internet.defer import CancelledError

from tawebeval.cli.evaluate import EVENTS_OPTION, FILES_OPTION, parse_labels
from tawebeval.cli.follow import DownloadDirectory, EvaluationReader
from tawebeval.cli.output import escape_control_characters
from tawebeval.cli.runtime import (
    GOOD,
    UTF8_ARGUMENT,
    ServerAccess,
    add_server_options,
    make_screen,
    run_with_client,
)
from tawebeval.client import Client, EvaluationGone, Refused, UnknownEvaluation
from tawebeval.client.events import split_cursor
from tawebeval.core.states import SHOWN_STATES

JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
_ROW = "{:<40}  {:<24}  {:>6}  {}"
IDENTIFIER_ARGUMENT = click.argument("identifier", metavar="ID", type=UTF8_ARGUMENT)


def _check_cursor(context: click.Context, _: click.Parameter, cursor: str | None) -> str | None:
    try:
        split_cursor(cursor)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return cursor


@click.command()
@IDENTIFIER_ARGUMENT
@click.option(
    "--after",
    "cursor",
    metavar="CURSOR",
    type=UTF8_ARGUMENT,
    callback=_check_cursor,
    help="Start after this cursor, not at the first event.",
)
@FILES_OPTION
@EVENTS_OPTION
@add_server_options
def follow(
    identifier: str,
    cursor: str | None,
    folder: DownloadDirectory | None,
    lines: bool,
    server: str,
    token: str | None,
) -> None:
    """Show the output of an evaluation that was submitted before.

    The server discards the events that a client has read. The command says so and shows the rest;
    `tawebeval status` shows how many events are discarded. Ctrl-C stops following and prints the
    command that continues; the evaluation goes on.

    The exit status is that of `tawebeval evaluate`: 1 if the server has lost the evaluation or a
    client has read it to the end, 2 if the server never had it.

    \b
    Submit now, follow later:
      ID=$(tawebeval evaluate --detach --evaluator ./evaluate solution.py)
      tawebeval follow $ID
    """  # noqa: D301
    screen = make_screen(lines=lines)

    async def work(client: Client, reactor: Any) -> int:
        reader = EvaluationReader(client, identifier, screen, cursor)
        try:
            with suppress(Refused):  # reported below
                # Unlike a request for events, this one gives up soon on a stopped server.
                await client.status(identifier)
            return await reader.follow_evaluation(reactor, folder)
        except CancelledError:
            screen.show_message(f"continue here with `{reader.resume_command}`")
            raise

    run_with_client(ServerAccess(server, token), screen, work)


@click.command()
@IDENTIFIER_ARGUMENT
@JSON_OPTION
@add_server_options
def status(identifier: str, as_json: bool, server: str, token: str | None) -> None:
    """Show the status of an evaluation.

    The status includes the state, times, the place in the queue, the seed, the resources used, the
    exit status, the error and the last 8 KiB of stderr.

    \b
      tawebeval status $ID
      tawebeval status --json $ID | jq .usage
    """  # noqa: D301

    async def work(client: Client, reactor: Any) -> int:
        document = await client.status(identifier)
        screen.print_text(dump_json(document) if as_json else format_status(document))
        return GOOD

    screen = make_screen()
    run_with_client(ServerAccess(server, token), screen, work)


@click.command()
@IDENTIFIER_ARGUMENT
@add_server_options
def cancel(identifier: str, server: str, token: str | None) -> None:
    """Cancel an evaluation and wait until its processes are dead.

    An evaluation that has ended does not change. Its output can still be read.
    """

    async def work(client: Client, reactor: Any) -> int:
        await client.cancel(identifier)
        return GOOD

    run_with_client(ServerAccess(server, token), make_screen(), work)


@click.command("list")
@click.option(
    "--state",
    type=click.Choice(SHOWN_STATES),
    help="List only evaluations in this state.",
)
@click.option(
    "--label",
    "metadata",
    metavar="NAME=VALUE",
    multiple=True,
    type=UTF8_ARGUMENT,
    callback=parse_labels,
    help="List only evaluations with this label.",
)
@JSON_OPTION
@add_server_options
def list_(as_json: bool, server: str, token: str | None, **wanted: Any) -> None:
    """List your evaluations that the server still keeps.

    \b
      tawebeval list
      tawebeval list --state failed --label contest=finals
      tawebeval list --json | jq -r '.[] | select(.state == "running").evaluation_id'
    """  # noqa: D301

    async def work(client: Client, reactor: Any) -> int:
        found = [evaluation async for evaluation in client.evaluations(**wanted)]
        if as_json:
            screen.print_text(dump_json(found))
            return GOOD
        screen.print_text(_ROW.format("ID", "VERDICT", "AGE", "PROBLEM"))
        for one in found:
            try:
                document = await client.status(one["evaluation_id"])
            except (EvaluationGone, UnknownEvaluation):  # since the list was made
                continue
            screen.print_text(format_row(document, datetime.now(UTC)))
        return GOOD

    screen = make_screen()
    run_with_client(ServerAccess(server, token), screen, work)


def format_row(document: dict[str, Any], now: datetime) -> str:
    """Return the line of a status document in a list."""
    created = datetime.fromisoformat(document["created"])
    repository = str(document.get("repository", "")).rstrip("/").removesuffix(".git")
    place = (repository.rpartition("/")[2], document.get("directory"))
    state, error = document["state"], document.get("error")
    results = summarize_results(document.get("results"))
    verdict = state
    if error:
        verdict = f"{state}: {error['reason']}" if error["reason"] != state else state
    elif results:
        verdict = f"{state}: {results[0]}"
    age = format_age((now - created).total_seconds())
    problem = "/".join(str(part) for part in place if part)
    return escape_control_characters(_ROW.format(document["evaluation_id"], verdict, age, problem))


def summarize_results(results: dict[str, Any] | None) -> list[str]:
    """Return the results of a status document in a few words each, the most telling first."""
    if results is None:
        return []
    found = []
    if (score := results["score"]) is not None:
        maximum = "" if score["maximum"] is None else f"/{score['maximum']}"
        found.append(f"score {score['score']}{maximum}")
    if goals := results["goals"]:
        more = "+" if results["goals_omitted"] else ""
        found.append(f"{sum(goals.values())}/{len(goals)}{more} goals")
    if cases := results["cases"]:
        found.append(f"{cases.get('accepted', 0)}/{sum(cases.values())} cases")
    if (progress := results["progress"]) is not None:
        found.append(f"progress {progress['done']}/{progress['total']}")
    return found


def format_age(seconds: float) -> str:
    """Return a time in the largest unit of which it has one, such as `5 min`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def dump_json(value: Any) -> str:
    """Return a value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def format_status(document: dict[str, Any]) -> str:
    """Return the lines of a status document, without empty members."""
    lines = []
    for name, value in document.items():
        if value is None or value == "":
            continue
        if name == "results":
            value = ", ".join(summarize_results(value))
        elif isinstance(value, dict):
            value = ", ".join(f"{k}: {v}" for k, v in value.items() if v is not None)
        first, *others = str(value).rstrip("\n").split("\n")
        lines.append(f"{name:<15} {first}")
        lines += [f"{'':<15} {line}" for line in others]
    return escape_control_characters("\n".join(lines))
