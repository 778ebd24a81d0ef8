"""The click group of all commands."""

from __future__ import annotations

import errno
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from tawebeval import __version__

_COMMANDS = {
    "evaluate": "evaluate:evaluate",
    "try": "evaluate:try_",
    "problems": "evaluations:problems",
    "environments": "evaluations:environments",
    "whoami": "evaluations:whoami",
    "follow": "follow:follow",
    "status": "evaluations:status",
    "share": "evaluations:share",
    "download": "follow:download",
    "cancel": "evaluations:cancel",
    "rerun": "evaluate:rerun",
    "list": "evaluations:list_evaluations",
    "login": "servers:login",
    "logout": "servers:logout",
    "serve": "operator_commands:serve",
    "starter": "operator_commands:starter",
    "doctor": "operator_commands:doctor",
    "environment": "operator_commands:environment_commands",
    "check": "evaluate:check_package",
    "token": "operator_commands:token_commands",
}
"""Module and name of each command. A module is imported when its command is used."""

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class LazyGroup(click.Group):
    """A group that imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; None if no command has this name."""
        place = _COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, _, name = place.partition(":")
        command: click.Command = getattr(import_module(f"tawebeval.cli.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return a command and its arguments. Raises UsageError, with similar names."""
        similar = get_close_matches(args[0], _COMMANDS)
        if similar and args[0] not in _COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"no such command: {args[0]}; did you mean {' or '.join(similar)}?")
        return super().resolve_command(ctx, args)

    def main(self, *arguments: Any, **settings: Any) -> Any:
        """Run a command. Where stdout cannot be written to, say so, and exit with status 2."""
        try:
            return super().main(*arguments, **settings)
        except OSError as error:
            if error.filename is not None or error.errno not in _WRITE_ERRORS:
                raise
            from tawebeval.cli.output import redirect_to_devnull  # late, as every command module

            redirect_to_devnull(sys.stdout)
            click.echo(f"stdout: {error.strerror}", err=True)
            raise SystemExit(2) from None


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="tawebeval %(version)s")
def main() -> None:
    """Judge submissions with evaluators, here or on a server; run the server.

    \b
    Run the evaluator in the current directory on a solution:
      tawebeval try . --evaluator 'python3 evaluator.py' solution.py
    Do the same on a server, with the evaluator of the git checkout around the current directory:
      tawebeval login https://judge.example.org
      tawebeval evaluate --evaluator 'python3 evaluator.py' solution.py
    Submit now, follow later:
      ID=$(tawebeval evaluate --detach --evaluator ./evaluate solution.py)
      tawebeval follow $ID
    Run the daemon on this machine:
      tawebeval serve

    \b
    The exit status of evaluate, try and follow is
      0    the evaluator exited with status 0
      1    the evaluation failed; the last line says why
      2    the command is invalid, the server refused it, or a file or stdout cannot be written
      3    the server cannot be reached
      4    with --exit-status: the verdict is not "accepted"
      130  Ctrl-C before the evaluation has begun, or in follow
      141  stdout is closed
      143  ended by SIGTERM; 129 by SIGHUP
    """  # noqa: D301  (\b keeps click from filling the lines)
