"""`tawebeval try`: its arguments and options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from tawebeval.cli.evaluate import (
    DIRECTORY_OPTION,
    FIELDS_ARGUMENT,
    LIMIT_OPTION,
    SEED_OPTION,
    add_output_options,
    evaluator_option,
)
from tawebeval.cli.operator_commands import CONFIG_OPTION, USER_OPTION
from tawebeval.cli.runtime import make_screen, text_option


def _find_directory(context: click.Context, parameter: click.Parameter, path: Path) -> Path:
    # The user of --user may reach directories of root from the working directory only.
    for find in (os.path.realpath, os.path.relpath):
        try:
            found = find(path)
            os.scandir(f"{found}/.").close()  # to list and to enter
        except OSError as error:
            failure = error
        else:
            return Path(found)
    message = f"{path}: {(failure.strerror or '').lower()}"
    if isinstance(failure, PermissionError):
        message += "; let this user read the directory, then change to it and name it '.'"
    raise click.BadParameter(message)


@click.command("try")
@click.argument(
    "root",
    metavar="DIRECTORY",
    type=click.Path(path_type=Path),
    callback=_find_directory,
)
@FIELDS_ARGUMENT
@evaluator_option(required=True)
@DIRECTORY_OPTION
@SEED_OPTION
@text_option(
    "--environment",
    metavar="NAME",
    help="Run in this environment of --config, instead of the machine's own programs.",
)
@LIMIT_OPTION
@CONFIG_OPTION
@USER_OPTION
@click.option(
    "--raw",
    is_flag=True,
    help="Show stdout as it is, with words for the markers.",
)
@add_output_options
def try_(raw: bool, lines: bool, **options: Any) -> None:
    """Run an evaluator on this machine, without a server.

    DIRECTORY takes the place of the git repository. The evaluator gets a copy, so DIRECTORY never
    changes. Sandbox, limits and event parser are the daemon's, with the settings of --config.
    FIELDs, --files, --events and the exit status are those of `tawebeval evaluate`.

    \b
      tawebeval try . --evaluator 'python3 evaluator.py' solutions/right.py
      tawebeval try problems -d word_count --evaluator 'bash evaluator.sh' solution.awk
    Show what the evaluator prints, before it is parsed:
      tawebeval try . --raw --evaluator ./evaluate solution.py

    Root has to name another user by --user, who needs permission to read DIRECTORY and the files,
    but not the directories above the working directory.
    """  # noqa: D301
    if raw and lines:
        raise click.UsageError("--raw and --events exclude each other; give one of them")
    screen = make_screen(lines=lines)
    screen.shows_excerpts = True
    # Imported late: it imports much of the daemon.
    from tawebeval.cli.try_run import run_try

    run_try(screen, raw=raw, **options)
