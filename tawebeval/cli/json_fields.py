"""The option `--json FIELDS`, and the documents of the API that it selects fields of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import click

from tawebeval.cli.output import Screen, escape_table_row

SUMMARY_FIELDS = ("evaluation_id", "state", "problem", "metadata", "created", "ended", "results")
"""The fields that a list of evaluations has without a request for each status."""
STATUS_FIELDS = (
    *("evaluation_id", "log_name", "state", "queue_place", "problem", "repository", "commit_oid"),
    *("tree_oid", "directory", "evaluator_cmd", "seed", "environment", "limits", "metadata"),
    *("created", "fetching", "running", "ended", "exit", "usage", "error", "results", "runner"),
    *("callback", "stderr", "events", "buffered_bytes", "archived"),
)
PROBLEM_FIELDS = (
    *("name", "title", "description", "fields", "extensions"),
    *("environment", "limits"),
)
ENVIRONMENT_FIELDS = ("name", "description", "digest")

_ALL = ("all",)

JsonFields: TypeAlias = tuple[str, ...]
"""Names of fields to print as JSON; `all` alone for every field."""

Command = TypeVar("Command", bound=Callable[..., Any])


def select_fields(document: dict[str, Any], names: JsonFields) -> dict[str, Any]:
    """Return these fields of a document, None for a field that the document does not have."""
    return document if names == _ALL else {name: document.get(name) for name in names}


def add_json_option(fields: Iterable[str]) -> Callable[[Command], Command]:
    """Give a command the option `--json`, as `json_fields`; None if it is not given."""
    known = tuple(fields)

    def parse(
        context: click.Context, parameter: click.Parameter, given: str | None
    ) -> JsonFields | None:
        if given is None:
            return None
        if not given:
            listed = "\n  ".join(known)
            raise click.UsageError(
                f"name one or more fields after --json, separated by commas, or `all`:\n  {listed}"
            )
        names = tuple(name.strip() for name in given.split(","))
        for name in names:
            if name not in known and names != _ALL:
                raise click.BadParameter(
                    f"{name!r} is not a field; the fields are {', '.join(known)}; `all` prints"
                    " every field"
                )
        return names

    return click.option(
        "--json",
        "json_fields",
        metavar="FIELDS",
        is_flag=False,
        flag_value="",
        callback=parse,
        help="Print these fields as JSON, such as"
        f" {','.join(known[:2])}. Without FIELDS, list the names of all; `all` prints every field.",
    )


def format_json(value: Any) -> str:
    """Return a value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def print_list(
    screen: Screen,
    documents: Sequence[dict[str, Any]],
    json_fields: JsonFields | None,
    row_format: str,
    rows: Iterable[Sequence[object]],
) -> None:
    """Print a list of documents as JSON with these fields, or without any as a table."""
    if json_fields is not None:
        screen.print_text(format_json([select_fields(one, json_fields) for one in documents]))
        return
    for cells in rows:
        screen.print_text(escape_table_row(row_format.format(*cells)))
