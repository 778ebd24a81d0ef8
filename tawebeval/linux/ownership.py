"""Owners and modes of files: the daemon's directories, and secret files.

Secret files are tokens, credentials and signing keys. They are read here, and the operator is
warned of a file that every user of the machine can read.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shlex
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from tawebeval.errors import ConfigurationError, SetupProblem


def check_owner(directory: Path, names: Iterable[str]) -> None:
    """Check that the effective user owns `directory` and the entries `names` in it.

    The directory may also be root's and open to that user, as volumes of containers are. The path
    may be a symbolic link, such as that of systemd's DynamicUser=. Raises: ConfigurationError, with
    a remedy.
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
                raise ConfigurationError(_foreign(path, owner, get_user_name(uid), directory))


def _foreign(path: Path, owner: int, user: str, whole: Path | None = None) -> str:
    remedy = shlex.join(["chown", "-R", "--no-dereference", f"{user}:", str(whole or path)])
    return (
        f"{path} belongs to {get_user_name(owner)}, and the daemon runs as {user}; "
        f"to give it to {user}: {remedy}"
    )


def build_directory_install_command(directory: Path, user: str) -> str:
    """Return the shell command by which root makes a directory for a user."""
    return shlex.join(["install", "-d", "-m", "700", "-o", user, str(directory)])


def can_others_write(status: os.stat_result) -> bool:
    """Tell whether others than its owner may write to a file.

    A group that is the owner's alone, as Debian makes one for each user, gives it to nobody.
    """
    if not status.st_mode & stat.S_IWGRP or status.st_mode & stat.S_IWOTH:
        return bool(status.st_mode & stat.S_IWOTH)
    try:
        user, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    is_own = user.pw_gid == group.gr_gid and user.pw_name == group.gr_name
    return not is_own or bool(set(group.gr_mem) - {user.pw_name})


def get_user_name(uid: int) -> str:
    """Return the name of a user, or its number if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def get_home(uid: int) -> str:
    """Return the home directory of a user by passwd(5); "/" for a user without an entry there."""
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return "/"


_OTHERS_MODE = 0o007  # the mode bits that give every user of the machine access to a file

Content = TypeVar("Content")


def read_secret_file(path: Path, parse: Callable[[str], Content]) -> Content:
    """Return `parse(text)` of a UTF-8 file. Blocks.

    Raises: ConfigurationError, with the path; also for a ConfigurationError of `parse`.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: not UTF-8") from None
    except OSError as error:
        what = f"{path}: cannot read the file: {error.strerror}"
        raise ConfigurationError(f"{what}{_find_hint(path, error)}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _find_hint(path: Path, error: OSError) -> str:
    if not isinstance(error, PermissionError):
        return ""
    user = get_user_name(os.geteuid())
    if str(path.parent) == os.environ.get("CREDENTIALS_DIRECTORY"):
        return (
            f" to systemd's copy (LoadCredential={path.name}:FILE); name FILE in the configuration"
            f" instead, and let the user {user} read it: chown, chmod"
        )
    return f"; let the user {user} read the file: chown, chmod"


def find_secret_file(
    configured: str, credential: str, environment: Mapping[str, str]
) -> Path | None:
    """Return the path of a secret file: the configured one, or a credential of systemd's.

    `credential` is the name that systemd uses (LoadCredential=), `environment` the daemon's. None:
    there is neither. Raises: ConfigurationError, if the credential cannot be looked up.
    """
    if configured:
        return Path(configured).absolute()
    folder = environment.get("CREDENTIALS_DIRECTORY")
    if not folder:
        return None
    given = Path(folder, credential)
    try:
        return given if given.exists() else None
    except OSError as error:  # treating it as missing could admit everybody
        raise ConfigurationError(f"{given}: cannot read the file: {error.strerror}") from None


def find_readable_by_others_problem(path: Path, mode: int) -> SetupProblem | None:
    """Return the problem of a secret file whose `mode` gives every user of the machine access."""
    if not mode & _OTHERS_MODE:
        return None
    what = f"{path}: every user of this machine can read the file"
    return SetupProblem(what, f"chmod o= {shlex.quote(str(path))}")


def warn_of_file_readable_by_others(path: Path, mode: int, setting: str) -> None:
    """Warn if `mode` gives every user access to the file that `setting` names."""
    # Imported late: the command reads token files without Twisted.
    from twisted.logger import Logger

    problem = find_readable_by_others_problem(path, mode)
    if problem is not None:
        Logger().warn("{setting}: {problem}", setting=setting, problem=str(problem))
