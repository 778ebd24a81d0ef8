"""`tawebeval environment`: import, list and remove root file systems for evaluators."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tawebeval.cli.operator_commands import CONFIG_OPTION
from tawebeval.errors import ConfigurationError, format_size

if TYPE_CHECKING:
    from tawebeval.config import Configuration
    from tawebeval.sandbox.environments import EnvironmentStore


@click.group()
def environment() -> None:
    """Manage toolchains that a request may choose by name.

    An environment is a root file system, such as a Debian with another Python. Evaluators and
    submissions see it in place of the machine's /usr. Run these commands as the daemon's user, or
    as root, with the daemon's STATE_DIRECTORY.

    \b
      mmdebstrap --variant=minbase --include=python3,default-jdk-headless trixie java.tar
      export STATE_DIRECTORY=/var/lib/tawebeval
      tawebeval environment import java java.tar
    """  # noqa: D301


@environment.command("import")
@click.argument("name")
@click.argument(
    "archive", metavar="ROOT.tar", type=click.Path(path_type=Path, exists=True, resolve_path=True)
)
@CONFIG_OPTION
def import_(name: str, archive: Path, config: Path | None) -> None:
    """Make an environment from ROOT.tar, and print its table for the configuration.

    ROOT.tar is a tar archive of a root directory; it may be compressed. mmdebstrap, `podman export`
    and `docker export` make such archives. The root must have /bin/sh and prlimit (util-linux). A
    second import of the same archive makes no copy.

    \b
      podman create --name python docker.io/library/python:3.14-slim
      podman export --output python.tar python
      tawebeval environment import python3.14 python.tar
    """  # noqa: D301
    from tawebeval.config import parse_configuration

    with _open_store(config) as (_, store):
        quoted = f'"{name}"' if "." in name else name
        table = f'[environments.{quoted}]\nroot = "{store.directory}/sha256-"\n'
        parse_configuration(table)  # checks the name before the work
        root = store.import_root(archive)
        for warning in root.warnings:
            click.echo(f"tawebeval: warning: {warning}", err=True)
        found = "imported" if root.was_added else "the store has this archive already"
        click.echo(f"{found}: {root.digest}", err=True)
        click.echo("add to the configuration, then run `tawebeval reload`:", err=True)
        click.echo(table.replace("sha256-", root.digest), nl=False)


@environment.command("list")
@CONFIG_OPTION
def list_(config: Path | None) -> None:
    """List the imported roots: names in the configuration, digest, size."""
    with _open_store(config) as (configuration, store):
        roots = list(store.list_roots())
        if not roots:
            click.echo("no roots; `tawebeval environment import` makes one", err=True)
        for root, size in roots:
            names = [
                name
                for name, one in configuration.environments.items()
                if Path(one.root) == root.path
            ]
            click.echo(f"{', '.join(names) or '(unused)':<20} {root.digest} {format_size(size)}")


@environment.command()
@click.argument("digest")
@CONFIG_OPTION
def remove(digest: str, config: Path | None) -> None:
    """Remove the root with this DIGEST; its beginning is enough.

    A root that the configuration names or an evaluation uses is not removed.
    """
    with _open_store(config) as (configuration, store):
        for name, one in configuration.environments.items():
            if Path(one.root).name.startswith(digest):
                raise ConfigurationError(
                    f"environments.{name} uses this root",
                    "remove the table from the configuration, and run `tawebeval reload`",
                )
        store.remove_root(digest)


@contextmanager
def _open_store(config: Path | None) -> Iterator[tuple[Configuration, EnvironmentStore]]:
    """Yield configuration and store, as the daemon's user; errors end the command."""
    # Imported late: they import much of the daemon.
    from tawebeval.daemon.reload import read_configuration
    from tawebeval.daemon.startup import locate_directories
    from tawebeval.linux.filetree import describe_disk_error
    from tawebeval.linux.privileges import become_user, drop_privileges, get_user_name
    from tawebeval.sandbox.environments import EnvironmentStore, locate_store

    try:
        configuration = read_configuration(config)
        state = locate_directories(os.environ)[0].resolve()
        if not state.is_dir():
            raise ConfigurationError(
                f"{state}, the state directory, does not exist",
                "start the daemon once, or set the STATE_DIRECTORY of the daemon",
            )
        if os.geteuid() == 0:
            become_user(get_user_name(state.stat().st_uid))
        drop_privileges()
        yield (
            configuration,
            EnvironmentStore(locate_store(state), configuration.limits.free_disk_for_readiness),
        )
    except (ConfigurationError, OSError) as error:
        said = describe_disk_error(error) if isinstance(error, OSError) else error
        click.echo(f"tawebeval: {said}", err=True)
        raise SystemExit(2) from None
