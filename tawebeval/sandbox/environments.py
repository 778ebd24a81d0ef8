"""Environments: root file systems that sandboxes show in place of the machine's own programs.

A root is a directory of the machine, made by an operator or imported into the state directory:

<state>/environments/sha256-HEX/   a root; HEX is the digest of its archive
<state>/environments/new-*/        an import or a removal, locked while it runs

An archive comes from strangers. So tar unpacks it in a sandbox (`bubblewrap.HelperSandbox`) that
may write to one directory alone, which has nothing else. The limit of an import is the free disk.
A root of the store is locked (flock(2)) while a daemon or an evaluation uses it, so that it is not
removed. Imports, lists and removals block.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

from tawebeval.config import EnvironmentSettings
from tawebeval.core.form import DEFAULT_ENVIRONMENT_NAME
from tawebeval.errors import ConfigurationError, SetupProblem, format_size
from tawebeval.linux.filetree import remove_tree, run_and_read_stderr_line
from tawebeval.sandbox.base import find_stored_root_digest
from tawebeval.sandbox.bubblewrap import (
    ACCOUNT_FILES,
    BWRAP_ERROR_PREFIX,
    RESOLVER_FILES,
    SHELL,
    BubblewrapHelperSandbox,
    SandboxAccess,
    build_system_options,
    find_link_above,
    locate_in_root,
    write_sandbox_files,
)
from tawebeval.sandbox.limits import measure_disk_usage
from tawebeval.sandbox.seccomp import make_seccomp_filters

LIMITER = "/usr/bin/prlimit"
"""The program in a root that runs the programs of submissions."""
_PYTHON = "/usr/bin/python3"  # for the tools
_INSTALL = "install util-linux in it (Alpine: util-linux-misc)"
_DEFAULT_DESCRIPTION = "the machine's own programs"
_NEW = "new-"
_LOOK = 0.2  # seconds between two looks at the free disk
_COMPLAINT = 2000  # bytes of a program's messages that are shown
# Directories of an archive that no sandbox shows, and what other programs have left.
_LEFT_OUT = ("boot", "dev", "home", "lost+found", "proc", "root", "run", "sys", "tmp")
_UNPACK = ("--extract", "--no-same-owner", "--no-same-permissions", "--delay-directory-restore")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/nonexistent",
}
_NOTE = "Removing leading"  # in lines of tar that report no error
_IMAGE_FILES = ("oci-layout", "manifest.json")  # at the top of an archive of layers


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
    link = find_link_above(root, readable)
    if link is not None:
        return SetupProblem(
            f"{link} is a symbolic link above a path of sandbox.readable",
            "use a root without that link, or another path",
        )
    return None


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


@attrs.frozen
class StoredRoot:
    """A root of the store; `warnings` are for the operator who imports it."""

    path: Path
    was_added: bool = False
    warnings: Sequence[str] = ()

    @property
    def digest(self) -> str:
        """The digest of the archive."""
        return self.path.name


def locate_store(state: Path) -> Path:
    """Return the path of the store in a state directory."""
    return state / "environments"


@attrs.frozen
class EnvironmentStore:
    """The store in `directory`; an import leaves `min_free_bytes` bytes of the disk free.

    Its errors are ConfigurationError, or OSError with a path.
    """

    directory: Path
    min_free_bytes: int = 0

    def import_root(self, archive: Path) -> StoredRoot:
        """Make a root from a tar archive of one, which may be compressed."""
        self._remove_stale()
        target = self.directory / f"sha256-{_digest_archive(archive)}"
        try:
            os.close(lock_environment_root(target))
        except FileNotFoundError:
            with self._make_staging() as staging:
                root = staging / "root"
                root.mkdir()
                self._extract(archive, staging, root)
                # Nobody but the daemon's user may write, and nothing runs as its owner.
                run_and_read_stderr_line("/bin/chmod", "-R", "u=rwX,go=rX", "--", root)
                warnings = _finish_root(root)
                run_and_read_stderr_line("/bin/sync", "-f", "--", root)
                root.rename(target)
            return StoredRoot(target, was_added=True, warnings=warnings)
        except BlockingIOError:
            raise ConfigurationError(f"{target.name} is being removed", "import it again") from None
        return StoredRoot(target)

    def list_roots(self) -> Iterator[tuple[StoredRoot, int]]:
        """Yield the roots with their sizes in bytes on the disk, sorted by digest."""
        for path in self._list_paths():
            yield StoredRoot(path), measure_disk_usage(path, ()).disk_bytes

    def _list_paths(self) -> list[Path]:
        with suppress(FileNotFoundError):
            return sorted(filter(find_stored_root_digest, self.directory.iterdir()))
        return []

    def remove_root(self, digest: str) -> None:
        """Remove the root whose digest begins with `digest`."""
        found = [path for path in self._list_paths() if path.name.startswith(digest)]
        if len(found) != 1 or not digest:
            number = "no root" if not found else f"{len(found)} roots"
            raise ConfigurationError(
                f"{number} in {self.directory} with the digest {digest!r}",
                "`tawebeval environment list` lists them",
            )
        gone = found[0].with_name(_NEW + found[0].name)
        try:
            _remove_locked(found[0], gone)
        except BlockingIOError:
            raise ConfigurationError(
                f"{found[0].name} is in use by a daemon or an evaluation",
                "remove its table from the configuration, run `systemctl reload tawebeval`, and let"
                " its evaluations end",
            ) from None

    def _remove_stale(self) -> None:
        """Remove what killed imports and removals have left."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        for place in self.directory.glob(f"{_NEW}*"):
            with suppress(OSError):  # it is in use
                _remove_locked(place, place)

    @contextmanager
    def _make_staging(self) -> Iterator[Path]:
        staging = Path(tempfile.mkdtemp(prefix=_NEW, dir=self.directory))
        lock = lock_environment_root(staging, fcntl.LOCK_EX)
        try:
            yield staging
        finally:
            remove_tree(staging)
            os.close(lock)

    def _extract(self, archive: Path, staging: Path, root: Path) -> None:
        """Run tar in a sandbox, where it may write to `root` alone, until it ends.

        Ends it when the disk is nearly full.
        """
        names = (f"{prefix}{name}" for prefix in ("./", "", "/") for name in _LEFT_OUT)
        excluded = (f"--exclude={name}" for name in names)
        files = (f"--directory={root}", f"--file={archive}")
        access = SandboxAccess([root], [str(archive)])
        prepared = _open_sandbox(staging / "own").prepare_command(staging, access)
        with prepared as (before, filters), (staging / "errors").open("w+b") as errors:
            child = subprocess.Popen(
                [*before, "tar", *_UNPACK, *files, "--anchored", *excluded],
                cwd="/",
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=filters,
            )
            try:
                while child.poll() is None:
                    self._check_disk(archive)
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(_LOOK)
            finally:
                child.kill()
                child.wait()
            if child.returncode:
                errors.seek(0)
                said = errors.read(_COMPLAINT).decode(errors="replace")
                raise _make_tar_error(archive, said)

    def _check_disk(self, archive: Path) -> None:
        """Raise ConfigurationError if the disk is nearly full."""
        free = shutil.disk_usage(self.directory).free
        if free < self.min_free_bytes:
            raise ConfigurationError(
                f"{archive} does not fit on the disk: {format_size(free)} are left"
                f" of {self.directory}; free some disk space"
            )


