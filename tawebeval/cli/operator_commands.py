"""The commands of an operator: `serve`, `starter`, `doctor`, `token`, `environment`."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from tawebeval.cli.options import CONFIG_OPTION, USER_OPTION, exit_on_errors
from tawebeval.errors import ConfigurationError

_COLOURS = ("green", "yellow", "red")
_STARTER_DIRECTORY = "/run/tawebeval-starter"

_WEAKER = (
    "the daemon starts, and you can try it; mend what is weaker before other people submit programs"
)


@click.command()
@CONFIG_OPTION
@USER_OPTION
@click.option(
    "--listen",
    "-l",
    multiple=True,
    metavar="ENDPOINT",
    help="Listen on this endpoint, such as tcp:8080:interface=127.0.0.1; may be repeated.",
)
def serve(config: Path | None, listen: tuple[str, ...]) -> None:
    """Run the daemon in the foreground, until Ctrl-C or SIGTERM.

    The command is the same as `twistd --nodaemon tawebeval`. It logs to stdout. Without --config
    it listens on http://127.0.0.1:8080 and fetches evaluators over https only. Run it as an
    ordinary user; as root, with --user.

    \b
      tawebeval serve
      tawebeval serve --config /etc/tawebeval/tawebeval.toml
      tawebeval serve --listen tcp:8123:interface=127.0.0.1
    """  # noqa: D301
    # Imported late: they import the reactor.
    from twisted.scripts.twistd import ServerOptions, runApp  # type: ignore[attr-defined]

    from twisted.plugins.tawebeval_plugin import tawebeval as plugin

    # A search for all plugins would write a cache beside the code, where users may not.
    name, plugins = plugin.tapname, {plugin.tapname: plugin}
    subcommands = [(name, None, plugin.options, plugin.description)]
    members = {"loadedPlugins": plugins, "subCommands": subcommands}
    options: Any = type("Options", (ServerOptions,), members)()
    given = ["--config", str(config)] if config else []
    for endpoint in listen:
        given += ["--listen", endpoint]
    # twistd changes to the working directory, which may be closed to the user of --user.
    place = "." if os.access(".", os.X_OK) else "/"
    options.parseOptions(["--nodaemon", "--pidfile=", "--rundir", place, name, *given])
    runApp(options)
    raise SystemExit(options.subOptions.get_exit_status())


@click.command()
@USER_OPTION
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    help="Listen at this path, in a directory that only the user may enter; by default at"
    " $RUNTIME_DIRECTORY/socket or /run/tawebeval-starter/socket.",
)
def starter(socket: Path | None) -> None:
    """Start evaluators, which go on while the daemon restarts.

    The systemd unit tawebeval-starter.service runs this command, and the daemon uses the starter at
    the path TAWEBEVAL_STARTER of its environment. When the starter ends, so do running evaluations.
    Run it as the user of the daemon; as root, with --user.

    \b
      mkdir -m 700 ~/starter
      tawebeval starter --socket ~/starter/socket &
      TAWEBEVAL_STARTER=~/starter/socket tawebeval serve
    """  # noqa: D301
    # Imported late: they import much of the daemon.
    from tawebeval.linux.cgroups import open_cgroups
    from tawebeval.linux.privileges import check_user_and_locale, drop_capabilities
    from tawebeval.linux.starter_client import execute_starter

    folder = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    path = socket or Path(folder or _STARTER_DIRECTORY, "socket")
    with exit_on_errors():
        check_user_and_locale("tawebeval starter")
        cgroups = open_cgroups(f"starter-{os.getpid()}")
        drop_capabilities()
        execute_starter(path, cgroups.encode_parent_json(), os.environ)


@click.command()
@CONFIG_OPTION
@USER_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def doctor(config: Path | None, as_json: bool) -> None:
    """Check that the daemon can run here and is protected.

    Start doctor as you start the daemon: as the same user, with the same --config, STATE_DIRECTORY
    and CACHE_DIRECTORY. Doctor changes nothing. It checks the limits of this shell, and those of
    the starter; a systemd service logs its own limits when it starts. To check the systemd
    service, use the systemd-run command in docs/install.md.

    \b
    Each part is
      ok       as it should be
      weaker   the daemon runs, but protects less than it could
      broken   the daemon does not start, or secrets are readable by others
    The exit status is
      0        all parts are ok
      1        a part is weaker
      2        a part is broken
    """  # noqa: D301  (\b keeps click from filling the lines)
    # Imported late: they import all that the daemon does.
    from tawebeval.daemon.doctor import Severity, examine_system

    worst = Severity.OK
    found = []
    for finding in examine_system(config, os.environ):
        worst = max(worst, finding.severity)
        if as_json:
            found.append(
                {
                    "part": finding.component,
                    "health": finding.severity.name.lower(),
                    "what": finding.description,
                    "remedy": finding.remedy,
                }
            )
            continue
        colour = _COLOURS[finding.severity]
        health = click.style(f"{finding.severity.name.lower():<7}", fg=colour)
        click.echo(f"{health} {finding.component:<14}{finding.description}")
        if finding.remedy:
            click.echo(f"{'':<22}-> {finding.remedy}")
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    elif worst is Severity.WEAKER:
        click.echo(_WEAKER, err=True)
    raise SystemExit(int(worst))


@click.group("token")
def token_commands() -> None:
    """Manage the tokens of callers.

    \b
    1. Run `tawebeval token add alice`. It writes a hash of the token to the file of tokens:
       /etc/tawebeval/tokens, which the systemd unit loads, or --file FILE for a file that the
       configuration names:
         [callers]
         tokens = "FILE"
    2. Run `systemctl restart tawebeval` if the unit loads the file. If the configuration names
       it, run `systemctl reload tawebeval` or send SIGHUP.
    3. Give the token to alice. Her client sends it with each request:
         curl -H "Authorization: Bearer TOKEN" ...

    A caller may have several tokens. To replace a token, add the new one first, and revoke the old
    one later, by its hash.
    """  # noqa: D301  (\b keeps click from filling the lines)


_FILE_OPTION = click.option(
    "--file",
    "-f",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default="/etc/tawebeval/tokens",
    show_default=True,
    help="The file of tokens.",
)
_RELOAD_HINT = "for the daemon: `systemctl restart tawebeval`, or reload if callers.tokens names it"


def _edit_token_file(path: Path, edit: Callable[[str], str]) -> None:
    """Replace the text of the file by the result of `edit`; a new file is the owner's alone.

    Commands that edit files of one directory take turns, and readers find the old or the new text.
    The file keeps its mode and owner. Raises: ConfigurationError, OSError.
    """
    import fcntl

    real = Path(os.path.realpath(path))
    new = real.with_name(f".{real.name}.new")
    folder = os.open(real.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with ExitStack() as last:
        last.callback(os.close, folder)
        fcntl.flock(folder, fcntl.LOCK_EX)
        # Not before: until then the file is that of another command.
        last.callback(new.unlink, missing_ok=True)
        text = _read_token_file(real) if real.exists() else ""
        edited = edit(text)
        new.unlink(missing_ok=True)  # of a command that was killed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(new, flags, 0o600), "w", encoding="utf-8", newline="") as file:
            if real.exists():
                found = real.stat()
                if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), found.st_uid, found.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))
            file.write(edited)
            file.flush()
            os.fsync(file.fileno())
        if text != (_read_token_file(real) if real.exists() else ""):
            raise ConfigurationError("another program has changed the file", "try again")
        new.replace(real)
        os.fsync(folder)


def _read_token_file(path: Path) -> str:
    """Return the text of the file. Raises: ConfigurationError, OSError."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        raise ConfigurationError("is not UTF-8") from None


