"""The sandbox of bubblewrap (bwrap(1)), which needs no privilege.

An evaluator in it has namespaces of its own for users, processes, mounts, network, IPC, host name
and cgroups; no capability, and no way to get one; a filter of system calls; and a file system of

/usr, /bin, ...         the system, read-only, and a few files of /etc that programs there need
/evaluation/tree        the commit's tree, writable; the evaluator runs in a directory of it
/evaluation/submission  the uploaded files, read-only
/evaluation/tmp         TEMPORARY_DIRECTORY
/evaluation/home        HOME
/evaluation/tools       tools for evaluators, read-only
/evaluation/runner      the socket by which submissions are run (`broker`)
/tmp, /dev/shm          directories of the workspace, so that one disk limit holds for all
/init                   the first process

and the paths of `sandbox.readable`. An environment's root takes the place of the system
(`environments`). When the first process or the daemon ends, the kernel ends all
processes of the sandbox.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from glob import glob
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.protocol import ProcessProtocol

from tawebeval.config import LimitSettings
from tawebeval.core.checkout import Checkout
from tawebeval.core.evaluator_environment import add_tools_to_path
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import EvaluationFailure
from tawebeval.linux.cgroups.manager import CgroupManager
from tawebeval.linux.child import ProcessAdopter, ProcessTransport, StartedProcess
from tawebeval.linux.filetree import add_path_to_errors
from tawebeval.linux.launcher_client import FIRST_PASSED_DESCRIPTOR, LaunchSpec
from tawebeval.linux.reaper import OrphanReaper, list_descendants, send_signal
from tawebeval.sandbox.base import (
    EVALUATOR_TOOLS,
    EvaluatorExit,
    SandboxedRun,
    convert_rlimit_names,
)
from tawebeval.sandbox.broker import PROTOCOL_VERSION, measure_cpu_seconds
from tawebeval.sandbox.broker_client import (
    BROKER_SOCKET_NAME,
    BrokerStarter,
    listen_in_directory,
    make_broker_spec,
)
from tawebeval.sandbox.environments import (
    Environment,
    SystemView,
    lock_environment_root,
    make_system_view,
)
from tawebeval.sandbox.overlay import WritableTrees
from tawebeval.sandbox.prepared_etc import PreparedEtc
from tawebeval.sandbox.workspace import Workspace, WorkspaceView


def build_isolation_options(hostname: str) -> Sequence[str]:
    """Return the bwrap options for all namespaces, no capability, and no way to get one."""
    return (
        *("--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent"),
        *("--new-session", "--uid", "1000", "--gid", "1000", "--hostname", hostname),
        *("--cap-drop", "ALL"),
    )


def build_filter_options(filters: Iterable[int]) -> Sequence[str]:
    """Return the bwrap options that load system call filters, by their descriptors."""
    return [word for filter_ in filters for word in ("--add-seccomp-fd", str(filter_))]


def reopen_seccomp_filters(filters: Iterable[int], opened: contextlib.ExitStack) -> tuple[int, ...]:
    """Return descriptors of the filters for one bwrap, with file offsets of their own.

    `opened` closes them. Raises: OSError.
    """
    descriptors = []
    for filter_ in filters:
        descriptors.append(os.open(f"/proc/self/fd/{filter_}", os.O_RDONLY | os.O_CLOEXEC))
        opened.callback(os.close, descriptors[-1])
    return tuple(descriptors)


def signal_sandbox(child: ProcessTransport, number: int) -> None:
    """Send a signal to the processes in a sandbox, of which `child` is bwrap.

    bwrap itself gets none: it ends after the processes inside. If nothing is inside but the first
    process, which ignores signals, the program has not begun or has ended: then kill everything.
    """
    inside = list_descendants(child.pid)
    for pid in inside:
        send_signal(pid, number if len(inside) > 1 else signal.SIGKILL)
    if not inside:
        child.signal_group(signal.SIGKILL)


# The first process waits for the command; all others end with it. The evaluator is the same user,
# and could change it by /proc/1/mem or read its secrets. So it is a program that this user may
# execute and not read, which closes its process to others (execve(2)). Its own messages go nowhere,
# and stdin is the sandbox's own /dev/null. Before the command it notes that it could make a
# process: its exit status does not tell that. The command does not get the note's descriptor. Its
# first argument is the limit of descriptors, of which bwrap may need more.
_INIT = "/init"
_NOTES = FIRST_PASSED_DESCRIPTOR + 2  # the descriptor for that
_BEGUN = '"begun"'
_WAIT = (
    "exec 3>&2 2>/dev/null </dev/null;"
    f""" (ulimit -n "$1" && shift && {{ echo '{{ {_BEGUN}: true }}' >&{_NOTES};"""
    f""" exec "$@" 2>&3 3>&- {_NOTES}>&-; }}); exit $?"""
)

WORKSPACE_MOUNT_POINT = Path("/evaluation")
"""The path under which an evaluator finds its workspace."""
TOOLS_NAME = f"tools-{PROTOCOL_VERSION}"
"""The name of the directory with the tools for evaluators among the files of the sandbox.

