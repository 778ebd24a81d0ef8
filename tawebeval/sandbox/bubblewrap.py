"""The sandbox of bubblewrap (bwrap(1)), which needs no privilege.

An evaluator in it has namespaces of its own for users, processes, mounts, network, IPC, host name
and cgroups; no capability, and no way to get one; a filter of system calls; and a file system of

/usr, /bin, ...         the system, read-only, and a few other files that programs there need
/evaluation/tree        the commit's tree, writable; the evaluator runs in a directory of it
/evaluation/submission  the uploaded files, read-only
/evaluation/tmp         TEMPORARY_DIRECTORY
/evaluation/home        HOME
/evaluation/tools       tools for evaluators, read-only
/evaluation/runner      the socket by which submissions are run (`broker`)
/tmp, /dev/shm          directories of the workspace, so that one disk limit holds for all
/init                   the first process

and the paths of `sandbox.readable`. An environment's root takes the place of the system
(`SystemView`). When the first process or the daemon ends, the kernel ends all
processes of the sandbox.

Git and imports of environments have a sandbox, too (`TrustedCommandSandbox`), as they parse what
strangers send: trusted programs that see only the system's programs, read-only, and the one
repository of the command, writable only for commands that write. Only a fetch has the network; a
fetch from this machine sees the source repository instead.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import signal
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import ClassVar

import attrs
from twisted.logger import Logger

from tawebeval.core.segi import add_tools_to_path
from tawebeval.errors import EvaluationFailure
from tawebeval.linux import kernel_files
from tawebeval.linux.child import ChildProcess, kill_adopted_process
from tawebeval.linux.filetree import add_path_to_errors
from tawebeval.linux.kernel_files import make_sealed_memfd, signal_sandbox
from tawebeval.linux.starter import FIRST_PROGRAM_DESCRIPTOR, LaunchSpec
from tawebeval.linux.starter_client import build_program_archive
from tawebeval.linux.tail import TailedProcess
from tawebeval.sandbox import broker
from tawebeval.sandbox.base import (
    Environment,
    EvaluatorExit,
    Sandbox,
    SandboxedRun,
)
from tawebeval.sandbox.broker import PROTOCOL_VERSION
from tawebeval.sandbox.workspace import Workspace, WorkspaceView

log = Logger()


_BROKER_PROGRAM = build_program_archive(broker, kernel_files)


def build_isolation_options(hostname: str) -> Sequence[str]:
    """Return the bwrap options for all namespaces, no capability, and no way to get one."""
    return (
        *("--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent"),
        *("--new-session", "--uid", "1000", "--gid", "1000", "--hostname", hostname),
        *("--cap-drop", "ALL"),
    )


def _build_confinement_options(
    hostname: str, filters: Iterable[int], system: Iterable[str], *, network: bool
) -> list[str]:
    """Return the options before mounts; `filters` are descriptors of system call filters."""
    return [
        *build_isolation_options(hostname),
        *(("--share-net",) if network else ()),
        *(word for each in filters for word in ("--add-seccomp-fd", str(each))),
        *system,
        *("--proc", "/proc", "--dev", "/dev"),
    ]


# The first process waits for the command; all others end with it. The evaluator is the same user,
# and could change it by /proc/1/mem or read its secrets. So it is a program that this user may
# execute and not read, which closes its process to others (execve(2)). Its own messages go nowhere,
# and stdin is the sandbox's own /dev/null. Before the command it notes that it could make a
# process: its exit status does not tell that. The command does not get the note's descriptor. Its
# first argument is the limit of descriptors, of which bwrap may need more.
_INIT = "/init"
_NOTES = FIRST_PROGRAM_DESCRIPTOR + 2  # the descriptor for that
_BEGUN = '"begun"'
_WAIT = (
    "exec 3>&2 2>/dev/null </dev/null;"
    f""" (ulimit -n "$1" && shift && {{ echo '{{ {_BEGUN}: true }}' >&{_NOTES};"""
    f""" exec "$@" 2>&3 3>&- {_NOTES}>&-; }}); exit $?"""
)

WORKSPACE_MOUNT_POINT = Path("/evaluation")
"""The path under which an evaluator finds its workspace."""
EVALUATOR_TOOLS_DIRECTORY_NAME = f"tools-{PROTOCOL_VERSION}"
"""The name of the directory with the tools for evaluators among the files of the sandbox.

