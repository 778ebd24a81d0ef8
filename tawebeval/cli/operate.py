"""What an operator does: run the daemon, look whether it can run, reload it, make tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import attrs
import click

from tawebeval.core.tokens import new_token
from tawebeval.errors import ConfigurationError

_COLOURS = ("green", "yellow", "red")
_ORDERS = Path("/run/tawebeval/control")  # where the unit has it
_PATIENCE = 60.0  # seconds for files that come from far away

CONFIG = click.option(
    "--config",
    "-c",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Configuration file (TOML); without one, defaults hold.",
)


@click.command()
@CONFIG
@click.option(
    "--listen",
    "-l",
    multiple=True,
    metavar="ENDPOINT",
    help="Where to listen, such as tcp:8080:interface=127.0.0.1; may be repeated.",
)
def serve(config: Path | None, listen: tuple[str, ...]) -> None:
    """Run the daemon in the foreground, until Ctrl-C or SIGTERM.

    It is the same as `twistd --nodaemon tawebeval`, and logs to stdout. Without a configuration it
    listens on http://127.0.0.1:8080, and fetches evaluators over https only. Root has to say by
    service.user, in a configuration, whom the daemon shall become.

    \b
      tawebeval serve
      tawebeval serve --config /etc/tawebeval/tawebeval.toml
      tawebeval serve --listen tcp:8123:interface=127.0.0.1
    """  # noqa: D301
    # Imported late: it imports the reactor.
    from twisted.scripts.twistd import ServerOptions, runApp  # type: ignore[attr-defined]

    options = ServerOptions()
    given = ["--config", str(config)] if config else []
    for endpoint in listen:
        given += ["--listen", endpoint]
    options.parseOptions(["--nodaemon", "--pidfile=", "tawebeval", *given])
    runApp(options)


@click.command()
@CONFIG
@click.option("--json", "as_json", is_flag=True, help="Print a list of findings for programs.")
def doctor(config: Path | None, as_json: bool) -> None:
    """Look whether the daemon can run here, and how well it is protected.

    Run it as the daemon is started: by the same user (root, if it is root that starts it),
    with the same configuration, STATE_DIRECTORY and CACHE_DIRECTORY. It changes nothing. What
    it says of limits and descriptors holds for where it is run itself; of a service of systemd
    the log tells at the start what holds there. To look as its user does, who is there only while
    it runs, use the command that docs/operations.md has under "Is it well?".

    \b
    Each part is
      ok       as it should be
      weaker   the daemon runs, and protects less than it could
      broken   the daemon does not start, or secrets lie open
    The exit status is 0 if all is ok, 1 if something is weaker, 2 if something is broken.
    """  # noqa: D301  (\b keeps click from filling the lines)
    # Imported late: they import all that the daemon does.
    from tawebeval.daemon.doctor import examine
    from tawebeval.daemon.findings import Severity

    worst = Severity.OK
    found = []
    for finding in examine(config, os.environ):
        worst = max(worst, finding.health)
        if as_json:
            found.append({**attrs.asdict(finding), "health": finding.health.name.lower()})
            continue
        colour = _COLOURS[finding.health]
        health = click.style(f"{finding.health.name.lower():<7}", fg=colour)
        click.echo(f"{health} {finding.part:<14}{finding.what}")
        if finding.remedy:
            click.echo(f"{'':<22}-> {finding.remedy}")
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    raise SystemExit(int(worst))


@click.command()
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    help="Where the daemon takes orders; $RUNTIME_DIRECTORY/control, or that of the unit.",
)
@click.option(
    "--copied",
    multiple=True,
    metavar="NAME:FILE",
    help="A file that systemd hands over (LoadCredential=NAME:FILE): where it has changed, and the "
    "daemon has its copy, the reload is refused. May be repeated; root alone can look.",
)
def reload(socket: Path | None, copied: tuple[str, ...]) -> None:
    """Have a daemon under systemd read its files again, and wait until it has.

    These are the configuration, and the files of tokens and secrets. With a mistake in any of them
    nothing is changed. It is what `systemctl reload tawebeval` runs, as root or as the daemon's own
    user. A daemon without systemd takes no orders: send it SIGHUP, and see its log.

    \b
    The exit status is
      0    all was read; what counts only after a restart is named
      1    something is wrong with a file, or it needs a restart: all is as it was before
      3    there is no daemon, or it does not answer
    """  # noqa: D301  (\b keeps click from filling the lines)
    # Imported late: it imports what services are made of.
    from tawebeval.daemon.control import find_socket, order_reload

    try:
        place = socket or find_socket(os.environ) or _ORDERS
        outcome = order_reload(place, _PATIENCE, dict(_originals(copied)))
    except ConfigurationError as error:
        click.echo(f"tawebeval: {error}", err=True)
        raise SystemExit(3) from None
    for said in outcome.problems or outcome.notes:
        click.echo(f"tawebeval: {said}", err=True)
    raise SystemExit(1 if outcome.problems else 0)


def _originals(copied: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of what systemd hands over, and digests of the files as they are now."""
    from tawebeval.linux.secretfiles import digest

    for one in copied:
        name, _, path = one.partition(":")
        file = Path(path)
        with suppress(OSError):  # who may not look tells nothing of it
            if file.is_file() or not file.exists():  # what a pipe has can be read only once
                yield name, digest(file)


@click.group()
def token() -> None:
    """Tokens, by which callers show who they are.

    \b
    1. tawebeval token new alice
    2. put the line that it prints into /etc/tawebeval/tokens, which the systemd unit hands over;
       without the unit into the file which the configuration names:
         [callers]
         tokens = "/etc/tawebeval/tokens"
    3. have the daemon read it again: systemctl restart tawebeval where the unit hands it over,
       systemctl reload tawebeval or SIGHUP where the configuration names it
    4. give the token to alice, who sends it with each request:
         curl -H "Authorization: Bearer TOKEN" ...

    To take a token away, remove its line, and the same again. A caller may have several
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


@click.command()
@CONFIG
@click.option(
    "--first-project",
    type=click.IntRange(1, 2**31),
    default=1_000_000,
    show_default=True,
    help="The project of the first evaluation; each other has the next number.",
)
def quota(config: Path | None, first_project: int) -> None:
    """Have the file system bound what each evaluation writes, as root.

    It makes a directory for each evaluation that may run at once, in $STATE_DIRECTORY/quotas, and
    gives each a project quota. The file system has to be ext4 or xfs, mounted with prjquota, from
    Linux 5.14 on. Run it before the daemon starts, and again after a change of evaluations.running,
    limits.disk, limits.disk_files, repositories.tree_bytes or repositories.tree_files. Two daemons
    with one file system need different projects.

    \b
      STATE_DIRECTORY=/var/lib/tawebeval tawebeval quota --config /etc/tawebeval/tawebeval.toml
    """  # noqa: D301  (\b keeps click from filling the lines)
    # Imported late: they import much of the daemon.
    from tawebeval.daemon.reconfiguring import read_configuration
    from tawebeval.daemon.state import locate
    from tawebeval.linux.kernel import Process
    from tawebeval.sandbox.project_quotas import prepare_quotas, quota_of

    try:
        configuration = read_configuration(config)
        state, _ = locate(os.environ)
        count = prepare_quotas(state, configuration, first_project, Process())
    except ConfigurationError as error:
        click.echo(f"tawebeval: {error}", err=True)
        raise SystemExit(2) from None
    each = quota_of(configuration)
    click.echo(f"{state}/quotas: {count} times {each.size} bytes and {each.files} files")
