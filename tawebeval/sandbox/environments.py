"""Environments: root file systems that sandboxes show in place of the machine's own programs.

A root is a directory of the machine, made by an operator or by `environment_store`. Its content may
come from a stranger's archive. So no symbolic link in it is followed on the machine, and bwrap
mounts only its top-level directories, read-only. A root of the store has its digest as its name,
and is locked (flock(2)) while a daemon or an evaluation uses it, so that it is not removed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from tawebeval.config import Configuration, EnvironmentSettings
from tawebeval.core.form import DEFAULT_ENVIRONMENT_NAME
from tawebeval.errors import SetupProblem, format_size
from tawebeval.linux.filetree import add_path_to_errors

SHELL, LIMITER, PYTHON = "/bin/sh", "/usr/bin/prlimit", "/usr/bin/python3"
"""The programs in a root that the sandbox needs, and the one that the tools need."""

ACCOUNT_FILES = ("passwd", "group")
NETWORK_FILES = ("hosts", "resolv.conf")
"""Files of /etc that the sandbox puts over those of a root, if they are regular files there."""

SHELL_MOUNT_POINT = "/sh"
"""The path of the first process. busybox does by its own name what it shall do."""

# Directories of a root that are not shown: the sandbox has its own, or nobody has use for them.
_HIDDEN = frozenset(
    {"boot", "dev", "evaluation", "home", "init", "lost+found", "proc", "root", "run", "sh", "sys"}
    | {"tmp"}
)
_DIGEST = re.compile(r"sha256-[0-9a-f]{64}")
_MAX_MOUNTS = 256  # of one sandbox, for its system
_MAX_SHELL = 16 * 2**20  # bytes, which are read at once
_MAX_LINKS = 40  # as the kernel follows
_INSTALL = "install util-linux in it (Alpine: util-linux-misc)"
_DEFAULT_DESCRIPTION = "the machine's own programs"


@attrs.frozen
class Environment:
    """A configured root: its name, directory and variables; `digest` is None outside the store."""

    name: str
    root: Path
    variables: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def digest(self) -> str | None:
        """The digest of the content, by the name of the directory."""
        return find_stored_root_digest(self.root)


@attrs.frozen
class SystemView:
    """What a sandbox shows as its system.

    `bwrap_options` are options of bwrap. `shell` is a file that the evaluator may execute and not
    read; it is shown at `shell_mount_point`. `directory_names` are the top-level directories.
    """

    bwrap_options: Sequence[str]
    shell: Path
    shell_mount_point: str
    directory_names: Sequence[str] = ()


def find_environment(configuration: Configuration, name: str | None) -> Environment | None:
    """Return the environment of a request; None for the default. Raises: KeyError."""
    if name is None:
        return None
    settings = configuration.environments[name]
    return Environment(name, Path(settings.root), settings.variables)


def list_environments(
    environments: Mapping[str, EnvironmentSettings],
) -> list[dict[str, str | None]]:
    """Return what clients are shown of the environments, the default first."""
    return [
        {"name": DEFAULT_ENVIRONMENT_NAME, "description": _DEFAULT_DESCRIPTION, "digest": None},
        *(
            {
                "name": name,
                "description": one.description,
                "digest": find_stored_root_digest(Path(one.root)),
            }
            for name, one in environments.items()
        ),
    ]


def find_stored_root_digest(root: Path) -> str | None:
    """Return the digest of a root of the store by its name; None for another directory."""
    return root.name if _DIGEST.fullmatch(root.name) else None


def locate_in_root(root: Path, path: str) -> Path:
    """Return the machine's path for `path` in a root, with the root's links followed in it.

    Blocks. Raises: OSError.
    """
    waiting, place, links = path.split("/")[::-1], list[str](), 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            place = place[:-1]
        elif part not in ("", "."):
            here = root.joinpath(*place, part)
            if not stat.S_ISLNK(here.lstat().st_mode):
                place.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(here))
            target = os.readlink(here)
            place = [] if target.startswith("/") else place
            waiting += target.split("/")[::-1]
    return root.joinpath(*place)


def find_environment_root_problem(root: Path, readable: Sequence[str] = ()) -> SetupProblem | None:
    """Return why evaluators cannot run in a root; None if they can. Blocks.

    `readable` are the machine's paths that the sandbox shows besides.
    """
    if not root.is_dir() or root.is_symlink():
        return SetupProblem(
            f"{root} is not a directory", "`tawebeval environment list` lists roots"
        )
    for program, remedy in (
        (SHELL, "use a root file system with a shell"),
        (LIMITER, _INSTALL),
    ):
        try:
            found = locate_in_root(root, program)
            is_program = found.is_file() and os.access(found, os.X_OK | os.R_OK, effective_ids=True)
        except OSError:
            is_program = False
        if not is_program:
            return SetupProblem(f"{root} has no program {program}", remedy)
        if program == SHELL and found.stat().st_size > _MAX_SHELL:
            size, most = format_size(found.stat().st_size), format_size(_MAX_SHELL)
            return SetupProblem(f"{root}: {SHELL} is {size}; the limit is {most}", remedy)
    link = _find_link_above(root, readable)
    if link is not None:
        return SetupProblem(
            f"{link} is a symbolic link above a path of sandbox.readable",
            "use a root without that link, or another path",
        )
    return None


def make_system_view(
    root: Path, sandbox_files_directory: Path, readable: Sequence[str], *, network: bool
) -> SystemView:
    """Return the view of a root. Blocks. Raises: OSError.

    `sandbox_files_directory` is that of `write_sandbox_files`. `readable` are the machine's
    paths that the sandbox shows besides, for which a place is left.
    """
    link = _find_link_above(root, readable)
    if link is not None:
        raise OSError(errno.ELOOP, "symbolic link above a path of sandbox.readable", str(link))
    options: list[str] = []
    names = []
    for name in sorted(os.listdir(root)):
        if name in _HIDDEN or stat.S_ISREG((root / name).lstat().st_mode):
            continue
        names.append(name)
        options += _show(root / name, f"/{name}", readable)
    options += _cover(root, sandbox_files_directory, network=network)
    if len(options) > 3 * _MAX_MOUNTS:
        raise OSError(errno.E2BIG, "too many directories to mount", str(root))
    return SystemView(options, _copy_shell(root, sandbox_files_directory), SHELL_MOUNT_POINT, names)


def _find_link_above(root: Path, readable: Sequence[str]) -> Path | None:
    """Return a link of a root that bwrap would follow, on the machine, to mount a readable path."""
    for path in readable:
        for place in list(Path(path).parents)[-2::-1]:  # from the top
            if place.parts[1] in _HIDDEN or str(place) in readable:
                break  # the root's own is not shown
            here = root / place.relative_to("/")
            if os.path.islink(here):
                return here
    return None


def _show(path: Path, place: str, readable: Sequence[str]) -> Iterator[str]:
    """Yield the options that show a path of a root at `place`."""
    mode = path.lstat().st_mode
    if place in readable:
        return
    if stat.S_ISLNK(mode):
        yield from ("--symlink", os.readlink(path), place)
    elif stat.S_ISDIR(mode) and any(_lacks(path, place, other) for other in readable):
        # bwrap cannot make the place in a directory that is read-only.
        for child in sorted(path.iterdir()):
            yield from _show(child, f"{place}/{child.name}", readable)
    elif stat.S_ISDIR(mode) or stat.S_ISREG(mode):
        yield from ("--ro-bind", str(path), place)


def _lacks(path: Path, place: str, other: str) -> bool:
    """Tell whether `other` lies below `place`, and the root has no such path."""
    if not other.startswith(f"{place}/"):
        return False
    for part in other[len(place) + 1 :].split("/"):
        path /= part
        if path.is_symlink() or not path.exists():
            return True
    return False


def _cover(root: Path, sandbox_files_directory: Path, *, network: bool) -> Iterator[str]:
    """Yield the options that put files of the sandbox over those in /etc of a root."""
    etc = root / "etc"
    if etc.is_symlink():
        return
    own = [(sandbox_files_directory / name, name) for name in ACCOUNT_FILES]
    if network:
        own += [(Path("/etc", name), name) for name in NETWORK_FILES]
    for source, name in own:
        if (etc / name).is_file() and not (etc / name).is_symlink():
            yield from ("--ro-bind-try", os.path.realpath(source), f"/etc/{name}")


def _copy_shell(root: Path, sandbox_files_directory: Path) -> Path:
    """Return a copy of the root's shell that evaluators may execute and not read."""
    shell = locate_in_root(root, SHELL)
    status = shell.stat()
    if status.st_size > _MAX_SHELL:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(shell))
    about = (str(shell), status.st_ino, status.st_size, status.st_mtime_ns)
    copy = sandbox_files_directory / f"init-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}"
    if not copy.exists():
        new = copy.with_suffix(f".{secrets.token_hex(4)}")  # two threads may copy at once
        with add_path_to_errors(new):
            new.write_bytes(shell.read_bytes())
            new.chmod(0o111)
            new.replace(copy)
    return copy


