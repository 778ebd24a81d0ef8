"""Commands that show evaluations, problems and environments of a server; `cancel`, `share`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import itemgetter
from typing import Any

import click

from tawebeval.cli.options import (
    IDENTIFIER_ARGUMENT,
    JSON_OPTION,
    UTF8_ARGUMENT,
    label_option,
    problem_option,
)
from tawebeval.cli.output import (
    escape_control_characters,
    escape_table_row,
    format_json,
    print_documents,
    summarize_results,
)
from tawebeval.cli.runtime import CommandContext
from tawebeval.cli.servers import add_server_options
from tawebeval.errors import format_size

_ROW = "{:<40}  {:<24}  {:>6}  {:<20.40}  {}"
_AGE = re.compile("([0-9]{1,9})(s|min|h|d)")
_SIZES = ("memory", "file_size", "disk", "output", "stderr", "peak_memory_bytes", "buffered_bytes")
STATES = ("queued", "fetching", "running", "finished", "failed", "cancelled")  # of --state
_DAY = 86400  # seconds
_AGE_UNITS = {"s": "seconds", "min": "minutes", "h": "hours", "d": "days"}


def _parse_time(context: click.Context, _: click.Parameter, given: str | None) -> datetime | None:
    """Return the time of --since or --until. Raises BadParameter."""
    if given is None:
        return None
    try:
        if age := _AGE.fullmatch(given):
            return datetime.now(UTC) - timedelta(**{_AGE_UNITS[age[2]]: int(age[1])})
        return datetime.fromisoformat(given).astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{given!r} is neither a time, such as 2026-11-20T20:00, nor an age, such as 30s,"
            " 10min, 2h or 7d"
        ) from None


_time_option = partial(click.option, metavar="TIME", callback=_parse_time)


@click.command()
@IDENTIFIER_ARGUMENT
@JSON_OPTION
@add_server_options
def status(identifier: str, as_json: bool, context: CommandContext) -> None:
    """Show the status of an evaluation.

    The status includes the state, times, the place in the queue, the seed, the resources used, the
    exit status, the error and the last 8 KiB of stderr. After a client has read the evaluation to
    its end, only a server with an archive has it.

    \b
      tawebeval status $ID
      tawebeval status --json $ID | jq .usage
    """  # noqa: D301
    _print_document(context, context.client.status(identifier), as_json)


@click.command()
@IDENTIFIER_ARGUMENT
@click.option("--days", type=click.IntRange(1), metavar="N", help="End the link after N days.")
@click.option("--revoke", is_flag=True, help="Revoke all links of the evaluation.")
@JSON_OPTION
@add_server_options
def share(
    identifier: str, days: int | None, revoke: bool, as_json: bool, context: CommandContext
) -> None:
    """Print a link by which anybody can read an evaluation.

    The page shows the evaluation at this URL, without a token. The link ends after 7 days, if the
    server permits as many.

    \b
      tawebeval share $ID
      tawebeval share --revoke $ID
    """  # noqa: D301
    if revoke:
        context.client.revoke_links(identifier)
        return
    made = context.client.make_link(identifier, lifetime=days and days * _DAY)
    url = f"{context.server.url}/#shared/{identifier}/{made['link']}"
    context.screen.print_text(format_json(made | {"url": url}) if as_json else url)
    context.screen.show_message(f"the link ends at {made['expires']}")


@click.command()
@IDENTIFIER_ARGUMENT
@add_server_options
def cancel(identifier: str, context: CommandContext) -> None:
    """Cancel an evaluation and wait until its processes are dead.

    An evaluation that has ended does not change. Its output can still be read.
    """
    context.client.cancel(identifier)


@click.command("list")
@click.option(
    "--state",
    type=click.Choice(STATES),
    help="List only evaluations in this state.",
)
@label_option(help="List only evaluations with this label.")
@_time_option(
    "--since",
    help="List only evaluations submitted at this time or later; a time, or an age such as 2h.",
)
@_time_option("--until", help="List only evaluations submitted before this time.")
@problem_option(help="List only evaluations for this problem.")
@JSON_OPTION
@add_server_options
def list_evaluations(as_json: bool, context: CommandContext, **wanted: Any) -> None:
    """List your evaluations that the server still keeps.

    If several daemons share the server's address, a message names those that do not answer.

    A TIME is of RFC 3339, in local time without a time zone, or an age: 30s, 10min, 2h or 7d.

    \b
      tawebeval list
      tawebeval list --state failed --label contest=finals --since 2h
      tawebeval list --since 2026-11-20T20:00 --until 2026-11-21
      tawebeval list --json |
          jq -r '.[] | select(.state == "running").evaluation_id'
    """  # noqa: D301
    away: list[str] = []
    screen = context.screen
    listed = context.client.evaluations(**wanted, on_unreachable_daemons=away.extend)
    found = sorted(listed, key=itemgetter("created"))  # those of several daemons
    if away:
        screen.show_message(
            f"the list is incomplete: no answer from {', '.join(away)}; try again later"
        )
    if as_json:
        screen.print_text(format_json(found))
        return
    screen.print_text(_ROW.format("ID", "VERDICT", "AGE", "PROBLEM", "LABELS"))
    for document in found:
        screen.print_text(format_evaluation_row(document, datetime.now(UTC)))


@click.command()
@click.argument("name", type=UTF8_ARGUMENT, required=False)
@JSON_OPTION
@add_server_options
def problems(name: str | None, as_json: bool, context: CommandContext) -> None:
    """List the problems that you may submit for, or show one.

    \b
      tawebeval problems
      tawebeval problems word_count
      tawebeval evaluate --problem word_count solution.awk
    """  # noqa: D301
    if name is None:
        found = list(context.client.problems())
        rows = [
            (one["name"], ", ".join(one["fields"]) or "any", format_problem_title(one))
            for one in found
        ]
        rows.insert(0, ("NAME", "FIELDS", "TITLE"))
        print_documents(context.screen, found, as_json, "{:<24}  {:<24}  {}", rows)
        return
    document = {**context.client.problem(name)}
    if not as_json:
        document.pop("pictures", None)  # up to 700 KB of base64
    _print_document(context, document, as_json)


@click.command()
@JSON_OPTION
@add_server_options
def environments(as_json: bool, context: CommandContext) -> None:
    """List the environments of the server that you may choose.

    \b
      tawebeval environments
      tawebeval evaluate --environment python3.14 --evaluator ./evaluate solution.py
    """  # noqa: D301
    found = context.client.environments()
    rows = [(one["name"], one.get("description") or "") for one in found]
    rows.insert(0, ("NAME", "DESCRIPTION"))
    print_documents(context.screen, found, as_json, "{:<24}  {}", rows)


@click.command()
@JSON_OPTION
@add_server_options
def whoami(as_json: bool, context: CommandContext) -> None:
    """Show the caller of your token, and what the token permits."""
    _print_document(context, context.client.whoami(), as_json)


def format_evaluation_row(document: Mapping[str, Any], now: datetime) -> str:
    """Return the line of an evaluation in a list."""
    created = datetime.fromisoformat(document["created"])
    state, error = document["state"], document.get("error")
    results = summarize_results(document.get("results"))
    verdict = state
    if error:
        verdict = f"{state}: {error['reason']}" if error["reason"] != state else state
    elif results:
        verdict = f"{state}: {results[0].partition(' (')[0]}"
    age = format_age((now - created).total_seconds())
    names = (document.get(member) for member in ("problem", "directory", "evaluator_cmd"))
    problem = next(filter(None, names), "")
    labels = ", ".join(f"{name}={value}" for name, value in document.get("metadata", {}).items())
    row = _ROW.format(document["evaluation_id"], verdict, age, problem, labels)
    return escape_table_row(row)


def format_problem_title(problem: Mapping[str, Any]) -> str:
    """Return the title of a problem, and when it closes, in the time zone of this machine."""
    if not problem.get("closes"):
        return str(problem["title"])
    closes = datetime.fromisoformat(problem["closes"]).astimezone()
    return f"{problem['title']} (closes {closes:%Y-%m-%d %H:%M})"


def format_age(seconds: float) -> str:
    """Return a time in the largest unit of which it has one, such as `5 min`."""
    for unit, size in (("d", _DAY), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def _print_document(context: CommandContext, document: Mapping[str, Any], as_json: bool) -> None:
    context.screen.print_text((format_json if as_json else format_status)(document))


def format_status(document: Mapping[str, Any]) -> str:
    """Return the lines of a status document, without empty members."""
    lines = []
    for name, value in document.items():
        if value in (None, "", []):
            continue
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        elif name == "results":
            value = ", ".join(summarize_results(value))
        elif isinstance(value, dict):
            shown = {key: _format_member(key, one) for key, one in value.items()}
            value = ", ".join(f"{key}: {one}" for key, one in shown.items() if one is not None)
        first, *others = str(_format_member(name, value)).rstrip("\n").split("\n")
        lines.append(f"{name:<15} {first}")
        lines += [f"{'':<15} {line}" for line in others]
    return escape_control_characters("\n".join(lines))


def _format_member(name: str, value: Any) -> Any:
    """Return a size in bytes in words, a list as its items, and any other value as it is."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return format_size(value) if name in _SIZES and isinstance(value, int) else value
