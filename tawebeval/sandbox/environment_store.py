"""The store of environments in the state directory: import, list and remove roots. All blocks.

<state>/environments/sha256-HEX/   a root, read-only; HEX is the digest of its content
<state>/environments/new-*/        an import, locked while it runs

An archive comes from strangers. So tar unpacks it in a sandbox (`bubblewrap.HelperSandbox`) that
may write to one directory alone, which has nothing else. The limit of an import is the free disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

from tawebeval.errors import ConfigurationError, format_size
from tawebeval.linux.filetree import remove_tree, run_and_read_stderr_line, walk_tree
from tawebeval.sandbox.bubblewrap import (
    BWRAP_ERROR_PREFIX,
    BubblewrapHelperSandbox,
    SandboxAccess,
    build_system_options,
    write_sandbox_files,
)
from tawebeval.sandbox.environments import (
    ACCOUNT_FILES,
    NETWORK_FILES,
    PYTHON,
    find_environment_root_problem,
    find_stored_root_digest,
    locate_in_root,
    lock_environment_root,
)
from tawebeval.sandbox.limits import measure_disk_usage
from tawebeval.sandbox.seccomp import make_seccomp_filters

_NEW = "new-"
_GONE = "gone-"
_LOOK = 0.2  # seconds between two looks at the free disk
_MAX_ENTRIES = 2_000_000
_COMPLAINT = 2000  # bytes of a program's messages that are shown
# Directories of an archive that no sandbox shows, and what other programs have left.
_LEFT_OUT = ("boot", "dev", "home", "lost+found", "proc", "root", "run", "sys", "tmp")
_UNPACK = ("--extract", "--no-same-owner", "--no-same-permissions", "--delay-directory-restore")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/nonexistent",
}
_SHOWN = 0o555  # the mode of directories and programs
_NOTE = "Removing leading"  # in lines of tar that report no error
_IMAGE_FILES = ("oci-layout", "manifest.json")  # at the top of an archive of layers
_OWN = "own"  # the directory of the sandbox's files


@attrs.frozen
class StoredRoot:
    """A root of the store; `warnings` are for the operator who imports it."""

    path: Path
    was_added: bool = False
    warnings: Sequence[str] = ()

    @property
    def digest(self) -> str:
        """The digest of the content."""
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
        with self._make_staging() as staging:
            return self._finish(_Import(archive, staging, self.min_free_bytes).unpack())

    def _finish(self, root: Path) -> StoredRoot:
        problem = find_environment_root_problem(root)
        if problem is not None:
            words, remedy = problem[0].replace(str(root), "the archive"), problem.remedy
            if any(os.path.lexists(root / name) for name in _IMAGE_FILES):
                remedy = "use `docker export` or `podman export`, not `save`, which writes layers"
            raise ConfigurationError(words, remedy)
        target = self.directory / f"sha256-{_settle(root)}"
        warnings = []
        try:
            locate_in_root(root, PYTHON)
        except OSError:
            warnings.append(
                f"it has no {PYTHON}: tawebeval-run and segi.py do not work for its evaluators"
            )
        try:
            os.close(lock_environment_root(target))
            was_added = False
        except BlockingIOError:
            raise ConfigurationError(f"{target.name} is being removed", "import it again") from None
        except FileNotFoundError:
            was_added = True
            run_and_read_stderr_line("/bin/sync", "-f", "--", root)
            root.rename(target)
        return StoredRoot(target, was_added, tuple(warnings))

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
        try:
            lock = lock_environment_root(found[0], fcntl.LOCK_EX)
        except BlockingIOError:
            raise ConfigurationError(
                f"{found[0].name} is in use by a daemon or an evaluation",
                "remove its table from the configuration, run `systemctl reload tawebeval`, and let"
                " its evaluations end",
            ) from None
        try:
            gone = found[0].with_name(_GONE + found[0].name)
            found[0].rename(gone)
            remove_tree(gone)
        finally:
            os.close(lock)

    def _remove_stale(self) -> None:
        """Remove what killed imports and removals have left."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        for place in self.directory.iterdir():
            if place.name.startswith((_NEW, _GONE)):
                with suppress(OSError):  # it is in use
                    lock = lock_environment_root(place, fcntl.LOCK_EX)
                    try:
                        remove_tree(place)
                    finally:
                        os.close(lock)

    @contextmanager
    def _make_staging(self) -> Iterator[Path]:
        staging = Path(tempfile.mkdtemp(prefix=_NEW, dir=self.directory))
        lock = lock_environment_root(staging, fcntl.LOCK_EX)
        try:
            yield staging
        finally:
            remove_tree(staging)
            os.close(lock)