Evaluations that outlive an upgrade keep the tools that their broker understands.
"""
BROKER_PROGRAM_FILE_NAME = f"broker-{PROTOCOL_VERSION}"
"""The name of the broker's program there: a file, for it is larger than all else of a start."""
BROKER_SOCKET_NAME = "runner"
"""The name of the broker's socket in a workspace."""
BROKER_PROCESS_NAME = "tawebeval-broker"
"""The name of the broker in process lists."""
_TOOLS_SOURCE = Path(__file__).with_name("tools")
_PYYAML = find_spec("yaml")
_PYYAML_SOURCES = (_PYYAML and _PYYAML.submodule_search_locations) or ()
_JUDGE_LIBRARY = Path("lib/judge/yaml")  # not beside `segi`: evaluators may have another PyYAML
# The tools for evaluators: content and time (seconds since the epoch) of each file, with the Python
# modules of PyYAML, which tawebeval-judge imports. The files are read now: the user of the service
# may not read them later. The time tells Python whether a compiled module is outdated.
_EVALUATOR_TOOLS = {
    name / path.relative_to(source): (path.read_bytes(), path.stat().st_mtime)
    for source, name, pattern in (
        (_TOOLS_SOURCE, Path(), "*"),
        *((Path(each), _JUDGE_LIBRARY, "*.py") for each in _PYYAML_SOURCES),
        *((Path(each), _JUDGE_LIBRARY, "*.pyc") for each in _PYYAML_SOURCES),
    )
    for path in source.rglob(pattern)
    if path.is_file()
}
_PYTHON = "/usr/bin/python3"  # that of evaluators
_STATUS_BYTES = 4096  # of what bwrap says of a sandbox, more than enough
_SAID_BYTES = 1024  # of what a broker says that are logged
_TOOLS, _RUNNER = WORKSPACE_MOUNT_POINT / "tools", WORKSPACE_MOUNT_POINT / "runner"
SYSTEM_ROOT_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")

# Files besides those of `SYSTEM_ROOT_DIRECTORIES`, as for glob(3): how programs find each other and
# their libraries ...
_PROGRAM_FILE_PATTERNS = ("/etc/alternatives", "/etc/ld.so.*")
# ... what languages need, and what time it is ...
TOOLCHAIN_FILE_PATTERNS = (
    "/etc/fonts",
    "/etc/fpc*.cfg",
    "/etc/java-*",
    "/etc/localtime",
    "/etc/mono",
    "/var/lib/ghc",
)
# ... and with a network how programs find hosts, and whom they trust. No private keys.
NETWORK_FILE_PATTERNS = (
    "/etc/ca-certificates",
    "/etc/gai.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/protocols",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)
# What bwrap, as shells do, adds to a signal to make an exit status of it; and the signals.
_SIGNALLED = 128
_SIGNALS = frozenset(map(int, signal.valid_signals()))
_USERS = b"evaluator:x:1000:1000::/evaluation/home:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
_GROUPS = b"evaluator:x:1000:\nnogroup:x:65534:\n"


def build_system_options(accounts: Path) -> Iterator[str]:
    """Yield the bwrap options that show what nearly every program needs, read-only. Blocks.

    `accounts` is the directory of `write_sandbox_files`.
    """
    yield from ("--ro-bind", "/usr", "/usr")
    for name in SYSTEM_ROOT_DIRECTORIES:
        path = Path("/", name)
        if path.is_symlink():  # into /usr, as usual today
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    yield from build_file_options(_PROGRAM_FILE_PATTERNS)
    for name in ("passwd", "group"):
        yield from ("--ro-bind", str(accounts / name), f"/etc/{name}")


def build_file_options(patterns: Sequence[str]) -> Iterator[str]:
    """Yield the options that show all files of some patterns, read-only. Blocks."""
    for pattern in patterns:
        for found in sorted(glob(pattern)):
            yield from ("--ro-bind-try", os.path.realpath(found), found)


SHELL_PATH = "/bin/sh"
"""The program in a root that begins each sandbox."""
ACCOUNT_FILE_NAMES = ("passwd", "group")
RESOLVER_FILE_NAMES = ("hosts", "resolv.conf")
"""Files of /etc that the sandbox puts over those of a root, if they are regular files there."""
# The path of the root's shell. busybox does by its own name what it shall do.
_ROOT_INIT = "/sh"
# Directories of a root that are not shown: the sandbox has its own, or nobody has use for them.
_HIDDEN = frozenset(
    {"boot", "dev", "evaluation", "home", "init", "lost+found", "proc", "root", "run", "sh", "sys"}
    | {"tmp"}
)
_MAX_MOUNTS = 256  # of one sandbox, for its system
_MAX_SHELL = 16 * 2**20  # bytes, which are read at once
_MAX_LINKS = 40  # as the kernel follows


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


