"""Users and their rights: those of the daemon, and those of its files.

The daemon never runs as root, and keeps no right that it does not need:

1. `check_user_and_locale` ends every command that runs evaluators or git, before it reads anything.
2. `become_user` (the option --user) lets root run the command again, as another user; below a
   directory that only root can read, root imports all modules, and then becomes the user.
3. `drop_capabilities`: once the endpoints are open, no program that the daemon starts has or gains
   any right.

The rights that prctl(2) and capset(2) take away are the calling thread's, so there must be no other
thread.

Its directories have to be its own (`check_owner`). Secret files are tokens, credentials and signing
keys. They are read here (`parse_text_file`), and the operator is warned of a file that every user
of the machine can read. `ReloadableFiles` are files that a reload of the daemon reads again.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pkgutil
import pwd
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import attrs

from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.linux.kernel_files import call_libc, prctl

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

# For traces and reports of errors.
_LATE_EXTRAS = (
    "concurrent.futures.thread",
    "netrc",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.trace.propagation.tracecontext",
    "requests",
    "sentry_sdk.integrations.logging",
    "sentry_sdk.spotlight",
)


def check_user_and_locale(command: str = "tawebeval serve") -> None:
    """Hold that no user of this process is root, and file names are UTF-8, as evaluators get them.

    Raises: ConfigurationError, with the `command`.
    """
    if (encoding := sys.getfilesystemencoding()) != "utf-8":
        what = f"the locale has file names in {encoding}, not in UTF-8"
        raise ConfigurationError(what, "set LC_ALL=C.UTF-8")
    if 0 in os.getresuid():
        raise ConfigurationError(
            "evaluators and git do not run as root: run as an ordinary user",
            f"as root: {command} --user NAME",
        )


def drop_capabilities() -> None:
    """Drop all capabilities and the effect of setuid bits. Raises: SystemExit.

    A sandbox that works by user namespaces needs neither. Other processes of the user cannot trace
    this one or read its memory.
    """
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    try:
        call_libc("capset", header, (ctypes.c_uint32 * 6)())
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
    set_process_user(user)
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


def set_process_user(user: pwd.struct_passwd) -> None:
    """Import all modules of tawebeval, which the user may not read, and become the user for good.

    The working directory stays, and is the user's to read even if the directories above are not.
    """
    for name in ("tawebeval", "tawebeval_client"):
        _import_all(importlib.import_module(name))
    for name in _LATE_IMPORTS:
        importlib.import_module(name)
    if any(name.startswith(("OTEL_", "SENTRY_DSN")) for name in os.environ):
        for name in _LATE_EXTRAS:
            with contextlib.suppress(ImportError):  # which is logged at the start
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


def parse_text_file(path: Path, parse: Callable[[str], Content]) -> Content:
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


@attrs.frozen
class ReloadableFiles(Generic[Content]):
    """Files that a reload reads again, with the callbacks to read and to apply their content.

    `name` is the setting that names the files, or a description. `read_files` blocks, changes
    nothing and raises ConfigurationError. `apply_content` must not fail. `make_operator_notes`
    returns remarks for the operator on a content, such as settings that need a restart: sentences
    without a full stop.
    """

    name: str
    paths: Sequence[Path]
    read_files: Callable[[], Content]
    apply_content: Callable[[Content], None]
    make_operator_notes: Callable[[Content], Sequence[str]] = lambda _: ()


class ReloadableFilesOwner(Protocol):
    """Object that has reloadable files."""

    def list_reloadable_files(self) -> Iterable[ReloadableFiles[Any]]:
        """Return the reloadable files."""