class _Import:
    """One import of an archive into the directory `staging`."""

    def __init__(self, archive: Path, staging: Path, reserve: int) -> None:
        self._archive = archive
        self._staging = staging
        self._reserve = reserve
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ConfigurationError(
                "bubblewrap is not installed; run `apt-get install bubblewrap`"
            )
        own = staging / _OWN
        own.mkdir()
        write_sandbox_files(own)
        options = tuple(build_system_options(own))
        self._sandbox = BubblewrapHelperSandbox(
            bwrap, make_seccomp_filters(internet=False), options
        )

    def unpack(self) -> Path:
        """Return the directory with the content of the archive."""
        archive = self._archive
        if not os.access(archive, os.R_OK, effective_ids=True):
            raise ConfigurationError(
                f"{archive}: the daemon's user (uid {os.geteuid()}) cannot read it",
                "copy it to a place such as /var/tmp, with `chmod a+r`",
            )
        if not archive.is_file():
            raise ConfigurationError(
                f"{archive} is not a file",
                f"pack a directory: `tar --create --file ROOT.tar --directory {archive} .`",
            )
        root = self._staging / "root"
        root.mkdir()
        self._extract(root)
        return root

    def _extract(self, root: Path) -> None:
        """Run tar in the sandbox, where it may write to `root` alone, until it ends.

        Ends it when the disk is nearly full.
        """
        names = (f"{prefix}{name}" for prefix in ("./", "", "/") for name in _LEFT_OUT)
        excluded = (f"--exclude={name}" for name in names)
        files = (f"--directory={root}", f"--file={self._archive}")
        access = SandboxAccess([root], [str(self._archive)])
        prepared = self._sandbox.prepare_command(self._staging, access)
        with prepared as (before, filters), (self._staging / "errors").open("w+b") as errors:
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
                    self._check_disk()
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(_LOOK)
            finally:
                child.kill()
                child.wait()
            if child.returncode:
                errors.seek(0)
                said = errors.read(_COMPLAINT).decode(errors="replace")
                raise _make_tar_error(self._archive, said)

    def _check_disk(self) -> None:
        """Raise ConfigurationError if the disk is nearly full."""
        free = shutil.disk_usage(self._staging).free
        if free < self._reserve:
            raise ConfigurationError(
                f"{self._archive} does not fit on the disk: {format_size(free)} are left"
                f" of {self._staging.parent}; free some disk space"
            )


def _make_tar_error(archive: Path, said: str) -> ConfigurationError:
    """Return the error of an archive for which tar failed and said this."""
    lines = [
        line.strip().removeprefix(BWRAP_ERROR_PREFIX)
        for line in said.strip().splitlines()
        if _NOTE not in line
    ]
    reason = "; ".join(lines[:3]) or "it gave no reason"
    return ConfigurationError(f"{archive}: tar failed: {reason}")


def _settle(root: Path) -> str:
    """Make a root read-only, with the modes and files that sandboxes need; return its digest."""
    run_and_read_stderr_line("/bin/chmod", "-R", "u+rwX", "--", root)
    _add_files(root / "etc")
    whole = hashlib.sha256()
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        entries = []
        for path, status in walk_tree(top):
            entries.append((path, status.st_mode))
            if len(entries) > _MAX_ENTRIES:
                raise ConfigurationError(f"the archive has over {_MAX_ENTRIES} files")
        directories = []
        for path, mode in sorted(entries):
            if stat.S_ISDIR(mode):
                directories.append(path)
                kind, content = "directory", b""
            elif stat.S_ISLNK(mode):
                kind, content = "link", os.fsencode(os.readlink(path, dir_fd=top))
            elif stat.S_ISREG(mode):
                is_program = bool(mode & 0o111)
                os.chmod(path, _SHOWN if is_program else 0o444, dir_fd=top)
                kind, content = "program" if is_program else "file", _digest_file(path, top)
            else:
                os.unlink(path, dir_fd=top)
                continue
            whole.update(os.fsencode(f"{path}\0{kind}\0{len(content)}\0") + content)
        for path in directories:
            os.chmod(path, _SHOWN, dir_fd=top)
    finally:
        os.close(top)
    root.chmod(0o755)  # a directory that is moved must be writable
    return whole.hexdigest()


def _add_files(etc: Path) -> None:
    """Make the files over which the sandbox puts its own."""
    if not os.path.lexists(etc):
        etc.mkdir()
    if etc.is_symlink() or not etc.is_dir():
        raise ConfigurationError("/etc of the archive is not a directory; use another archive")
    for name in (*ACCOUNT_FILES, *NETWORK_FILES):
        remove_tree(etc / name) if (etc / name).is_dir() else (etc / name).unlink(missing_ok=True)
        (etc / name).touch()


def _digest_file(path: str, top: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    with open(descriptor, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