@token_commands.command("add")
@click.argument("name")
@_FILE_OPTION
@click.option(
    "--group",
    metavar="GROUP",
    help="Make NAME a member of GROUP, whose supervisors see NAME's evaluations.",
)
@click.option(
    "--supervise",
    "supervised_groups",
    metavar="GROUP",
    multiple=True,
    help="Permit to read, cancel, share and rerun the evaluations of the members of GROUP, and to"
    " submit at any time; may be repeated.",
)
@click.option(
    "--problem",
    "problems",
    metavar="PROBLEM",
    multiple=True,
    help="Permit submissions for this problem of the configuration only; may be repeated.",
)
@click.option(
    "--read",
    is_flag=True,
    help="Permit only to read what NAME submits with another token; this discards no events.",
)
@click.option(
    "--shared",
    is_flag=True,
    help="Do not let this token list evaluations: many people use it, such as on a web page.",
)
@click.option(
    "--rate",
    metavar="N",
    type=click.IntRange(1, 999_999),
    help="Limit the token to N requests per minute of its own.",
)
def add_token(
    name: str, path: Path, read: bool, shared: bool, rate: int | None, **options: Any
) -> None:
    """Make a token for the caller NAME, and add its hash to the file of tokens.

    The token is printed once and not stored. NAME has up to 64 of the characters A-Z a-z 0-9 . _ @
    - and identifies the caller. Only supervisors of its group can see the evaluations of NAME: a
    token for somebody else who only looks has the same NAME, and --read.

    \b
      tawebeval token add teacher --supervise algo1
      tawebeval token add ann --group algo1 --problem inversions --problem word_count
    """  # noqa: D301
    # Imported late: other commands do without hashlib.
    from tawebeval.core.tokens import generate_token, parse_tokens

    try:
        made, line = generate_token(
            name,
            os.urandom,
            is_read_only=read,
            is_shared=shared,
            requests_per_minute=rate,
            **options,
        )
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None

    def append(text: str) -> str:
        edited = "".join((text, "\n" if text and not text.endswith("\n") else "", line, "\n"))
        parse_tokens(edited)  # or the daemon would refuse it
        return edited

    with exit_on_errors(path):
        _edit_token_file(path, append)
    click.echo(f"added to {path}; {_RELOAD_HINT}", err=True)
    click.echo("the token, which is not stored anywhere:", err=True)
    click.echo(made)