def remove_shell_copies_of_earlier_daemon(sandbox_files_directory: Path) -> None:
    """Remove the copies of shells that an earlier daemon has made. Blocks. Raises: OSError."""
    for copy in sandbox_files_directory.glob("init-*"):
        copy.unlink()


def lock_environment_root(root: Path, how: int = fcntl.LOCK_SH) -> int:
    """Return a descriptor with which a root is locked until it is closed.

    Raises: OSError; BlockingIOError, if another process has a lock that excludes this one.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class EnvironmentLocks:
    """The locks of the roots that the configuration names; the kernel ends them with the daemon."""

    def __init__(self) -> None:
        self._locks: dict[Path, int] = {}

    def lock_roots(self, roots: Iterable[str]) -> Sequence[SetupProblem]:
        """Lock the roots of the store among these, and no others; return what went wrong."""
        wanted = {path for path in map(Path, roots) if find_stored_root_digest(path) is not None}
        problems = []
        for path in wanted - self._locks.keys():
            try:
                self._locks[path] = lock_environment_root(path)
            except OSError as error:
                problems.append(
                    SetupProblem(
                        f"environments: {path} cannot be locked: {error.strerror}",
                        "import it again by `tawebeval environment import`",
                    )
                )
        for path in self._locks.keys() - wanted:
            os.close(self._locks.pop(path))
        return problems