@lru_cache(maxsize=1)
def _make_machine_view(sandbox_files_directory: Path, has_network: bool, second: int) -> SystemView:
    """Return the view of the machine's own system in a second of the clock. Blocks.

    It is made anew in each second: the operator may have installed a language.
    """
    options = [
        *build_system_options(sandbox_files_directory),
        *build_file_options(TOOLCHAIN_FILE_PATTERNS),
    ]
    if has_network:
        options += build_file_options(NETWORK_FILE_PATTERNS)
    return SystemView(options, sandbox_files_directory / "init", _INIT)


def resolve_path_in_root(root: Path, path: str) -> Path:
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


def _make_root_view(
    root: Path, sandbox_files_directory: Path, readable: Sequence[str], *, network: bool
) -> SystemView:
    """Return the view of an environment's root. Blocks. Raises: OSError.

    `sandbox_files_directory` is that of `write_sandbox_files`. `readable` are the machine's
    paths that the sandbox shows besides, for which a place is left.
    """
    link = find_symlink_above_mounts(root, readable)
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
    return SystemView(options, _copy_shell(root, sandbox_files_directory), _ROOT_INIT, names)


def find_symlink_above_mounts(root: Path, readable: Sequence[str]) -> Path | None:
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
    own = [(sandbox_files_directory / name, name) for name in ACCOUNT_FILE_NAMES]
    if network:
        own += [(Path("/etc", name), name) for name in RESOLVER_FILE_NAMES]
    for source, name in own:
        if (etc / name).is_file() and not (etc / name).is_symlink():
            yield from ("--ro-bind-try", os.path.realpath(source), f"/etc/{name}")


def _copy_shell(root: Path, sandbox_files_directory: Path) -> Path:
    """Return a copy of the root's shell that evaluators may execute and not read."""
    shell = resolve_path_in_root(root, SHELL_PATH)
    status = shell.stat()
    if status.st_size > _MAX_SHELL:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(shell))
    about = (str(shell), status.st_ino, status.st_size, status.st_mtime_ns)
    copy = sandbox_files_directory / f"init-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}"
    if not copy.exists():
        _store_file(copy, shell.read_bytes(), 0o111)
    return copy


