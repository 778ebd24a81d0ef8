"""`tawebeval`: what an operator does beside the daemon, which is `twistd tawebeval`."""

from __future__ import annotations

import os

import click

from tawebeval import __version__
from tawebeval.callers import new_token
from tawebeval.errors import ConfigurationError


@click.group()
@click.version_option(__version__, message="tawebeval %(version)s")
def main() -> None:
    """Tools for the operator of tawebeval.

    The daemon itself is started by: twistd -n tawebeval --config FILE
    """


@main.group()
def token() -> None:
    """Tokens, by which callers show who they are.

    \b
    1. tawebeval token new alice
    2. put the line that it prints into the file which the configuration names:
         [callers]
         tokens = "/etc/tawebeval/tokens"
    3. have the daemon read it again: systemctl reload tawebeval, or SIGHUP
    4. give the token to alice, who sends it with each request:
         curl -H "Authorization: Bearer TOKEN" ...

    To take a token away, remove its line and reload. A caller may have several
    lines: add the new one first, remove the old one later.
    """  # noqa: D301  (\b keeps click from filling the lines)


@token.command()
@click.argument("name")
def new(name: str) -> None:
    """Make a token for the caller NAME.

    It is printed once and kept nowhere: only its hash goes into the daemon's file, and
    nobody can get back from that to the token. NAME has up to 64 of the characters
    A-Z a-z 0-9 . _ @ - and is how the callers are told apart: what one begins, others cannot see.
    """
    try:
        made, line = new_token(name, os.urandom)
    except ConfigurationError as error:
        raise click.BadParameter(str(error), param_hint="NAME") from None
    click.echo(f"The token of {name}, which is shown only now:\n\n    {made}\n")
    click.echo(f"The line for the file of tokens:\n\n    {line}")