Evaluations that outlive an upgrade keep the tools that their broker understands.
"""
_TOOLS, _RUNNER = WORKSPACE_MOUNT_POINT / "tools", WORKSPACE_MOUNT_POINT / "runner"
SYSTEM_ROOT_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")

# Of /etc: directories with hundreds of links, which would take long to copy; the second one only
# with a network ...
_ALTERNATIVES, _CERTIFICATES = "alternatives", "ssl/certs"
# ... how programs find their libraries ...
_ETC_PROGRAMS = ("ld.so.*",)
# ... what else some of them read, and what time it is.
_ETC = (
    *("debian_version", "fonts", "java-*", "localtime", "magic", "mime.types", "os-release"),
    *("perl", "python3*", "timezone"),
)
# With a network: how they find hosts, and whom they trust.
_ETC_NETWORK = (
    *("ca-certificates", "gai.conf", "hosts", "nsswitch.conf", "protocols", "resolv.conf"),
    *("services", "ssl/openssl.cnf"),
)
# What bwrap, as shells do, adds to a signal to make an exit status of it; and the signals.
_SIGNALLED = 128
_SIGNALS = frozenset(map(int, signal.valid_signals()))
_USERS = b"evaluator:x:1000:1000::/evaluation/home:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
_GROUPS = b"evaluator:x:1000:\nnogroup:x:65534:\n"


def prepare_etc(accounts: Path, readable: Sequence[str], *, network: bool) -> PreparedEtc:
    """Return the /etc of evaluators, not made yet.

    `accounts` is the directory of `write_sandbox_files`; `readable` are other paths that the
    sandbox shows.
    """
    patterns = (*_ETC_PROGRAMS, *_ETC, *(_ETC_NETWORK if network else ()))
    own = {"passwd": _USERS, "group": _GROUPS}
    places = [*readable, *(f"/etc/{name}" for name in _list_bound(network=network))]
    return PreparedEtc(accounts / "etc", patterns, own, places)


def build_system_options(etc: Path, *, network: bool) -> Iterator[str]:
    """Yield the bwrap options that show the system, read-only, with `etc` as /etc. Blocks."""
    yield from _build_directory_options()
    yield from ("--ro-bind", str(etc), "/etc")
    yield from _etc(_list_bound(network=network))


def _list_bound(*, network: bool) -> Sequence[str]:
    return (_ALTERNATIVES, _CERTIFICATES) if network else (_ALTERNATIVES,)


def build_minimal_system_options(accounts: Path) -> Iterator[str]:
    """Yield the options for what nearly every program needs. Blocks.

    `accounts` is the directory of `write_sandbox_files`.
    """
    yield from _build_directory_options()
    yield from _etc((_ALTERNATIVES, *_ETC_PROGRAMS))
    for name in ("passwd", "group"):
        yield from ("--ro-bind", str(accounts / name), f"/etc/{name}")


def _build_directory_options() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for name in SYSTEM_ROOT_DIRECTORIES:
        path = Path("/", name)
        if path.is_symlink():  # into /usr, as usual today
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))


def build_network_options() -> Iterator[str]:
    """Yield the options for what programs need to use a network. Blocks."""
    yield from _etc((*_ETC_NETWORK, _CERTIFICATES))


def _etc(patterns: Sequence[str]) -> Iterator[str]:
    for pattern in patterns:
        for found in sorted(glob(f"/etc/{pattern}")):
            yield from ("--ro-bind-try", os.path.realpath(found), found)


def list_mount_sources(options: Sequence[str]) -> Iterator[str]:
    """Yield the paths that bwrap options show."""
    for option, path in pairwise(options):
        if option in ("--bind", "--ro-bind", "--ro-bind-try"):
            yield path


def write_sandbox_files(directory: Path) -> None:
    """Write the sandbox's own passwd and group, its first process's program, and the tools.

    That program is a shell that the evaluator may execute and not read. Blocks. Raises: OSError,
    with the path.
    """
    new = directory / "init.new"
    shell = Path("/bin/sh").read_bytes()
    with add_path_to_errors(new):
        new.write_bytes(shell)
        new.chmod(0o111)
        new.replace(directory / "init")
    for path, (tool, time) in EVALUATOR_TOOLS.items():
        target = directory / TOOLS_NAME / path
        with add_path_to_errors(target):
            _write_tool(target, tool, time)
    for name, content in (("passwd", _USERS), ("group", _GROUPS)):
        with add_path_to_errors(directory / name):
            (directory / name).write_bytes(content)


def _write_tool(path: Path, content: bytes, time: float) -> None:
    """Write a file over another one that may be in use."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    os.utime(new, (time, time))
    new.chmod(0o755 if path.parent.name == "bin" else 0o644)
    new.replace(path)