def _store_file(path: Path, content: bytes, mode: int, time: float | None = None) -> None:
    """Write a file whole, or leave nothing of it; the one before may be in use.

    `time` is the time of its last change. Raises: OSError, with the path.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")  # two threads may write it at once
    with add_path_to_errors(new):
        try:
            new.write_bytes(content)
            if time is not None:
                os.utime(new, (time, time))
            new.chmod(mode)
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise


def remove_shell_copies(sandbox_files_directory: Path) -> None:
    """Remove the copies of roots' shells that an earlier daemon has made. Blocks. Raises: OSError.

    Running sandboxes keep what they show.
    """
    for copy in sandbox_files_directory.glob("init-*"):
        copy.unlink()


def write_sandbox_files(directory: Path) -> None:
    """Write the sandbox's own passwd and group, its first process's program, broker and tools.

    The first process's program is a shell that the evaluator may execute and not read. Blocks.
    Raises: OSError, with the path.
    """
    if _JUDGE_LIBRARY / "__init__.py" not in _EVALUATOR_TOOLS:
        what = "PyYAML has no source files, which evaluators need; run `pip install PyYAML`"
        raise OSError(errno.ENOENT, what)
    _store_file(directory / "init", Path("/bin/sh").read_bytes(), 0o111)
    for path, (tool, time) in _EVALUATOR_TOOLS.items():
        target = directory / EVALUATOR_TOOLS_DIRECTORY_NAME / path
        target.parent.mkdir(parents=True, exist_ok=True)
        _store_file(target, tool, 0o755 if path.parent.name == "bin" else 0o644, time)
    _store_file(directory / BROKER_PROGRAM_FILE_NAME, _BROKER_PROGRAM, 0o644)
    for name, content in (("passwd", _USERS), ("group", _GROUPS)):
        with add_path_to_errors(directory / name):  # in place: sandboxes of other machines show it
            (directory / name).write_bytes(content)


def locate_bwrap_status_file(workspace: Workspace) -> Path:
    """Return the file to which bwrap appends JSON objects."""
    return workspace.output_directory / "status"


# The numbers of descriptors in bwrap: it reads the evaluator's environment, as options, from the
# first, writes JSON about the sandbox to the second, and loads the filters from the last ones.
# `_NOTES` has the file of the second, too: bwrap hands a descriptor on that is not its own.
_ENVIRONMENT, _STATUS = FIRST_PROGRAM_DESCRIPTOR, FIRST_PROGRAM_DESCRIPTOR + 1
_READ_ONLY = ("--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/")
_FILTERS = (FIRST_PROGRAM_DESCRIPTOR + 3, FIRST_PROGRAM_DESCRIPTOR + 4)


class BubblewrapRun(SandboxedRun):
    """The run of an evaluator by bwrap. The starter ends the submission's programs with it.

    Its end is told by what bwrap writes to the status file.
    """

    workspace_mount_point = WORKSPACE_MOUNT_POINT
    _sandbox: BubblewrapSandbox

    @property
    def has_network(self) -> bool:
        """Whether the evaluator reaches the network, which could change what a build makes."""
        return self._sandbox.has_network and not self.is_build

    def make_launch_spec(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> LaunchSpec:
        """Return bwrap with the shell and the command in it. Raises: OSError.

        The environment of bwrap itself is empty: a submission could read it even if the evaluator
        hides its own.
        """
        words = ["--clearenv"]
        for name, value in add_tools_to_path(environment, str(_TOOLS)).items():
            words += ["--setenv", name, value]
        status = str(locate_bwrap_status_file(self.workspace))
        view = self.workspace_view
        rlimits = dict(self.run_limits.list_rlimits(apart=True))
        files, _ = rlimits.pop("nofile")
        if "nproc" in rlimits:
            # With bwrap's own process outside.
            rlimits["nproc"] = (self.limits.processes + 1,) * 2
        runner = self.workspace.root / BROKER_SOCKET_NAME
        sandbox = self._sandbox
        if self.is_build:
            sandbox = attrs.evolve(sandbox, has_network=False)
        system = sandbox.make_system_view(self._environment)
        inside, shell = view.translate_path(directory), ["/bin/sh", "-c", command]
        argv = sandbox.build_argv(view, inside, runner, shell, files, system)
        return LaunchSpec(
            argv,
            {},
            "/",
            [
                {"text": "\0".join(words)},
                {"append": status},
                {"append": status},
                *self._sandbox.store_filter_files(),
            ],
            rlimits=rlimits,
            has_own_process_limit=True,
            broker_specification=self._make_broker_spec(system),
            broker_socket_path=str(runner),
        )

    def _make_broker_spec(self, system: SystemView) -> LaunchSpec:
        """Return the broker of the submission's programs, in the evaluation's cgroup."""
        group = self.run_limits.cgroup
        assert group is not None, "made by the start"
        view, sandbox = self.workspace_view, self._sandbox
        has_limits = {"memory", "processes"} <= sandbox.cgroup_manager.enforced_resources
        configuration = {
            "bwrap_argv": [
                sandbox.bwrap_path,
                *build_isolation_options("submission"),
                *system.bwrap_options,
            ],
            "additional_system_paths": [f"/{name}" for name in system.directory_names],
            "environment": dict(self._environment.variables) if self._environment else {},
            "readable_paths": list(sandbox.readable_paths),
            "mounts": [
                *((str(inside), str(outside), True) for inside, outside in view.writable_paths),
                *((str(inside), str(outside), False) for inside, outside in view.readable_paths),
                *((path, path, False) for path in sandbox.readable_paths),
            ],
            "rlimits": self.run_limits.list_rlimits(apart=True),
            "memory_bytes": self.limits.memory,
            "max_processes": self.limits.processes,
            "parent_pid": self._launcher.starter.pid,
            "cgroup_directory": group.directory.path if has_limits else "",
        }
        program = f"/proc/self/fd/{FIRST_PROGRAM_DESCRIPTOR}"
        return LaunchSpec(
            [_PYTHON, "-I", "-S", program, BROKER_PROCESS_NAME],
            {},
            "/",
            [
                {"read": str(sandbox.sandbox_files_directory / BROKER_PROGRAM_FILE_NAME)},
                {"text": json.dumps(configuration)},
                {"socket": ""},
                *sandbox.store_filter_files(),
            ],
            procs_files=group.procs_files,
            niceness=sandbox.cgroup_manager.evaluator_niceness,
        )

    def close(self) -> None:
        """Kill the program, and log what the broker has said. Blocks. Raises: OSError."""
        super().close()
        said_file = self.workspace.output_directory / "broker-stderr"
        with contextlib.suppress(FileNotFoundError):
            with said_file.open("rb") as file:
                said = file.read(_SAID_BYTES).decode(errors="replace")
            said_file.unlink()  # not to log it again if the cgroup cannot be removed yet
            if said:
                what = "the broker of an evaluation's submissions has failed: {said}"
                log.warn(what, said=said)

    def send_signal(self, child: TailedProcess, number: int) -> None:
        """Send a signal to the processes in the sandbox."""
        signal_sandbox(child.pid, number, child.signal_group)

    async def kill_remaining_processes(self) -> None:
        """Kill the first process in the sandbox if it outlives bwrap; all others end with it.

        So do the programs of the submission.
        """
        told = re.search(rb'"child-pid": (\d+)', self._told())
        if told and kernel_files.is_pid_in_use(int(told[1])):
            pid, starter = int(told[1]), self._launcher.starter.pid
            await self._launcher.run_in_thread(partial(kill_adopted_process, pid, starter))

    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the evaluator's exit; bwrap reports a signal as shells do, by 128 more."""
        told = self._told()
        if number is not None:  # bwrap itself was killed
            if b'"child-pid"' in told:
                return EvaluatorExit(None, number)
            raise EvaluationFailure("lost", f"signal {number} ended the sandbox at its start")
        if b'"exit-code"' not in told:
            what = "the sandbox could not be started; see `tawebeval doctor`"
            raise EvaluationFailure("lost", what, {"status": status or 0})
        if _BEGUN.encode() not in told:
            what = "the sandbox could not start a process for the evaluator; see `tawebeval doctor`"
            raise EvaluationFailure("lost", what, {"status": status or 0})
        if status is not None and status - _SIGNALLED in _SIGNALS:
            return EvaluatorExit(None, status - _SIGNALLED)
        return EvaluatorExit(status or 0)

    def _told(self) -> bytes:
        """Return the JSON objects that bwrap has written."""
        try:
            with locate_bwrap_status_file(self.workspace).open("rb") as file:
                return file.read(_STATUS_BYTES)
        except FileNotFoundError:
            return b""


