"""`tawebeval evaluate`, `rerun`, `try`, `check`: FIELD arguments, and the git checkout around."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import click

from tawebeval.cli.follow import (
    DownloadDirectory,
    EvaluationReader,
    add_output_options,
    show_drawn_seed,
)
from tawebeval.cli.options import (
    CONFIG_OPTION,
    IDENTIFIER_ARGUMENT,
    JSON_OPTION,
    USER_OPTION,
    SubmissionFields,
    combine_options,
    exit_on_errors,
    label_option,
    parse_name_value_pairs,
    problem_option,
    text_option,
)
from tawebeval.cli.output import StdoutWriteError
from tawebeval.cli.runtime import CommandContext, make_screen
from tawebeval.cli.servers import add_server_options
from tawebeval.core.form import (
    FIELD_NAME_PATTERN,
    LIMIT_UNITS,
    MAX_CLONE_DEPTH,
    MAX_SEED,
    draw_seed,
    get_base_name,
)
from tawebeval_client import ClientError
from tawebeval_client.http import check_encodable

_BARE_FIELD = "source"  # of a path without a field name
_STDIN = ("-", "/dev/stdin")
_FIELD = re.compile(
    rf"({FIELD_NAME_PATTERN})=(.*)|(?:({FIELD_NAME_PATTERN}):(?=.))?(.*)", re.DOTALL
)
_OID = re.compile(r"[0-9a-fA-F]{40}")
_USER = re.compile(r"(?i)(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<user>[^/?#]*)@")


def _parse_submission(
    context: click.Context, _: click.Parameter, given: tuple[str, ...]
) -> SubmissionFields:
    """Return the submission of the FIELD arguments. Raises BadParameter."""
    if context.resilient_parsing:  # for completion, which must not read stdin
        return {}
    try:
        return parse_submission_fields(given)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    except OSError as error:
        raise click.BadParameter(f"{error.filename}: {error.strerror}") from None


FIELDS_ARGUMENT = click.argument(
    "fields",
    nargs=-1,
    metavar="FIELD...",
    callback=_parse_submission,
    # The shell completes files.
    shell_complete=lambda context, parameter, incomplete: [
        click.shell_completion.CompletionItem(incomplete, type="file")
    ],
)
evaluator_option = partial(
    text_option, "--evaluator", metavar="CMD", help="Run this shell command as the evaluator."
)
DIRECTORY_OPTION = text_option(
    "--directory", "-d", metavar="DIR", help="Run CMD in this directory of the repository."
)
SEED_OPTION = click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(0, MAX_SEED),
    help="Set TURINGARENA_SEED; random by default.",
)


LIMIT_OPTION = text_option(
    "--limit",
    "limits",
    metavar="NAME=VALUE",
    multiple=True,
    callback=partial(parse_name_value_pairs, "|".join(LIMIT_UNITS), ", ".join(LIMIT_UNITS)),
    help="Replace a default limit, as in memory=256M or wall_clock=10.",
)
environment_option = partial(text_option, "--environment", metavar="NAME")
add_local_options = combine_options(
    SEED_OPTION,
    environment_option(
        help="Run in this environment of --config, instead of the machine's own programs."
    ),
    LIMIT_OPTION,
    CONFIG_OPTION,
    USER_OPTION,
)
"""Gives a command that evaluates on this machine its options, besides those of its own."""

add_submission_options = combine_options(
    LIMIT_OPTION,
    label_option(help="Mark the evaluation with a label, for lists and programs."),
    text_option(
        "--callback-url", metavar="URL", help="Send a POST to this URL when the evaluation ends."
    ),
    add_output_options,
    click.option("--detach", is_flag=True, help="Print the evaluation's identifier and exit."),
    add_server_options,
)
"""Gives a command that begins an evaluation on a server its options, besides those of its own."""


@click.command()
@FIELDS_ARGUMENT
@problem_option(help="Submit for this problem of the server.")
@evaluator_option()
@text_option("--repository", metavar="URL", help="Fetch the evaluator from this git repository.")
@text_option("--commit", metavar="OID", help="Use this commit, branch or tag.")
@text_option(
    "--branch", metavar="NAME", help="Fetch this branch if the commit cannot be fetched alone."
)
@click.option(
    "--depth",
    metavar="N",
    type=click.IntRange(1, MAX_CLONE_DEPTH),
    help="Fetch N commits of history; 1 by default.",
)
@DIRECTORY_OPTION
@SEED_OPTION
@environment_option(
    help="Run in this environment of the server's, instead of the machine's own programs."
)
@add_submission_options
def evaluate(
    fields: SubmissionFields,
    repository: str | None,
    commit: str | None,
    directory: str | None,
    problem: str | None,
    evaluator: str | None,
    folder: DownloadDirectory | None,
    detach: bool,
    seed: int | None,
    context: CommandContext,
    **others: Any,
) -> None:
    """Submit files to a server and show the evaluator's output.

    \b
    A FIELD is
      solution.py             a file, in the field `source`
      solution:main.py        a file, in the field `solution`
      solution:-              stdin, in the field `solution`
      language=c++            a text, in the field `language`

    The evaluator is by default that of the git checkout around the current directory: --repository
    is the URL of origin, --commit is HEAD, and --directory is the current directory. Give all three
    for another evaluator. With --problem the server knows the evaluator and its limits (see
    `tawebeval problems`), and the last line of stdout is the verdict, such as "wrong answer".

    Ctrl-C cancels the evaluation; a second Ctrl-C leaves it running.

    \b
    In a checkout of the problems:
      tawebeval evaluate --evaluator 'bash evaluator.sh' solution.awk
    For a problem of the server:
      tawebeval evaluate --problem word_count solution.awk
    From anywhere:
      tawebeval evaluate --server https://judge.example.org \\
          --repository https://example.org/problems.git \\
          --commit ae860ece734fcbca7f024a7f0aa220cc5564bb9e --directory word_count \\
          --evaluator 'bash evaluator.sh' source:solution.awk language=awk
    For programs:
      tawebeval evaluate --events --evaluator ./evaluate solution.py |
          jq 'select(.type == "data").payload'

    `tawebeval --help` lists the exit statuses. SIGTERM, SIGHUP and a closed stdout cancel the
    evaluation, as Ctrl-C does.
    """  # noqa: D301
    client, screen = context.client, context.screen
    screen.prints_verdict = problem is not None
    if problem is not None:
        _check_problem_options(click.get_current_context().params)
        chosen = {name: others[name] for name in ("callback_url", "metadata")}
        identifier = client.evaluate_problem(problem, fields, **chosen)
        follow_submitted_evaluation(context, identifier, folder, detach=detach)
        return
    if evaluator is None:
        raise click.UsageError("give --evaluator CMD, or --problem NAME")
    if repository is None:
        checkout = inspect_checkout(Path(), commit)
        if commit is None and directory is None:
            directory = checkout.directory
        repository, commit = checkout.repository, checkout.commit
        where = f", directory {directory}" if directory else ""
        screen.show_message(f"evaluator: {strip_userinfo(repository)} at {commit[:12]}{where}")
        for warning in checkout.warnings:
            screen.show_message(f"warning: {warning}", "yellow")
    elif commit is None:
        raise click.UsageError("--repository needs --commit, too")
    elif not _OID.fullmatch(commit):
        raise click.UsageError(
            f"--commit {commit} is not the 40 hexadecimal digits of a commit;"
            f" `git rev-parse {shlex.quote(commit)}` in a clone of the repository prints them"
        )
    drawn = draw_seed(os.urandom) if seed is None else None
    identifier = client.evaluate(
        fields,
        repository=repository,
        commit=commit,
        directory=directory,
        evaluator_cmd=evaluator,
        seed=drawn if seed is None else seed,
        **others,
    )
    follow_submitted_evaluation(context, identifier, folder, drawn, detach=detach)


def _check_problem_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError for an option of which the problem has its own value."""
    for name in (
        *("evaluator", "repository", "commit", "branch", "depth", "directory"),
        *("environment", "limits", "seed"),
    ):
        if options[name] or options[name] == 0:  # the seed may be 0
            option = f"--{name.removesuffix('s')}"
            raise click.UsageError(f"--problem sets {option}; give one of them")


