"""`tawebeval evaluate`, its FIELD arguments, and the git checkout that it takes defaults from."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import click
from twisted.internet.defer import Deferred

from tawebeval.cli.follow import EvaluationReader, Folder
from tawebeval.cli.output import OutputLost, Screen
from tawebeval.cli.runtime import GOOD, UTF8, Server, make_screen, run, server_options
from tawebeval.client import Client, ClientError
from tawebeval.client.http import check_text
from tawebeval.core.form import FIELD_NAME, MAX_DEPTH, MAX_SEED
from tawebeval.core.text import base_name

DEFAULT_FIELDS = ("source",)
"""The fields for paths without a field name, in this order."""

Submission: TypeAlias = dict[str, str | Path]

_TEXT_FIELD = re.compile(rf"({FIELD_NAME})=(.*)", re.DOTALL)
_FILE_FIELD = re.compile(rf"({FIELD_NAME}):(.+)", re.DOTALL)


_USER = re.compile(r"(?i)(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<user>[^/?#]*)@")


def _parse_submission(
    context: click.Context, _: click.Parameter, given: tuple[str, ...]
) -> Submission:
    """Return the submission of the FIELD arguments. Raises BadParameter."""
    try:
        return parse_fields(given)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


FIELDS = click.argument(
    "fields",
    nargs=-1,
    metavar="FIELD...",
    callback=_parse_submission,
    # The shell completes files.
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
    help="Directory in which to save the files that the evaluator sends.",
)
LINES = click.option(
    "--events", "lines", is_flag=True, help="Print all events as JSON Lines, for programs."
)
EVALUATOR = click.option(
    "--evaluator",
    metavar="CMD",
    required=True,
    type=UTF8,
    help="Shell command that judges the submission.",
)
DIRECTORY = click.option(
    "--directory",
    "-d",
    metavar="DIR",
    type=UTF8,
    help="Directory of the repository in which CMD runs.",
)
SEED = click.option(
    "--seed", type=click.IntRange(0, MAX_SEED), help="Seed for the evaluator; random without it."
)


@click.command()
@FIELDS
@EVALUATOR
@click.option("--repository", metavar="URL", type=UTF8, help="URL of the evaluator's repository.")
@click.option(
    "--commit", metavar="OID", type=UTF8, help="Commit of the repository, 40 hexadecimal digits."
)
@click.option(
    "--branch", type=UTF8, help="Branch to fetch if the server cannot fetch the commit alone."
)
@click.option(
    "--depth", type=click.IntRange(1, MAX_DEPTH), help="Number of commits of history to fetch."
)
@DIRECTORY
@SEED
@click.option(
    "--callback-url", metavar="URL", type=UTF8, help="URL to notify when the evaluation ends."
)
@FILES
@LINES
@click.option("--detach", is_flag=True, help="Print the identifier and exit.")
@server_options
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
    """Submit files to an evaluator, and show its output as it is printed.

    \b
    A FIELD is
      solution.py             a file, as the field `source`
      source:solution.py      a file, as the field `source`
      source_language=c++     a text

    Without --repository or --commit, the command takes origin and HEAD of the git checkout around
    the current directory; without both, --directory is the current directory. Ctrl-C cancels the
    evaluation; a second Ctrl-C leaves it running.

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

    The exit status is 0 if the evaluator succeeds; 1 if it fails or the server has lost the
    evaluation; 2 if the command or a field is invalid, or a file or stdout cannot be written; 3 if
    the server cannot be reached; 130 after Ctrl-C before the evaluation has begun. SIGTERM (143),
    SIGHUP (129) and a closed stdout (141) cancel the evaluation as well.
    """  # noqa: D301
    screen = make_screen(lines=lines)
    if repository is None or commit is None:
        try:
            checkout = inspect_checkout(Path(), repository, commit)
        except NoCheckout as error:
            raise click.UsageError(str(error)) from None
        if repository is None and commit is None and directory is None:
            directory = checkout.directory
        repository, commit = checkout.repository, checkout.commit
        where = f", in {directory}" if directory else ""
        screen.note(f"evaluating by {strip_user(repository)} at {commit[:12]}{where}")
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
    """Follow an evaluation that this command has begun, and return the exit status.

    A cancellation, or a stdout that cannot be written to, cancels the evaluation.
    """

    async def cancel() -> None:
        screen.note(f"cancelling; Ctrl-C leaves it alone, and `{reader.resumption}` goes on here")
        try:
            await client.cancel(identifier)
        except ClientError as error:
            screen.note(f"not cancelled: {error}", "red")

    reader = EvaluationReader(
        client,
        identifier,
        screen,
        exists=True,
        on_cancel=lambda: Deferred.fromCoroutine(cancel()),
    )
    try:
        return await reader.follow(reactor, folder)
    except OutputLost:
        await client.cancel(identifier)
        raise


def parse_fields(arguments: Iterable[str]) -> Submission:
    """Return the submission: the text or the path of each field.

    `name=text` and `name:path` name their fields; a bare path takes the next free default field.
    Raises ValueError for a repeated field, a path without a field, a missing file, a file name
    that no evaluator could be given, and text that is not UTF-8.
    """
    submission: Submission = {}
    bare: list[Path] = []
    for argument in arguments:
        if match := _TEXT_FIELD.fullmatch(argument):
            check_text(match[1], match[2])
            _add_field(submission, match[1], match[2])
        elif match := _FILE_FIELD.fullmatch(argument):
            _add_field(submission, match[1], _find_file(match[2]))
        else:
            bare.append(_find_file(argument))
    for path in bare:
        free = next((name for name in DEFAULT_FIELDS if name not in submission), None)
        if free is None:
            raise ValueError(f"{path}: which field is it? Write NAME:{path}")
        submission[free] = path
    if not submission:
        raise ValueError("there is nothing to evaluate: give a file, such as solution.py")
    return submission


def _add_field(submission: Submission, name: str, content: str | Path) -> None:
    if name in submission:
        raise ValueError(f"the field {name} stands there twice")
    submission[name] = content


def _find_file(path: str) -> Path:
    try:
        found = Path(path).is_file()
    except OSError as error:
        raise ValueError(f"{path[:100]}: {error.strerror}") from None
    if not found:
        raise ValueError(f"there is no file {path}")
    base_name(path)
    return Path(path)


class NoCheckout(Exception):
    """No checkout that a server could fetch; `str()` says why, and what to do."""


@attrs.frozen
class GitCheckout:
    """A git checkout as a server would fetch it.

    `repository` is the URL of `origin`, `commit` that of HEAD, `directory` a path within the
    checkout. `warnings` are sentences about changes that a server would not see.
    """

    repository: str
    commit: str
    directory: str
    warnings: tuple[str, ...]


def inspect_checkout(
    folder: Path, repository: str | None = None, commit: str | None = None
) -> GitCheckout:
    """Return the checkout that contains `folder`. Raises NoCheckout. Blocks.

    `repository` and `commit` replace those of the checkout; None takes them from it.
    """
    try:
        inside, directory = _git(
            folder, "rev-parse", "--is-inside-work-tree", "--show-prefix"
        ).split("\n", 1)
    except (OSError, ValueError, subprocess.CalledProcessError):
        inside, directory = "", ""
    if inside != "true":
        raise NoCheckout("this is no git checkout: give --repository and --commit, or go into one")
    own_repository, own_commit = repository is None, commit is None
    if commit is None:
        try:
            commit = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        except subprocess.CalledProcessError:
            raise NoCheckout("nothing is committed in this checkout yet") from None
    if repository is None:
        try:
            repository = _git(folder, "remote", "get-url", "origin")
        except subprocess.CalledProcessError:
            raise NoCheckout("this checkout has no remote `origin`: give --repository") from None
        if _names_secret(repository):
            raise NoCheckout(
                "the URL of `origin` contains a password or a token, which is not sent to anybody: "
                "give --repository without it"
            )
    warnings = []
    if own_repository and _is_unpushed(folder, commit):
        name = "HEAD" if own_commit else "the commit"
        warnings.append(f"{name} is not pushed to origin, as far as is known here: git push")
    if own_commit and _is_changed(folder):
        warnings.append("what is changed here and not committed is not evaluated")
    return GitCheckout(repository, commit, directory.rstrip("/"), tuple(warnings))


def strip_user(url: str) -> str:
    """Return a URL without user name and password, to be shown."""
    return _USER.sub(r"\g<scheme>://", url, count=1)


def _names_secret(url: str) -> bool:
    """Tell whether a URL may contain a secret. Over http a user name alone may be a token."""
    found = _USER.match(url)
    return found is not None and (
        found["scheme"].lower() in ("http", "https") or ":" in found["user"]
    )


def _is_unpushed(folder: Path, commit: str) -> bool:
    """Tell whether the remote branches that are known here lack a commit."""
    known = "for-each-ref", "--count=1", f"--contains={commit}", "refs/remotes/origin"
    try:
        return not _git(folder, *known)
    except subprocess.CalledProcessError:  # an unknown commit
        return False


def _is_changed(folder: Path) -> bool:
    try:
        return bool(_git(folder, "status", "--porcelain"))
    except subprocess.CalledProcessError:  # an unreadable index
        return True


def _git(folder: Path, *arguments: str) -> str:
    """Return the output of git. Raises CalledProcessError, and OSError without git."""
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env={**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        errors="surrogateescape",
        check=True,
    ).stdout.removesuffix("\n")
