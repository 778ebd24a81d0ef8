"""Options and arguments that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click

from tawebeval.errors import ConfigurationError

CommandDecorator: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]

SubmissionFields: TypeAlias = Mapping[str, str | bytes | Path]
"""The content of each field: a text, the content of stdin or of a pipe, or a file."""


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


def combine_options(*options: CommandDecorator) -> CommandDecorator:
    """Return a decorator that gives a command all these options, in this order in its help."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


UTF8_ARGUMENT = Utf8Argument()
text_option = partial(click.option, type=UTF8_ARGUMENT)
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
IDENTIFIER_ARGUMENT = click.argument("identifier", type=UTF8_ARGUMENT, metavar="ID")
problem_option = partial(text_option, "--problem", metavar="NAME")

CONFIG_OPTION = click.option(
    "--config",
    "-c",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Read settings from this TOML file; without one, use the defaults.",
)


def _become_user(context: click.Context, parameter: click.Parameter, name: str | None) -> None:
    # Imported late: the client commands do without.
    from tawebeval.linux.privileges import become_user

    if name is not None and not context.resilient_parsing:
        try:
            become_user(name)
        except ConfigurationError as error:
            raise click.UsageError(str(error)) from None


USER_OPTION = click.option(
    "--user",
    metavar="NAME",
    is_eager=True,
    expose_value=False,
    callback=_become_user,
    help="As root: run as this user.",
)


@contextmanager
def exit_on_errors(path: Path | None = None) -> Iterator[None]:
    """Exit with a message and the status 2 for an error of the block, which may be of a file."""
    try:
        yield
    except (ConfigurationError, OSError) as error:
        from tawebeval.linux.filetree import describe_disk_error  # late, as above

        said = describe_disk_error(error) if isinstance(error, OSError) else str(error)
        if path is not None:
            said = f"{path}: {error.strerror if isinstance(error, OSError) else error}"
        click.echo(f"tawebeval: {said}", err=True)
        raise SystemExit(2) from None


def parse_name_value_pairs(
    names: str,
    described: str,
    context: click.Context,
    parameter: click.Parameter,
    given: Iterable[str],
) -> Mapping[str, str]:
    """Return the values of NAME=VALUE by name. Raises BadParameter.

    `names` is the pattern of names, `described` says the same to people.
    """
    pairs: dict[str, str] = {}
    for each in given:
        match = re.fullmatch(f"({names})=(.+)", each, re.DOTALL)
        if match is None:
            raise click.BadParameter(f"{each!r} is not NAME=VALUE, where NAME is {described}")
        if match[1] in pairs:
            raise click.BadParameter(f"{match[1]} is given twice")
        pairs[match[1]] = match[2]
    return pairs


def _parse_labels(
    context: click.Context, parameter: click.Parameter, given: Sequence[str]
) -> Mapping[str, str]:
    if not given:
        return {}
    from tawebeval.core.form import LABEL_NAME_PATTERN  # late: it takes 10 ms

    described = "1 to 64 of the characters a-z 0-9 _ . -"
    return parse_name_value_pairs(LABEL_NAME_PATTERN, described, context, parameter, given)


label_option = partial(
    text_option,
    "--label",
    "metadata",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_parse_labels,
)