def follow_submitted_evaluation(
    context: CommandContext,
    identifier: str,
    folder: DownloadDirectory | None,
    seed: int | None = None,
    *,
    detach: bool = False,
) -> None:
    """Follow an evaluation that this command has begun.

    `seed` is shown first; None if the caller has chosen it. `detach` prints the identifier, and
    follows nothing. An interruption, or a stdout that cannot be written to, cancels the evaluation.
    """
    client, screen = context.client, context.screen
    if detach:
        screen.print_text(identifier)
        show_drawn_seed(screen, seed)
        return

    def cancel() -> None:
        screen.show_message(
            "cancelling; another Ctrl-C leaves the evaluation running: continue here with"
            f" `{reader.resume_command}`"
        )
        try:
            client.cancel(identifier)
        except ClientError as error:
            screen.show_message(f"not cancelled: {error}", "red")

    reader = EvaluationReader(context, identifier, is_known_to_server=True, on_interrupt=cancel)
    try:
        show_drawn_seed(screen, seed)
        context.exit_status = reader.follow_evaluation(folder)
    except StdoutWriteError:
        client.cancel(identifier)
        raise


@click.command()
@IDENTIFIER_ARGUMENT
@text_option("--commit", metavar="OID", help="Use this commit instead.")
@click.option(
    "--current",
    "uses_current_evaluator",
    is_flag=True,
    help="Use the commit, the command and the limits that the problem has now.",
)
@SEED_OPTION
@add_submission_options
def rerun(
    identifier: str,
    folder: DownloadDirectory | None,
    detach: bool,
    context: CommandContext,
    **changes: Any,
) -> None:
    """Run an evaluation again, and show its output.

    The server uses the same files, commit, seed, limits and labels; the options replace these. The
    evaluation must have ended, and the server must still have it: after a client has read it to its
    end only with an archive.

    \b
      tawebeval rerun $ID
      tawebeval rerun --seed 8 --limit wall_clock=60 $ID
    """  # noqa: D301
    begun = context.client.rerun(identifier, **changes)
    follow_submitted_evaluation(context, begun, folder, detach=detach)