@token_commands.command("list")
@_FILE_OPTION
def list_tokens(path: Path) -> None:
    """List the tokens of the file: NAME, beginning of the SHA-256, and what the token permits."""
    from tawebeval.core.tokens import parse_tokens

    with exit_on_errors(path):
        found = parse_tokens(_read_token_file(path))
    for one in found.tokens:
        name, _, *words = one.file_line.split(" ")
        click.echo(f"{name:<24} {one.digest.hex()[:12]} {' '.join(words)}".rstrip())


@token_commands.command("revoke")
@click.argument("name")
@click.option(
    "--hash",
    "digest_prefix",
    metavar="HEX",
    default="",
    help="Revoke only the token whose hash begins so (`tawebeval token list`).",
)
@_FILE_OPTION
def revoke_token(name: str, digest_prefix: str, path: Path) -> None:
    """Remove all tokens of the caller NAME from the file of tokens.

    They work until the daemon reads the file again, which then ends their requests and streams.
    """
    from tawebeval.core.tokens import remove_token_lines

    with exit_on_errors(path):
        _edit_token_file(path, lambda text: remove_token_lines(text, name, digest_prefix.lower()))
    click.echo(f"revoked in {path}; {_RELOAD_HINT}", err=True)


@click.group("environment")
def environment_commands() -> None:
    """Manage toolchains that a request may choose by name.

    An environment is a root file system, such as a Debian with another Python. Evaluators and
    submissions see it in place of the machine's /usr. Run this as the daemon's user, or as root,
    with the daemon's STATE_DIRECTORY.

    \b
      mmdebstrap --variant=minbase --include=python3,default-jdk-headless trixie java.tar
      export STATE_DIRECTORY=/var/lib/tawebeval
      tawebeval environment import java java.tar
    """  # noqa: D301


@environment_commands.command("import")
@click.argument("name")
@click.argument(
    "archive", metavar="ROOT.tar", type=click.Path(path_type=Path, exists=True, resolve_path=True)
)
@CONFIG_OPTION
def import_environment(name: str, archive: Path, config: Path | None) -> None:
    """Make an environment from ROOT.tar, and print its table for the configuration.

    ROOT.tar is a tar archive of a root directory; it may be compressed. mmdebstrap, `podman export`
    and `docker export` make such archives. The root must have /bin/sh and prlimit (util-linux). A
    second import of the same archive makes no copy.

    \b
      podman create --name python docker.io/library/python:3.14-slim
      podman export --output python.tar python
      tawebeval environment import python3.14 python.tar
    """  # noqa: D301
    # Imported late: they import much of the daemon.
    from tawebeval.config import parse_configuration
    from tawebeval.daemon.configuration import locate_directories, read_configuration
    from tawebeval.linux.privileges import become_user, drop_capabilities, get_user_name
    from tawebeval.sandbox.environments import import_root, locate_environment_store

    with exit_on_errors():
        min_free_bytes = read_configuration(config).limits.free_disk_for_readiness
        state = locate_directories(os.environ)[0].resolve()
        if not state.is_dir():
            raise ConfigurationError(
                f"{state}, the state directory, does not exist",
                "start the daemon once, or set the STATE_DIRECTORY of the daemon",
            )
        if os.geteuid() == 0:
            become_user(get_user_name(state.stat().st_uid))
        drop_capabilities()
        store = locate_environment_store(state)
        quoted = f'"{name}"' if "." in name else name
        table = f'[environments.{quoted}]\nroot = "{store}/sha256-"\n'
        parse_configuration(table)  # checks the name before the work
        root = import_root(archive, store, min_free_bytes)
    for warning in root.warnings:
        click.echo(f"tawebeval: warning: {warning}", err=True)
    found = "imported" if root.was_added else "imported already"
    click.echo(f"{found}: {root.path.name}", err=True)
    click.echo("add to the configuration, then run `systemctl reload tawebeval`:", err=True)
    click.echo(table.replace("sha256-", root.path.name), nl=False)
