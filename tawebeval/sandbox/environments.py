"""Environments: root file systems that sandboxes show in place of the machine's own programs.

A root is a directory of the machine, made by an operator or imported into the state directory:

<state>/environments/sha256-HEX/   a root; HEX is the digest of its archive
<state>/environments/new-*/        an import

An archive comes from strangers. So tar unpacks it in a sandbox (`TrustedCommandSandbox`) that may
write to one directory alone, which has nothing else. The limit of an import is the free disk.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import attrs

from tawebeval.config import EnvironmentSettings
from tawebeval.core.form import DEFAULT_ENVIRONMENT_NAME
from tawebeval.errors import ConfigurationError, SetupProblem, format_size
from tawebeval.linux.filetree import remove_tree, run_command_read_stderr_line
from tawebeval.sandbox.base import find_stored_root_digest
from tawebeval.sandbox.bubblewrap import (
    ACCOUNT_FILE_NAMES,
    BWRAP_ERROR_PREFIX,
    RESOLVER_FILE_NAMES,
    SHELL_PATH,
    SandboxAccess,
    TrustedCommandSandbox,
    build_system_options,
    find_symlink_above_mounts,
    resolve_path_in_root,
    write_sandbox_files,
)
from tawebeval.sandbox.seccomp import make_seccomp_filters

PRLIMIT_PATH = "/usr/bin/prlimit"
"""The program in a root that runs the programs of submissions."""
_PYTHON = "/usr/bin/python3"  # for the tools
_INSTALL = "install util-linux in it (Alpine: util-linux-misc)"
_DEFAULT_DESCRIPTION = "the machine's own programs"
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
            f"{root} is not a directory", "make one by `tawebeval environment import`"
        )
    for program, remedy in (
        (SHELL_PATH, "use a root file system with a shell"),
        (PRLIMIT_PATH, _INSTALL),
    ):
        try:
            found = resolve_path_in_root(root, program)
            is_program = found.is_file() and os.access(found, os.X_OK | os.R_OK, effective_ids=True)
        except OSError:
            is_program = False
        if not is_program:
            return SetupProblem(f"{root} has no program {program}", remedy)
    link = find_symlink_above_mounts(root, readable)
    if link is not None:
        return SetupProblem(
            f"{link} is a symbolic link above a path of sandbox.readable",
            "use a root without that link, or another path",
        )
    return None


@attrs.frozen
class ImportedRoot:
    """An imported root; `warnings` are for the operator who imports it."""

    path: Path
    was_added: bool = False
    warnings: Sequence[str] = ()


def locate_environment_store(state: Path) -> Path:
    """Return the directory of imported roots in a state directory."""
    return state / "environments"


def import_root(archive: Path, store: Path, min_free_bytes: int) -> ImportedRoot:
    """Make a root in `store` from a tar archive of one, which may be compressed. Blocks.

    Leaves `min_free_bytes` bytes of the disk free. Raises: ConfigurationError; OSError, with a
    path.
    """
    store.mkdir(mode=0o700, exist_ok=True)
    target = store / f"sha256-{_digest_archive(archive)}"
    if target.exists():
        return ImportedRoot(target)
    staging = Path(tempfile.mkdtemp(prefix="new-", dir=store))
    try:
        root = staging / "root"
        root.mkdir()
        _extract(archive, staging, root, min_free_bytes)
        # Nobody but the daemon's user may write, and nothing runs as its owner.
        run_command_read_stderr_line("/bin/chmod", "-R", "u=rwX,go=rX", "--", root)
        warnings = _finish_root(root)
        run_command_read_stderr_line("/bin/sync", "-f", "--", root)
        root.rename(target)
    finally:
        remove_tree(staging)
    return ImportedRoot(target, was_added=True, warnings=warnings)


def _extract(archive: Path, staging: Path, root: Path, min_free_bytes: int) -> None:
    """Run tar in a sandbox, where it may write to `root` alone, until it ends.

    Ends it when the disk is nearly full.
    """
    names = (f"{prefix}{name}" for prefix in ("./", "", "/") for name in _LEFT_OUT)
    excluded = (f"--exclude={name}" for name in names)
    files = (f"--directory={root}", f"--file={archive}")
    access = SandboxAccess([root], [str(archive)])
    prepared = _open_sandbox(staging / "own").open_command_prefix(staging, access)
    with prepared as (before, filters), (staging / "errors").open("w+b") as errors:
        child = subprocess.Popen(
            [*before, "tar", *_UNPACK, *files, "--anchored", *excluded],
            cwd="/",
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
            pass_fds=filters,
        )
        try:
            while child.returncode is None:
                free = shutil.disk_usage(staging).free
                if free < min_free_bytes:
                    raise ConfigurationError(
                        f"{archive} does not fit on the disk: {format_size(free)} are left"
                        f" of {staging.parent}; free some disk space"
                    )
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK)
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)  # a young bwrap leaves a process that waits
                child.wait()
        if child.returncode:
            errors.seek(0)
            said = errors.read(_COMPLAINT).decode(errors="replace")
            raise _make_tar_error(archive, said)


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


def _open_sandbox(own: Path) -> TrustedCommandSandbox:
    """Return a sandbox without network, whose files are in `own`."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ConfigurationError("bubblewrap is not installed; run `apt-get install bubblewrap`")
    own.mkdir()
    write_sandbox_files(own)
    filters = make_seccomp_filters(internet=False)
    return TrustedCommandSandbox(bwrap, filters, tuple(build_system_options(own)))


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
    for name in (*ACCOUNT_FILE_NAMES, *RESOLVER_FILE_NAMES):
        remove_tree(etc / name) if (etc / name).is_dir() else (etc / name).unlink(missing_ok=True)
        (etc / name).touch()
    try:
        resolve_path_in_root(root, _PYTHON)
    except OSError:
        return [f"it has no {_PYTHON}: tawebeval-run and segi.py do not work for its evaluators"]
    return ()