def parse_submission_fields(arguments: Iterable[str]) -> SubmissionFields:
    """Return the submission: the text, the path or the content of each field.

    `name=text` and `name:path` name their fields; a bare path is the field `source`. The path `-`
    is stdin. Raises ValueError for a repeated field, a path without a field, a missing file, a file
    name that no evaluator could be given, and text that is not UTF-8; OSError.
    """
    fields = [match.groups() for match in map(_FIELD.fullmatch, arguments) if match]
    if sum(path in _STDIN for *_, path in fields) > 1:
        raise ValueError("stdin can be the content of one field only")
    submission: dict[str, str | bytes | Path] = {}
    for text_name, text, name, path in sorted(fields, key=lambda field: not (field[0] or field[2])):
        if text_name:
            check_encodable(text_name, text)
        content = text if text_name else _find_content(path)
        field = text_name or name or _BARE_FIELD
        if field in submission and not (text_name or name):
            raise ValueError(f"{path} needs a field name, as {field} is taken: write NAME:{path}")
        if field in submission:
            raise ValueError(f"the field {field} is given twice")
        submission[field] = content
    if not submission:
        raise ValueError("no FIELD is given; name a file, such as solution.py")
    return submission


def _find_content(path: str) -> bytes | Path:
    """Return the path of a regular file, and the content of stdin or of a pipe."""
    if path in _STDIN:
        if sys.stdin is None:
            raise ValueError("stdin is closed")
        return sys.stdin.buffer.read()
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise ValueError(
            f"no such file: {path}; a field is NAME:PATH or NAME=TEXT, where NAME has a-z, 0-9 and"
            " _, the first a letter"
        ) from None
    except OSError as error:
        raise ValueError(f"{path[:100]}: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        raise ValueError(f"{path} is a directory; name a file in it")
    if stat.S_ISFIFO(mode):
        return Path(path).read_bytes()
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is not a regular file, a pipe or -")
    get_base_name(path)
    return Path(path)


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


def inspect_checkout(folder: Path, commit: str | None = None) -> GitCheckout:
    """Return the checkout that contains `folder`. Raises UsageError. Blocks.

    `commit` replaces HEAD: an identifier, perhaps a short one, or a branch or tag of the checkout.
    """
    printed = _git(folder, "rev-parse", "--is-inside-work-tree", "--show-prefix") or ""
    inside, _, directory = printed.partition("\n")
    if inside != "true":
        raise click.UsageError(
            "the current directory is not in a git checkout; change to one, or give --repository"
            " and --commit"
        )
    name, found = ("HEAD" if commit is None else "the commit"), _resolve(folder, commit)
    repository = _find_origin(folder)
    warnings = []
    # Without an output for an unknown commit.
    known = ("for-each-ref", "--count=1", f"--contains={found}", "refs/remotes/origin")
    if _git(folder, *known) == "":
        warnings.append(
            f"{name} is on no branch of origin that this checkout knows; push it with `git push`"
        )
    # Solutions to submit are often untracked.
    changed = ("status", "--porcelain", "--untracked-files=no")
    if commit is None and _git(folder, *changed) != "":
        warnings.append("uncommitted changes are not evaluated; commit and push them")
    return GitCheckout(repository, found, directory.rstrip("/"), tuple(warnings))


def _find_origin(folder: Path) -> str:
    """Return the URL of `origin`. Raises UsageError."""
    repository = _git(folder, "remote", "get-url", "origin")
    if repository is None:
        raise click.UsageError(
            "this checkout has no remote `origin`; add it with `git remote add origin URL`, or give"
            " --repository"
        )
    if _names_secret(repository):
        raise click.UsageError(
            "the URL of the remote `origin` contains a password or a token, and is not sent; give"
            " --repository without it"
        )
    return repository


def _resolve(folder: Path, commit: str | None) -> str:
    """Return the whole identifier of a commit, of HEAD for None. Raises UsageError."""
    if commit is not None and _OID.fullmatch(commit):
        return commit
    revision = ("--end-of-options", f"{commit or 'HEAD'}^{{commit}}")
    found = _git(folder, "rev-parse", "--verify", "--quiet", *revision)
    if not found:
        raise click.UsageError(
            "this checkout has no commit yet; commit and push the evaluator"
            if commit is None
            else f"--commit {commit} is not a commit, branch or tag of this checkout"
        )
    return found


def strip_userinfo(url: str) -> str:
    """Return a URL without user name and password, to be shown."""
    return _USER.sub(r"\g<scheme>://", url, count=1)


def _names_secret(url: str) -> bool:
    """Tell whether a URL may contain a secret. Over http a user name alone may be a token."""
    found = _USER.match(url)
    return found is not None and (
        found["scheme"].lower() in ("http", "https") or ":" in found["user"]
    )


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git, None if it fails or is not installed."""
    try:
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
    except (OSError, subprocess.CalledProcessError):
        return None


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
@click.option(
    "--watch", is_flag=True, help="Run again whenever a file of DIRECTORY or a FIELD changes."
)
@add_local_options
@add_output_options
def try_(lines: bool, exits_by_verdict: bool, **options: Any) -> None:
    """Run an evaluator on this machine, without a server.

    DIRECTORY takes the place of the git repository. The evaluator gets a copy, so DIRECTORY never
    changes. Sandbox, limits and event parser are the daemon's, with the settings of --config.
    FIELDs, output options and the exit status are those of `tawebeval evaluate`.

    \b
      tawebeval try . --evaluator 'python3 evaluator.py' solutions/right.py
      tawebeval try problems -d word_count --evaluator 'bash evaluator.sh' solution.awk

    Root has to name another user by --user, who needs permission to read DIRECTORY and the files,
    but not the directories above the working directory.
    """  # noqa: D301
    screen = make_screen(lines=lines, exits_by_verdict=exits_by_verdict, shows_excerpts=True)
    _leave_out_tls()
    # Imported late: it imports much of the daemon.
    from tawebeval.cli.try_run import run_try

    run_try(screen, **options)


def _leave_out_tls() -> None:
    """Let Twisted and asyncio import no TLS: what evaluates here connects to no other machine.

    A module that is None cannot be imported, and both go without.
    """
    for name in ("OpenSSL", "_ssl"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


@click.command("check")
@click.argument(
    "root",
    metavar="[DIRECTORY]",
    required=False,
    type=click.Path(path_type=Path),
    callback=lambda context, parameter, path: path and _find_directory(context, parameter, path),
)
@click.option(
    "--time",
    type=click.FloatRange(0, min_open=True),
    metavar="S",
    help="Limit each case to this processor time, in place of the package's limit.",
)
@add_local_options
@JSON_OPTION
def check_package(root: Path | None, config: Path | None, seed: int | None, **options: Any) -> None:
    """Check the submissions of a problem, or the configuration.

    DIRECTORY is a problem package (docs/packages.md), or a problem with `problem.toml` and
    `solutions`. All its submissions are judged on this machine as by `tawebeval try`, and each is
    compared with what the problem says of it.

    Without DIRECTORY, the configuration is checked: `systemctl reload tawebeval` runs this command
    first, and reloads only if the configuration is valid.

    \b
    The exit status is
      0    all submissions are as expected, or the configuration is valid
      1    a submission is not as expected
      2    the command is invalid, or the configuration or the package has a mistake
    """  # noqa: D301  (\b keeps click from filling the lines)
    # Imported late: they import what the daemon is made of.
    if root is not None:
        _leave_out_tls()
        from tawebeval.cli.check_run import run_check

        screen = make_screen()
        run_check(screen, root=root, config=config, seed=1 if seed is None else seed, **options)
    from tawebeval.daemon.configuration import check_configuration

    with exit_on_errors():
        check_configuration(config)