@attrs.define
class BubblewrapSandbox(Sandbox):
    """The sandbox of `sandbox.kind = "bubblewrap"`.

    - `bwrap_path`: the path of bwrap.
    - `sandbox_files_directory`: the directory of `write_sandbox_files`.
    - `filter_programs`: the programs of the system call filters (`make_seccomp_filters`).
    - `readable_paths`: other paths that evaluators may read (`sandbox.readable`).
    """

    run_class: ClassVar[type[SandboxedRun]] = BubblewrapRun
    bwrap_path: str
    sandbox_files_directory: Path
    filter_programs: Sequence[bytes]
    readable_paths: Sequence[str]
    has_network: bool
    _filter_files: Sequence[Mapping[str, str]] | None = attrs.field(default=None, init=False)

    def make_system_view(self, environment: Environment | None = None) -> SystemView:
        """Return what runs in an environment see as their system. Blocks. Raises: OSError."""
        accounts = self.sandbox_files_directory
        if environment is None:
            return _make_machine_view(accounts, self.has_network, int(monotonic()))
        root, readable = environment.root, self.readable_paths
        return _make_root_view(root, accounts, readable, network=self.has_network)

    def store_filter_files(self) -> Sequence[Mapping[str, str]]:
        """Store the filters' programs in files; return the descriptors of a `LaunchSpec` for these.

        Blocks. Raises: OSError. In a `LaunchSpec` the programs would be three quarters of it, twice
        in each start.
        """
        if self._filter_files is None:
            stored = map(self._store_filter, self.filter_programs)
            self._filter_files = [{"read": str(path)} for path in stored]
        return self._filter_files

    def _store_filter(self, program: bytes) -> Path:
        """Write a filter into a file; its name has the digest, for brokers outlive the daemon."""
        name = f"filter-{hashlib.sha256(program).hexdigest()[:16]}"
        _store_file(self.sandbox_files_directory / name, program, 0o444)
        return self.sandbox_files_directory / name

    def build_argv(
        self,
        view: WorkspaceView,
        directory: Path,
        runner: Path,
        command: Sequence[str],
        open_files: int,
        system: SystemView,
    ) -> Sequence[str]:
        """Return the arguments that run `command` in `directory`, a path in the sandbox.

        `runner` is the socket by which submissions are run.
        """
        argv = [self.bwrap_path, "--as-pid-1", "--json-status-fd", str(_STATUS)]
        argv += ["--args", str(_ENVIRONMENT)]
        argv += _build_confinement_options(
            "evaluation", _FILTERS, system.bwrap_options, network=self.has_network
        )
        # A path of `readable` may lie below /tmp, and must not hide the evaluation's own.
        own = [pair for pair in view.writable_paths if pair[0].is_relative_to(view.root)]
        for inside, outside in view.writable_paths:
            if (inside, outside) not in own:
                argv += ["--bind", str(outside), str(inside)]
        for path in self.readable_paths:
            argv += ["--ro-bind", path, path]
        for inside, outside in view.readable_paths:
            argv += ["--ro-bind", str(outside), str(inside)]
        for inside, outside in own:
            argv += ["--bind", str(outside), str(inside)]
        tools = self.sandbox_files_directory / EVALUATOR_TOOLS_DIRECTORY_NAME
        argv += ["--ro-bind", str(tools), str(_TOOLS)]
        argv += ["--ro-bind", str(runner), str(_RUNNER)]
        argv += ["--ro-bind", str(system.shell), system.shell_mount_point]
        argv += [*_READ_ONLY, "--chdir", str(directory)]
        first = system.shell_mount_point
        return [*argv, "--", first, "-c", _WAIT, first, str(open_files), *command]


