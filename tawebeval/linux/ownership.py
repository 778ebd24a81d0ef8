"""Directories that root makes for the daemon's user, without being led astray by it.

Whoever may write to a directory on the way to a path decides what the path leads to. So root
goes step by step from `/`, through directories only that are root's and nobody else's to write
to, and follows no symbolic link. Everything else is left to the user itself, or to the operator.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import stat
from collections.abc import Iterable
from pathlib import Path

from tawebeval.errors import ConfigurationError
from tawebeval.linux.privileges import User

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def give(directory: Path, user: User) -> None:
    """Make a directory as root and give it to `user`; an empty one of root's is given, too.

    One that the user owns stays as it is. Raises ConfigurationError for any other, and where
    the way there is not root's alone; OSError.
    """
    *parents, name = Path(os.path.abspath(directory)).parts
    with contextlib.ExitStack() as opened:

        def enter(part: str, parent: int | None = None) -> int:
            descriptor = os.open(part, _DIRECTORY, dir_fd=parent)
            opened.callback(os.close, descriptor)
            return descriptor

        try:
            place = None
            for part in parents:
                place = enter(part, place)
                _check_way(directory, part, os.fstat(place), user)
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=place)
            made = enter(name, place)
        except OSError as error:  # which would name a part of the path only
            raise ConfigurationError(
                f"{directory}: root does not make it for {user.name}: {error.strerror}; "
                f"{_by_hand(directory, user)}"
            ) from None
        owner = os.fstat(made).st_uid
        if owner == user.uid:
            return
        if owner != 0 or os.listdir(made):
            raise ConfigurationError(_foreign(directory, owner, user.name))
        os.fchown(made, user.uid, user.gid)


def _check_way(directory: Path, part: str, status: os.stat_result, user: User) -> None:
    if not is_roots_alone(status):
        raise ConfigurationError(
            f"{directory}: root does not make it for {user.name}, for others may write to "
            f"{part!r} on the way there; {_by_hand(directory, user)}"
        )


def check_owner(directory: Path, names: Iterable[str]) -> None:
    """Make sure that what has these names in a directory is the effective user's.

    The directory itself is so, too, or root's and open to that user, as volumes of containers
    are. The path may be a link of anybody's: systemd's DynamicUser= has one of root's. Raises
    ConfigurationError with a remedy.
    """
    uid = os.geteuid()
    directory = directory.resolve()
    paths = [directory / name for name in names]
    opened = os.access(directory, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)
    if not opened or directory.stat().st_uid != 0:
        paths.insert(0, directory)
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            owner = path.lstat().st_uid
            if owner != uid:
                raise ConfigurationError(_foreign(path, owner, name_of(uid), directory))


def _foreign(path: Path, owner: int, user: str, whole: Path | None = None) -> str:
    remedy = shlex.join(["chown", "-R", "--no-dereference", f"{user}:", str(whole or path)])
    return (
        f"{path} belongs to {name_of(owner)}, and the daemon runs as {user}; if that may have it: "
        f"{remedy}"
    )


def _by_hand(directory: Path, user: User) -> str:
    return f"name another directory, or make it: {install_command(directory, user.name)}"


def install_command(directory: Path, user: str) -> str:
    """Return the shell command by which root makes a directory for a user."""
    return shlex.join(["install", "-d", "-m", "700", "-o", user, str(directory)])


def is_roots_alone(status: os.stat_result) -> bool:
    """Tell whether only root can put something into a directory, or take others' out of it."""
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == 0 and (not others or bool(status.st_mode & stat.S_ISVTX))


def name_of(uid: int) -> str:
    """Return the name of a user, its number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
