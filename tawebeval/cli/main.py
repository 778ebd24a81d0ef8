"""All subcommands together."""

from __future__ import annotations

import click

from tawebeval import __version__
from tawebeval.cli.evaluate import evaluate
from tawebeval.cli.evaluations import cancel, follow, list_, status
from tawebeval.cli.operate import doctor, quota, reload, serve, token
from tawebeval.cli.try_command import try_


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="tawebeval %(version)s")
def main() -> None:
    """Have programs judged, over the web or here, and run the daemon that does it.

    \b
    Judge a solution by the evaluator of the git checkout that you are in:
      export TAWEBEVAL_SERVER=https://judge.example.org TAWEBEVAL_TOKEN_FILE=~/.judge
      tawebeval evaluate --evaluator 'python3 evaluator.py' solution.py
    Try an evaluator that you are writing, on this machine:
      tawebeval try . --evaluator 'python3 evaluator.py' solution.py
    Begin it, and look later:
      ID=$(tawebeval evaluate --detach --evaluator ./evaluate solution.py)
      tawebeval follow $ID
    Run a daemon for the programs of this machine:
      tawebeval serve

    \b
    The exit status of evaluate, try and follow is
      0    the evaluation has come to a good end
      1    it has not: the last line says why
      2    the command is wrong, the server refuses it, or something could not be written
      3    the server could not be reached
      130  interrupted before the evaluation had begun, or while following
      141  nobody reads what is printed
      143  ended by SIGTERM; 129 by SIGHUP
    """  # noqa: D301  (\b keeps click from filling the lines)


for command in (evaluate, try_, follow, status, cancel, list_, serve, doctor, quota, reload, token):
    main.add_command(command)
