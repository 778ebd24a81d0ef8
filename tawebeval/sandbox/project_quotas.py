"""Project quotas: directories whose bytes and files the file system limits.

A *quota directory* holds everything that one evaluation at a time can write. It has a project of
its own, which new files in it inherit, and root gives that project a quota
(`make_quota_directories`). The daemon can neither give nor lift a quota, and an evaluator, in its
user namespace, cannot move a file to another project. statvfs(2) of the directory tells every user
the usage of its project, at once and exactly. ext4 and xfs have project quotas: quotactl(2);
FS_IOC_FSSETXATTR in linux/fs.h. Everything here blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from tawebeval.config import MIB, Configuration
from tawebeval.deferreds import resolve_run_slot_count
from tawebeval.errors import ConfigurationError, format_size
from tawebeval.linux.filetree import add_path_to_errors, is_disk_full
from tawebeval.linux.ownership import get_user_name
from tawebeval.linux.privileges import CurrentProcess, Privileges, User
from tawebeval.sandbox.disk_usage import BLOCK_BYTES

_NAME = "quotas"
_UNIT = 2**16  # bytes: quotas are multiples of it, and no file system has larger blocks
_NUMBER = re.compile("0|[1-9][0-9]{0,4}")  # the name of a quota directory

# linux/fs.h, struct fsxattr: flags, two numbers, the project, another number.
_FSGETXATTR, _FSSETXATTR, _INHERIT = 0x801C581F, 0x401C5820, 0x200
_ATTRIBUTES = struct.Struct("=5I8x")
# linux/quota.h, struct if_dqblk: hard limit (KiB), soft limit, use; the same of files; two times;
# which of these are meant. quotactl_fd(2) takes any descriptor on the file system (Linux 5.14).
_QUOTACTL_FD = 443
_GET, _SET = (0x800007 << 8) + 2, (0x800008 << 8) + 2
_LIMITS = 1 | 4
_QUOTA = struct.Struct("=8QI4x")

libc = ctypes.CDLL(None, use_errno=True)

_AGAIN = "run `tawebeval quota` as root"
_REMEDY = (
    "the state has to be on ext4 or xfs, mounted with prjquota (docs/security.md, Project quotas)"
)


@attrs.frozen
class ProjectQuota:
    """The limits of a project: bytes, a multiple of 64 KiB; files and directories together."""

    max_bytes: int
    max_files: int


def compute_quota(configuration: Configuration) -> ProjectQuota:
    """Return the quota of each evaluation: its limits, plus those of its tree, and a reserve."""
    limits, trees = configuration.limits.largest_requestable, configuration.repositories
    size = limits.disk + trees.tree_bytes + BLOCK_BYTES * trees.max_tree_files + MIB
    return ProjectQuota(-(-size // _UNIT) * _UNIT, limits.disk_files + trees.max_tree_files + 16)


def find_quota_directories(state: Path) -> Sequence[Path]:
    """Return the quota directories of a state directory, in their order. Raises OSError."""
    found = [path for path in state.glob(f"{_NAME}/*") if _NUMBER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name))


def read_project_quota(directory: Path) -> ProjectQuota | None:
    """Return the quota that the file system enforces on a directory; None if there is none.

    Raises: OSError.
    """
    own, around = os.statvfs(directory), os.statvfs(directory.parent)
    if own.f_blocks >= around.f_blocks:
        return None
    return ProjectQuota(own.f_blocks * own.f_frsize, own.f_files)


def check_quota_directories(directories: Sequence[Path], configuration: Configuration) -> None:
    """Check that quota directories, if any, are enough and have sufficient quotas.

    Raises ConfigurationError, OSError.
    """
    wanted, running = (
        compute_quota(configuration),
        resolve_run_slot_count(configuration.evaluations.running),
    )
    if 0 < len(directories) < running:
        raise ConfigurationError(
            f"{directories[0].parent}: {len(directories)} quota directories for {running}"
            f" evaluations (evaluations.running); {_AGAIN}"
        )
    for directory in directories:
        quota = read_project_quota(directory)
        if quota is None:
            raise ConfigurationError(
                f"{directory}: the file system enforces no quota; {_REMEDY}; or"
                f" remove {directory.parent}"
            )
        if quota.max_bytes < wanted.max_bytes or quota.max_files < wanted.max_files:
            raise ConfigurationError(
                f"{directory}: the quota is {format_size(quota.max_bytes)} and {quota.max_files} "
                "files, and"
                f" an evaluation may need {format_size(wanted.max_bytes)} and {wanted.max_files} "
                "files"
                " (limits.disk, limits.disk_files, repositories.tree_bytes,"
                f" repositories.tree_files, and a reserve); {_AGAIN}"
            )


def probe_quota_enforcement(directories: Sequence[Path]) -> None:
    """Check that each quota directory, which has to be empty, takes no more than its quota.

    Raises ConfigurationError, OSError.
    """
    for directory in directories:
        quota = read_project_quota(directory)
        assert quota is not None, "it was checked"
        file = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with add_path_to_errors(directory):
                os.posix_fallocate(file, 0, quota.max_bytes + MIB)
        except OSError as error:
            if not is_disk_full(error):
                raise
        else:
            raise ConfigurationError(
                f"{directory}: the quota of {format_size(quota.max_bytes)} is not enforced; "
                f"{_REMEDY}"
            )
        finally:
            os.close(file)


def make_quota_directories(
    state: Path, configuration: Configuration, first: int, process: CurrentProcess
) -> int:
    """Make a quota directory for each concurrent evaluation, as root; return their number.

    All existing ones get the quota of this configuration. They belong to the owner of `state`. The
    first has the project number `first`, the others those after it. Raises: ConfigurationError.
    """
    quota, running = (
        compute_quota(configuration),
        resolve_run_slot_count(configuration.evaluations.running),
    )
    limits = _QUOTA.pack(quota.max_bytes // 1024, 0, 0, quota.max_files, 0, 0, 0, 0, _LIMITS)
    if process.get_user_ids()[1] != 0:
        raise ConfigurationError("only root can set quotas; run the command as root")
    try:
        with _entered(state.resolve()) as top:
            user = Privileges(process, _owner(top, state))
            _count_files(top, first)  # fails where there are no quotas, before anything is made
            with _made(_NAME, top, user) as above:
                existing = (int(path.name) for path in find_quota_directories(state))
                for number in sorted({*range(running), *existing}):
                    with _made(str(number), above, user) as place:
                        _hold(place, state / _NAME / str(number), first + number, limits, user)
        directories = find_quota_directories(state)
    except OSError as error:
        off = error.errno == errno.ESRCH
        why = "project quotas are not enabled" if off else error.strerror
        raise ConfigurationError(f"{state}: {why}; {_REMEDY}") from None
    check_quota_directories(directories, configuration)
    return len(directories)


@contextlib.contextmanager
def _entered(name: str | Path, parent: int | None = None) -> Iterator[int]:
    place = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield place
    finally:
        os.close(place)


@contextlib.contextmanager
def _made(name: str, parent: int, user: Privileges) -> Iterator[int]:
    """Open a directory that is made if it is missing; as the user, whose links lead nowhere."""
    with contextlib.ExitStack() as opened:
        with user.act_as_user():
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, mode=0o700, dir_fd=parent)
            place = opened.enter_context(_entered(name, parent))
        yield place


def _hold(place: int, directory: Path, project: int, limits: bytes, user: Privileges) -> None:
    """Give an open directory a project, unless it has that already, and the project a quota."""
    flags, *more, current, copied = _attributes(place)
    if current != project or not flags & _INHERIT:
        _check_unused(place, directory, project)
        wanted = _ATTRIBUTES.pack(flags | _INHERIT, *more, project, copied)
        with user.act_as_user():
            fcntl.ioctl(place, _FSSETXATTR, wanted)
    _quotactl(place, _SET, project, limits)


def _owner(place: int, state: Path) -> User:
    status = os.fstat(place)
    if status.st_uid == 0:
        raise ConfigurationError(f"{state} belongs to root; chown it to the daemon's user")
    return User(get_user_name(status.st_uid), status.st_uid, status.st_gid, frozenset(), "/")


def _check_unused(place: int, directory: Path, project: int) -> None:
    """Make sure that a project and a quota directory have no files. Raises ConfigurationError."""
    files = _count_files(place, project)
    if files:
        raise ConfigurationError(
            f"{directory}: {files} files of this file system already have the project {project};"
            " choose other projects by --first-project"
        )
    if os.listdir(place):
        raise ConfigurationError(f"{directory} is not empty; stop the daemon, and remove its files")


def _attributes(place: int) -> Sequence[int]:
    return _ATTRIBUTES.unpack(fcntl.ioctl(place, _FSGETXATTR, bytes(_ATTRIBUTES.size)))


def _count_files(place: int, project: int) -> int:
    """Return how many files of the file system of an open directory have a project."""
    try:
        return int(_QUOTA.unpack(_quotactl(place, _GET, project, bytes(_QUOTA.size)))[5])
    except FileNotFoundError:  # by xfs, for a project that has never had any
        return 0


def _quotactl(place: int, command: int, project: int, quota: bytes) -> bytes:
    content = ctypes.create_string_buffer(quota, len(quota))
    numbers = ctypes.c_uint(command), ctypes.c_uint(project)
    if libc.syscall(_QUOTACTL_FD, place, *numbers, content):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return content.raw
