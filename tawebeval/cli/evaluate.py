"""`tawebeval evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from twisted.internet.defer import Deferred

from tawebeval.cli.checkout import NoCheckout, look, without_user
from tawebeval.cli.fields import Submission, parse_fields
from tawebeval.cli.follow import Reading
from tawebeval.cli.interrupting import interrupted
from tawebeval.cli.output import Screen
from tawebeval.cli.runtime import GOOD, Server, asks_server, make_screen, run
from tawebeval.cli.saving import Folder
from tawebeval.cli.streams import OutputLost
from tawebeval.cli.words import TEXT
from tawebeval.client import Client, ClientError
from tawebeval.core.form import MAX_DEPTH, MAX_SEED


def _submission(context: click.Context, _: click.Parameter, given: tuple[str, ...]) -> Submission:
    """Return what the FIELD arguments mean. Raises BadParameter."""
    try:
        return parse_fields(given)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


FIELDS = click.argument(
    "fields",
    nargs=-1,
    metavar="FIELD...",
    callback=_submission,
    # Files are offered by the shell.
    shell_complete=lambda context, parameter, incomplete: [
        click.shell_completion.CompletionItem(incomplete, type="file")
    ],
)
FILES = click.option(
    "--files",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    callback=lambda context, parameter, path: path and Folder(path),
    help="Save files that the evaluator sends in this directory.",
)
LINES = click.option(
    "--events", "lines", is_flag=True, help="Print all events as JSON Lines, for programs."
)


EVALUATOR = click.option(
    "--evaluator", metavar="CMD", required=True, type=TEXT, help="The command that judges, for sh."
)
DIRECTORY = click.option(
    "--directory", "-d", metavar="DIR", type=TEXT, help="Where in the repository CMD is run."
)
SEED = click.option("--seed", type=click.IntRange(0, MAX_SEED), help="Handed to the evaluator.")


@click.command()
@FIELDS
@EVALUATOR
@click.option("--repository", metavar="URL", type=TEXT, help="Where the evaluator is fetched from.")
@click.option("--commit", metavar="OID", type=TEXT, help="Its commit, 40 hexadecimal digits.")
@click.option("--branch", type=TEXT, help="What to fetch if the commit alone cannot be.")
@click.option("--depth", type=click.IntRange(1, MAX_DEPTH), help="How much history to fetch.")
@DIRECTORY
@SEED
@click.option("--callback-url", metavar="URL", type=TEXT, help="Where the end is to be told.")
@FILES
@LINES
@click.option("--detach", is_flag=True, help="Print the identifier, and leave.")
@asks_server
def evaluate(
    fields: Submission,
    repository: str | None,
    commit: str | None,
    directory: str | None,
    evaluator: str,
    folder: Folder | None,
    lines: bool,
    detach: bool,
    server: str,
    token: str | None,
    **others: Any,
) -> None:
    """Have a submission judged, and show what the evaluator prints as it comes.

    \b
    A FIELD is
      solution.py             a file; the field `source`
      source:solution.py      a file, of the field that is named
      source_language=c++     a text

    Without --repository or --commit these are origin and HEAD of the git checkout that you are in,
    and without both --directory is where you are in it. Ctrl-C cancels the evaluation; once more
    leaves it alone.

    \b
    In a checkout of the problems:
      tawebeval evaluate --evaluator 'bash evaluator.sh' solution.awk
    From anywhere:
      tawebeval evaluate --server https://judge.example.org \\
          --repository https://example.org/problems.git \\
          --commit ae860ece734fcbca7f024a7f0aa220cc5564bb9e --directory word_count \\
          --evaluator 'bash evaluator.sh' source:solution.awk language=awk
    For programs:
      tawebeval evaluate --events --evaluator ./evaluate solution.py |
          jq 'select(.type == "data").payload'

    The exit status is 0 after a good end, 1 after another one or where the server has lost the
    evaluation, 2 where the command or a field of it is wrong or something could not be written, 3
    where the server cannot be reached; 130 where Ctrl-C comes before the beginning, 143 and 129
    after SIGTERM and SIGHUP, which cancel, too, and 141 where nobody reads what is printed, which
    cancels as well.
    """  # noqa: D301
    screen = make_screen(lines=lines)
    if repository is None or commit is None:
        try:
            checkout = look(Path(), repository, commit)
        except NoCheckout as error:
            raise click.UsageError(str(error)) from None
        if repository is None and commit is None and directory is None:
            directory = checkout.directory
        repository, commit = checkout.repository, checkout.commit
        where = f", in {directory}" if directory else ""
        screen.note(f"evaluating by {without_user(repository)} at {commit[:12]}{where}")
        for warning in checkout.warnings:
            screen.note(f"warning: {warning}", "yellow")

    async def work(client: Client, reactor: Any) -> int:
        identifier = await client.evaluate(
            fields,
            repository=repository,
            commit=commit,
            directory=directory,
            evaluator_cmd=evaluator,
            **others,
        )
        if detach:
            screen.print(identifier)
            return GOOD
        return await attend(client, identifier, screen, reactor, folder)

    run(Server(server, token), screen, work)


async def attend(
    client: Client, identifier: str, screen: Screen, reactor: Any, folder: Folder | None
) -> int:
    """Follow an evaluation of our own, which Ctrl-C cancels; return the exit status."""
    reading = Reading(client, identifier, screen, exists=True)

    async def cancel() -> None:
        screen.note(f"cancelling; Ctrl-C leaves it alone, and `{reading.resumption}` goes on here")
        try:
            await client.cancel(identifier)
        except ClientError as error:
            screen.note(f"not cancelled: {error}", "red")

    with interrupted(lambda: Deferred.fromCoroutine(cancel()), reactor):
        try:
            return await reading.follow(reactor, folder)
        except OutputLost:  # nobody sees what we print
            await client.cancel(identifier)
            raise