BWRAP_ERROR_PREFIX = "bwrap: "
"""The beginning of bwrap's own error messages."""

_TEMPORARY = 16 * 2**20  # bytes: git itself needs none
_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"


@attrs.frozen
class SandboxAccess:
    """The access of a command, besides reading its repository, if it has one, and the system.

    `writable_paths` are paths in the repository, `readable_paths` other paths, which need not
    exist.
    """

    writable_paths: Sequence[Path] = ()
    readable_paths: Sequence[str] = ()
    has_network: bool = False


READ_ONLY_ACCESS = SandboxAccess()


@attrs.frozen
class TrustedCommandSandbox:
    """A way to run trusted commands: in a sandbox of bubblewrap, or with the daemon's rights.

    `bwrap_path` is the path of bwrap, None without a sandbox. `filter_programs` are those of the
    system call filters. `system_options` are the bwrap options that show what programs need,
    `network_options` those for what a network needs besides. Each shown file makes the start
    longer.
    """

    bwrap_path: str | None = None
    filter_programs: Sequence[bytes] = ()
    system_options: Sequence[str] = ()
    network_options: Sequence[str] = ()

    @contextmanager
    def open_command_prefix(
        self, repository: Path | None, access: SandboxAccess
    ) -> Iterator[tuple[Sequence[str], Sequence[int]]]:
        """Yield the arguments before a command, and the descriptors that its start needs."""
        if self.bwrap_path is None:
            yield (), ()
            return
        with ExitStack() as opened:
            descriptors: list[int] = []
            for program in self.filter_programs:
                descriptors.append(make_sealed_memfd("filter", program))
                opened.callback(os.close, descriptors[-1])
            options = self._build_options(repository, access, descriptors)
            yield [self.bwrap_path, *options], descriptors

    def _build_options(
        self, repository: Path | None, access: SandboxAccess, filters: Sequence[int]
    ) -> Sequence[str]:
        network = access.has_network
        argv = _build_confinement_options("git", filters, self.system_options, network=network)
        argv += ["--size", str(_TEMPORARY), "--tmpfs", "/tmp"]  # noqa: S108  (a path inside)
        if network:
            argv += self.network_options
            argv += ["--ro-bind-try", _KNOWN_HOSTS, _KNOWN_HOSTS]
        for path in access.readable_paths:
            argv += ["--ro-bind-try", path, path]
        if repository is not None:
            argv += ["--ro-bind", str(repository), str(repository)]
        for writable in access.writable_paths:
            argv += ["--bind", str(writable), str(writable)]
        return [*argv, *_READ_ONLY, "--chdir", "/", "--"]

    def kill_command(self, child: ChildProcess) -> None:
        """Kill a command and its descendants; bwrap ends after the last of them."""
        if self.bwrap_path is None:
            child.signal_group(signal.SIGKILL)
        else:
            signal_sandbox(child.pid, signal.SIGKILL, child.signal_group)