def _digest_archive(archive: Path) -> str:
    if archive.is_dir():
        raise ConfigurationError(
            f"{archive} is not a file",
            f"pack a directory: `tar --create --file ROOT.tar --directory {archive} .`",
        )
    try:
        with archive.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigurationError(
            f"{archive}: the daemon's user (uid {os.geteuid()}) cannot read it: {error.strerror}",
            "copy it to a place such as /var/tmp, with `chmod a+r`",
        ) from None


def _open_sandbox(own: Path) -> BubblewrapHelperSandbox:
    """Return a sandbox without network, whose files are in `own`."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ConfigurationError("bubblewrap is not installed; run `apt-get install bubblewrap`")
    own.mkdir()
    write_sandbox_files(own)
    filters = make_seccomp_filters(internet=False)
    return BubblewrapHelperSandbox(bwrap, filters, tuple(build_system_options(own)))


def _make_tar_error(archive: Path, said: str) -> ConfigurationError:
    """Return the error of an archive for which tar failed and said this."""
    lines = [
        line.strip().removeprefix(BWRAP_ERROR_PREFIX)
        for line in said.strip().splitlines()
        if _NOTE not in line
    ]
    reason = "; ".join(lines[:3]) or "it gave no reason"
    return ConfigurationError(f"{archive}: tar failed: {reason}")


def _finish_root(root: Path) -> Sequence[str]:
    """Check an unpacked root, and make the files over which the sandbox puts its own.

    Return warnings for the operator.
    """
    problem = find_environment_root_problem(root)
    if problem is not None:
        words, remedy = problem[0].replace(str(root), "the archive"), problem.remedy
        if any(os.path.lexists(root / name) for name in _IMAGE_FILES):
            remedy = "use `docker export` or `podman export`, not `save`, which writes layers"
        raise ConfigurationError(words, remedy)
    etc = root / "etc"
    if not os.path.lexists(etc):
        etc.mkdir()
    if etc.is_symlink() or not etc.is_dir():
        raise ConfigurationError("/etc of the archive is not a directory; use another archive")
    for name in (*ACCOUNT_FILES, *RESOLVER_FILES):
        remove_tree(etc / name) if (etc / name).is_dir() else (etc / name).unlink(missing_ok=True)
        (etc / name).touch()
    try:
        locate_in_root(root, _PYTHON)
    except OSError:
        return [f"it has no {_PYTHON}: tawebeval-run and segi.py do not work for its evaluators"]
    return ()


def _remove_locked(root: Path, gone: Path) -> None:
    """Remove a root by renaming it to `gone` first. Raises: BlockingIOError, if it is in use."""
    lock = lock_environment_root(root, fcntl.LOCK_EX)
    try:
        root.rename(gone)
        remove_tree(gone)
    finally:
        os.close(lock)
