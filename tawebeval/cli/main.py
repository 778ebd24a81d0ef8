"""The click group of all commands."""

from __future__ import annotations

import click

from tawebeval import __version__
from tawebeval.cli.environment import environment
from tawebeval.cli.evaluate import evaluate
from tawebeval.cli.evaluations import cancel, follow, list_, problems, rerun, status
from tawebeval.cli.operate import doctor, keeper, quota, reload, serve, token
from tawebeval.cli.try_command import try_


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="tawebeval %(version)s")
def main() -> None:
    """Judge submissions with evaluators, here or on a server; run the server.

    \b
    Run the evaluator in the current directory on a solution:
      tawebeval try . --evaluator 'python3 evaluator.py' solution.py
    Do the same on a server, with the evaluator of the git checkout around the current directory:
      export TAWEBEVAL_SERVER=https://judge.example.org TAWEBEVAL_TOKEN_FILE=~/.judge
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
      130  Ctrl-C before the evaluation has begun, or in follow
      141  stdout is closed
      143  ended by SIGTERM; 129 by SIGHUP
    """  # noqa: D301  (\b keeps click from filling the lines)


for command in (
    *(evaluate, try_, problems, follow, status, cancel, rerun, list_),
    *(serve, keeper, doctor, environment, quota, reload, token),
):
    main.add_command(command)