@attrs.frozen
class BubblewrapDescriptors:
    """The descriptors that bwrap needs.

    bwrap reads the evaluator's environment, as options, from `environment_descriptor`, and writes
    JSON about the sandbox to `status_descriptor`. `filter_descriptors` are those of the two system
    call filters.
    """

    environment_descriptor: int
    status_descriptor: int
    filter_descriptors: tuple[int, ...]

    def __iter__(self) -> Iterator[int]:
        # That of the status twice: bwrap hands a descriptor on that is not its own.
        yield from (self.environment_descriptor, self.status_descriptor, self.status_descriptor)
        yield from self.filter_descriptors


_GIVEN = BubblewrapDescriptors(
    FIRST_PASSED_DESCRIPTOR,
    FIRST_PASSED_DESCRIPTOR + 1,
    (FIRST_PASSED_DESCRIPTOR + 3, FIRST_PASSED_DESCRIPTOR + 4),
)
"""The numbers that these have in bwrap, besides `_NOTES`."""


@attrs.define
class BubblewrapSandbox:
    """The sandbox of `sandbox.kind = "bubblewrap"`.

    - `bwrap_path`: the path of bwrap.
    - `sandbox_files_directory`: the directory of `write_sandbox_files`.
    - `filter_descriptors`: those of the system call filters (`make_seccomp_filters`).
    - `system_options`: the options of `build_system_options`.
    - `etc`: the /etc that they show; None if it never changes.
    - `readable_paths`: other paths that evaluators may read (`sandbox.readable`).
    - `keeper_pid`: the parent of what is started; None if that is the daemon.
    """

    bwrap_path: str
    sandbox_files_directory: Path
    filter_descriptors: tuple[int, ...]
    system_options: Sequence[str]
    readable_paths: Sequence[str]
    has_network: bool
    writable_trees: WritableTrees
    limits: LimitSettings
    cgroup_manager: CgroupManager
    orphan_reaper: OrphanReaper
    keeper_pid: int | None = None
    etc: PreparedEtc | None = None

    def make_run(
        self,
        workspace: Workspace,
        checkout: Checkout,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> SandboxedRun:
        """Return the run of an evaluation with these limits, not started yet."""
        return BubblewrapRun(workspace, checkout, self, limits, environment)

    def make_system_view(self, environment: Environment | None = None) -> SystemView:
        """Return what runs in an environment see as their system. Blocks. Raises: OSError."""
        if environment is None:
            if self.etc is not None:
                self.etc.update()
            return SystemView(self.system_options, self.sandbox_files_directory / "init", _INIT)
        return make_system_view(
            environment.root,
            self.sandbox_files_directory,
            self.readable_paths,
            network=self.has_network,
        )

    def list_needed_paths(self, *more: Path | None) -> Sequence[str]:
        """Return the paths that most starts need; `more` are those of checkouts.

        `readable_paths` are not among them: they may be on disks that come and go, or hang. There
        are none if bwrap and its libraries are not the system's.
        """
        if not os.path.realpath(self.bwrap_path).startswith("/usr/"):
            return ()
        return (
            *list_mount_sources(self.system_options),
            *("/etc/ld.so.cache", str(self.sandbox_files_directory.resolve().parent)),
            *self.cgroup_manager.parent_paths,
            *(str(path.resolve()) for path in more if path is not None),
        )

    def build_argv(
        self,
        view: WorkspaceView,
        directory: Path,
        runner: Path,
        command: Sequence[str],
        open_files: int,
        system: SystemView | None = None,
    ) -> Sequence[str]:
        """Return the arguments that run `command` in `directory`, a path in the sandbox.

        `runner` is the socket by which submissions are run; `system` None is the machine's.
        """
        system = system or self.make_system_view()
        argv = [
            self.bwrap_path,
            *build_isolation_options("evaluation"),
            "--as-pid-1",
            *(("--share-net",) if self.has_network else ()),
        ]
        argv += build_filter_options(_GIVEN.filter_descriptors)
        argv += ["--json-status-fd", str(_GIVEN.status_descriptor)]
        argv += ["--args", str(_GIVEN.environment_descriptor)]
        argv += [*system.bwrap_options, "--proc", "/proc", "--dev", "/dev"]
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
        argv += ["--ro-bind", str(self.sandbox_files_directory / TOOLS_NAME), str(_TOOLS)]
        argv += ["--ro-bind", str(runner), str(_RUNNER)]
        argv += ["--ro-bind", str(system.shell), system.shell_mount_point]
        for place in ("/proc", "/dev", "/"):
            argv += ["--remount-ro", place]
        argv += ["--chdir", str(directory)]
        first = system.shell_mount_point
        return [*argv, "--", first, "-c", _WAIT, first, str(open_files), *command]


class BubblewrapRun(SandboxedRun):
    """One run of bubblewrap."""

    def __init__(
        self,
        workspace: Workspace,
        checkout: Checkout,
        sandbox: BubblewrapSandbox,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> None:
        super().__init__(workspace, checkout, sandbox, limits)
        self._sandbox = sandbox
        self._environment = environment
        self._system: SystemView | None = None
        self.has_network = sandbox.has_network
        self._opened = contextlib.ExitStack()
        self._descriptors: BubblewrapDescriptors | None = None
        self._lock: int | None = None  # of the environment
        self._listening: socket.socket | None = None
        self._connect_broker: Callable[[ProcessProtocol], object] | None = None
        self._submissions: BrokerStarter | None = None

    def make_workspace_view(self) -> WorkspaceView:
        """Return the evaluator's view of the workspace."""
        return self.workspace.make_sandboxed_view(WORKSPACE_MOUNT_POINT)

    def start_evaluator(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> StartedProcess:
        """Start the shell that runs `command` in `directory`, a path of the daemon's. Blocks."""
        self._lock_environment()
        self._listening = self._opened.enter_context(listen_in_directory(self.workspace.root))
        return super().start_evaluator(command, environment, directory)

    def _lock_environment(self) -> None:
        if self._environment is not None:
            self._lock = lock_environment_root(self._environment.root)
            self._opened.callback(os.close, self._lock)

    def list_descriptors(self) -> Sequence[int]:
        """Return the open descriptors of a started run, in the order of `resume`."""
        assert self._descriptors is not None, "the run was started"
        assert self._listening is not None, "the run was started"
        lock = () if self._lock is None else (self._lock,)
        own = self._descriptors.status_descriptor, self._listening.fileno()
        return (*super().list_descriptors(), *lock, *own)

    def resume(
        self,
        described: Mapping[str, Any],
        descriptors: Sequence[int],
        connect_broker: Callable[[ProcessProtocol], object] | None = None,
    ) -> None:
        """Go on with a run that was started by another process of the daemon. Blocks."""
        super().resume(described, descriptors, connect_broker)
        status, listening = descriptors[-2:]
        self._opened.callback(os.close, status)
        self._descriptors = BubblewrapDescriptors(-1, status, ())
        self._listening = self._opened.enter_context(socket.socket(fileno=listening))
        self._connect_broker = connect_broker
        if self._environment is not None:
            self._lock = descriptors[-3]
            self._opened.callback(os.close, self._lock)
        self._system = self._sandbox.make_system_view(self._environment)

    def make_launch_spec(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> LaunchSpec:
        """Return bwrap with the shell and the command in it. Raises: OSError.

        The environment of bwrap itself is empty: a submission could read it even if the evaluator
        hides its own.
        """
        opened = self._open()
        words = ["--clearenv"]
        for name, value in add_tools_to_path(environment, str(_TOOLS)).items():
            words += ["--setenv", name, value]
        os.pwrite(opened.environment_descriptor, os.fsencode("\0".join(words)), 0)
        view = self.make_workspace_view()
        rlimits = dict(self._list_rlimits(apart=True))
        files, _ = rlimits.pop("nofile")
        if "nproc" in rlimits:
            rlimits["nproc"] = (self.limits.processes + 1,) * 2  # with bwrap's own outside
        runner = self.workspace.root / BROKER_SOCKET_NAME
        self._system = self._sandbox.make_system_view(self._environment)
        argv = self._sandbox.build_argv(
            *(view, view.translate_path(directory), runner),
            ["/bin/sh", "-c", command],
            files,
            self._system,
        )
        paths = (*list_mount_sources(argv[: argv.index("--")]), *self._cgroups.parent_paths)
        return LaunchSpec(
            argv,
            {},
            "/",
            tuple(opened),
            rlimits=convert_rlimit_names(rlimits),
            has_own_process_limit=True,
            needed_paths=paths,
        )

    def _open(self) -> BubblewrapDescriptors:
        """Open the descriptors for bwrap, once."""
        if self._descriptors is None:
            filters = reopen_seccomp_filters(self._sandbox.filter_descriptors, self._opened)
            files = []
            for name in ("environment", "status"):
                files.append(os.memfd_create(name, os.MFD_CLOEXEC))
                self._opened.callback(os.close, files[-1])
            self._descriptors = BubblewrapDescriptors(files[0], files[1], filters)
        return self._descriptors

    def serve_submission_run_requests(
        self,
        reactor: Any,
        threads: WorkerThreads,
        spawner: ProcessAdopter,
        stop: Callable[[EvaluationFailure], object],
    ) -> None:
        """Run programs of the submission when the evaluator asks; `stop` it if none can run."""
        assert self._listening is not None, "the run was started"
        self._submissions = BrokerStarter(
            *(self._listening, reactor, threads, spawner, self._start_broker, stop),
            self._connect_broker,
        )

    def _start_broker(self, listening: int) -> StartedProcess:
        """Start the broker, in the evaluation's cgroup. Blocks. Raises: OSError."""
        assert self._first is not None, "the evaluator runs"
        assert self._group is not None, "made by the start"
        assert self._system is not None, "made by the start"
        view, sandbox = self.make_workspace_view(), self._sandbox
        configuration = {
            "bwrap": [
                sandbox.bwrap_path,
                *build_isolation_options("submission"),
                *self._system.bwrap_options,
            ],
            "system_paths": [f"/{name}" for name in self._system.directory_names],
            "environment": dict(self._environment.variables) if self._environment else {},
            "readable_paths": list(sandbox.readable_paths),
            "mounts": [
                *((str(inside), str(outside), True) for inside, outside in view.writable_paths),
                *((str(inside), str(outside), False) for inside, outside in view.readable_paths),
                *((path, path, False) for path in sandbox.readable_paths),
            ],
            "rlimits": self._list_rlimits(apart=True),
            "memory_bytes": self.limits.memory,
            "max_processes": self.limits.processes,
            "parent_pid": sandbox.keeper_pid or os.getpid(),
            "cgroup_directories": self._group.find_resource_directories(),
        }
        making = make_broker_spec(
            configuration, listening, sandbox.filter_descriptors, self._group.find_procs_files()
        )
        with making as spec, self._orphans.expect_new_child() as tell:
            overlay_mount_pid = None if self._tree is None else self._first.pid
            started = self._trees.start_program_without_tree(
                attrs.evolve(
                    spec,
                    niceness=self._cgroups.evaluator_niceness,
                    overlay_mount_pid=overlay_mount_pid,
                )
            )
            tell(started.pid)
        return started

    def _pids(self) -> Iterable[int]:
        """Return the processes of the evaluator and of its submissions."""
        pid = self._submissions.broker_pid if self._submissions is not None else None
        return [*super()._pids(), *(list_descendants(pid) if pid is not None else ())]

    def _measure_cpu_seconds(self) -> float:
        """Return also the time of the submission's programs."""
        pid = self._submissions.broker_pid if self._submissions is not None else None
        used = measure_cpu_seconds(pid) if pid is not None else 0.0
        return super()._measure_cpu_seconds() + used

    def send_signal(self, child: ProcessTransport, number: int) -> None:
        """Send a signal to the processes in the sandbox."""
        signal_sandbox(child, number)

    async def kill_remaining_processes(self) -> None:
        """Kill the first process in the sandbox if it outlives bwrap; all others end with it.

        So do the programs of the submission.
        """
        if self._submissions is not None:
            await self._submissions.end_broker()
        told = re.search(rb'"child-pid": (\d+)', self._told())
        if told and self._sandbox.keeper_pid is None:
            await self._orphans.kill_child(int(told[1]))
        elif told and self._group is not None:
            await self._orphans.kill_group_member(int(told[1]), self._group)

    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the evaluator's exit; bwrap reports a signal as shells do, by 128 more."""
        told = self._told()
        if number is not None:  # bwrap itself was killed
            if b'"child-pid"' in told:
                return EvaluatorExit(None, number)
            raise EvaluationFailure("lost", f"signal {number} ended the sandbox at its start")
        if b'"exit-code"' not in told:
            raise EvaluationFailure(
                "lost",
                "the sandbox could not be started; see `tawebeval doctor`",
                {"status": status or 0},
            )
        if _BEGUN.encode() not in told:
            what = "the sandbox could not start a process for the evaluator; see `tawebeval doctor`"
            raise EvaluationFailure("lost", what, {"status": status or 0})
        if status is not None and status - _SIGNALLED in _SIGNALS:
            return EvaluatorExit(None, status - _SIGNALLED)
        return EvaluatorExit(status or 0)

    def _told(self) -> bytes:
        """Return the JSON objects that bwrap has written."""
        return os.pread(self._descriptors.status_descriptor, 4096, 0) if self._descriptors else b""

    def close(self) -> None:
        """Close the descriptors, and remove what the start has made. Blocks. Raises: OSError."""
        self._descriptors = None
        self._opened.close()
        super().close()
