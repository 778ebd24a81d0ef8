"""The daemon's privileges: it never runs as root, and keeps no right that it does not need.

1. `refuse_root` ends every command that runs evaluators or git, before it reads anything.
2. `become_user` (the option --user) lets root run the command again, as another user; below a
   directory that only root can read, root imports all modules, and then becomes the user.
3. `drop_privileges`: once the endpoints are open, no program that the daemon starts has or gains
   any right.

The rights that prctl(2) and capset(2) take away are the calling thread's, so there must be no other
thread.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pkgutil
import pwd
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from tawebeval.errors import ConfigurationError

_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_VERSION_3 = 0x20080522  # of capset's arguments: two words of 32 bits for each set

# Variables that are about the user or the session of root.
_ROOTS_VARIABLES = frozenset(
    {"HOME", "USER", "LOGNAME", "USERNAME", "SHELL", "MAIL", "PWD", "OLDPWD", "TMPDIR"}
)
_ROOTS_PREFIXES = ("XDG_", "SUDO_", "DBUS_", "SSH_")
_TRIAL = "import sys, tawebeval.cli.operator_commands; sys.exit(sys.version != sys.argv[1])"
_ANSWER_TIMEOUT = 60  # seconds for Python to import the command line

# Modules that functions import.
_LATE_IMPORTS = (
    "click._textwrap",  # for errors in options
    "click.shell_completion",
    "encodings.ascii",  # for lock files and /proc
    "encodings.idna",  # for host names
    "twisted.plugins.tawebeval_plugin",  # for serve
    "twisted.scripts.twistd",
)

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, argument: int = 0) -> int:
    """Set or get a property of this process (man 2 prctl). Raises: OSError."""
    zero = ctypes.c_ulong(0)
    return raise_on_error(_libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero))


def raise_on_error(result: int) -> int:
    """Return the result of a call of the C library. Raises: OSError with errno if it is below 0."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def refuse_root(command: str = "tawebeval serve") -> None:
    """Hold that no user of this process is root. Raises: ConfigurationError, with the `command`."""
    if 0 in os.getresuid():
        raise ConfigurationError(
            "evaluators and git do not run as root: run as an ordinary user",
            f"as root: {command} --user NAME",
        )


def drop_privileges() -> None:
    """Drop all capabilities and the effect of setuid bits. Raises: SystemExit.

    A sandbox that works by user namespaces needs neither. Other processes of the user cannot trace
    this one or read its memory.
    """
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    try:
        raise_on_error(_libc.capset(header, (ctypes.c_uint32 * 6)()))
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        prctl(_PR_SET_DUMPABLE, 0)
    except OSError as error:
        raise SystemExit(f"tawebeval: cannot drop capabilities: {error.strerror}") from None


def become_user(name: str) -> None:
    """Let root go on as another user; do nothing as that user.

    The command has no descriptor but stdin, stdout and stderr. Raises: ConfigurationError.
    """
    user = _find_user(name)
    if os.geteuid() == user.pw_uid:
        return
    if os.geteuid():
        raise ConfigurationError(
            f"--user: only root can run as {name!r}", "run the command as root, or without --user"
        )
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    environment = build_user_environment(user, os.environ)
    execute_as_user(user, sys.orig_argv, environment)
    switch_user(user)
    os.environ.clear()
    os.environ.update(environment)


def execute_as_user(
    user: pwd.struct_passwd, argv: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Execute a command of this Python as another user, by setpriv(1); return if it cannot run.

    So it is below a directory that only root can read.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return
    command = [
        *(setpriv, f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups"),
        *("--inh-caps=-all", "--", sys.executable),
    ]
    # setpriv starts a Python of root's, which then has no library, or that of another Python.
    tried = subprocess.run(
        [*command, "-P", "-c", _TRIAL, sys.version],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_ANSWER_TIMEOUT,
    )
    if tried.returncode == 0:
        os.execve(setpriv, [*command, *argv[1:]], environment)  # noqa: S606


def switch_user(user: pwd.struct_passwd) -> None:
    """Import all modules of tawebeval, which the user may not read, and become the user for good.

    The working directory stays, and is the user's to read even if the directories above are not.
    """
    _import_all(importlib.import_module("tawebeval"))
    for name in _LATE_IMPORTS:
        importlib.import_module(name)
    os.initgroups(user.pw_name, user.pw_gid)
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)


def _import_all(package: ModuleType) -> None:
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        if found.ispkg:
            _import_all(module)


def build_user_environment(user: pwd.struct_passwd, given: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a user, without what root's session says of root."""
    kept = {
        name: value
        for name, value in given.items()
        if name not in _ROOTS_VARIABLES and not name.startswith(_ROOTS_PREFIXES)
    }
    name = user.pw_name
    return {**kept, "HOME": user.pw_dir, "USER": name, "LOGNAME": name, "SHELL": user.pw_shell}


def _find_user(name: str) -> pwd.struct_passwd:
    """Return a user by name. Raises: ConfigurationError, if it is root or does not exist."""
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise ConfigurationError(
            f"--user: no user {name!r} on this machine",
            f"adduser --system --group --home /var/lib/{name} {name}",
        ) from None
    if user.pw_uid == 0 or 0 in {user.pw_gid, *os.getgrouplist(name, user.pw_gid)}:
        raise ConfigurationError(
            f"--user: {name!r} is root, or in the group of root", "name another user"
        )
    return user
