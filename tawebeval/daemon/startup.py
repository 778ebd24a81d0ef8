"""Startup checks: directories, cgroups, git, sandbox, threads; access and exposure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from twisted.application.service import Service
from twisted.logger import Logger

from tawebeval.config import Configuration
from tawebeval.daemon.directories import DaemonDirectories, locate_directories
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.evaluations.restoring import LeftEvaluations
from tawebeval.git.command import check_git_version
from tawebeval.git.remotes import KERNEL_DIRECTORIES
from tawebeval.linux.cgroups import CgroupManager, describe_missing_limits
from tawebeval.linux.child import kill_stale_processes
from tawebeval.linux.filetree import describe_disk_error
from tawebeval.linux.rlimits import PROCESS_LIMIT_REMEDY
from tawebeval.resolver import SystemResolver
from tawebeval.sandbox.base import Sandbox
from tawebeval.sandbox.bubblewrap import write_sandbox_files
from tawebeval.sandbox.environment_store import locate_store
from tawebeval.sandbox.environments import (
    EnvironmentLocks,
    find_environment_root_problem,
    remove_shell_copies_of_earlier_daemon,
)
from tawebeval.sandbox.probe import ProbeDirectories, check_sandbox_and_log_problems
from tawebeval.slurm.attempts import remove_other_node_programs
from tawebeval.web.auth import (
    Authentication,
    RateLimit,
    find_endpoints_of_unknown_exposure,
    find_metrics_token_file,
    find_token_file,
)

log = Logger()


class StartupChecks(Service):
    """Service that starts before the evaluations, as the daemon's user, and stops last.

    It owns the directories with their locks, the cgroups, the sandbox and the thread `pools`.
    `left` are the evaluations of an earlier process.
    """

    name = "startup"

    def __init__(
        self,
        directories: DaemonDirectories,
        cgroups: CgroupManager,
        sandbox: Sandbox,
        pools: Sequence[WorkerThreads | SystemResolver],
        configuration: Configuration,
        left: LeftEvaluations,
    ) -> None:
        self.directories = directories
        self._left = left
        self._configuration = configuration
        self._cgroups = cgroups
        self._sandbox = sandbox
        self._pools = pools
        self._environment_locks = EnvironmentLocks()

    def startService(self) -> None:
        """Clear the directories, check them, git and the sandbox; start the threads.

        Raises: SystemExit, with a message, if a check fails or no threads can be started.
        """
        super().startService()
        directories = self.directories
        self.lock_environments(self._configuration)
        try:
            self._remove_leftovers()
            if not self._left.job_names:  # a job that waits for a node needs both there
                remove_shell_copies_of_earlier_daemon(directories.sandbox_files_directory)
                remove_other_node_programs(directories.sandbox_files_directory)
            write_sandbox_files(directories.sandbox_files_directory)
            check_git_version()
        except OSError as error:
            raise SystemExit(f"tawebeval: {describe_disk_error(error)}") from None
        except ConfigurationError as error:
            raise SystemExit(f"tawebeval: {error}") from None
        if problem := describe_missing_limits(self._cgroups):
            log.warn("limits: {problem}", problem=problem)
        check_sandbox_and_log_problems(
            self._sandbox, ProbeDirectories(directories.repositories, directories.evaluations)
        )
        try:
            for threads in self._pools:
                threads.start()
            # No pool's: the stop does not wait for it, the next start goes on.
            Thread(target=self._empty_trash, name="trash", daemon=True).start()
        except RuntimeError:
            raise SystemExit(f"tawebeval: threads: {PROCESS_LIMIT_REMEDY}") from None
        except OSError as error:
            raise SystemExit(f"tawebeval: {error.strerror}; {PROCESS_LIMIT_REMEDY}") from None

    def _remove_leftovers(self) -> None:
        """Discard what an earlier process has left, but for evaluations that go on. Blocks.

        Raises: OSError.
        """
        directories, left = self.directories, self._left
        starter = self._sandbox.writable_trees.connect_starter()
        programs = starter.list_programs()
        # A starter that is gone may have left what has hidden from it, of evaluations that end now.
        evaluators = () if programs else (directories.evaluations,)
        kill_stale_processes(directories.repositories, *evaluators)
        for program in programs:
            evaluation = program.parent
            if evaluation.parent != directories.evaluations.resolve() or (
                evaluation.name not in left.running_directory_names
            ):
                starter.forget_program_now(program)
        for name in self._cgroups.list_evaluation_cgroups() - left.cgroup_names:
            try:
                self._cgroups.remove_evaluation_cgroup(name)
            except OSError as error:
                log.warn("cgroup {name} is not removed: {error}", name=name, error=error)
        directories.remove_leftovers(left.directory_names | left.upload_directory_names)

    def _empty_trash(self) -> None:
        try:
            self.directories.empty_trash()
        except OSError as error:
            what = "files of an earlier process in the trash are not removed: {error}"
            log.error(what, error=describe_disk_error(error))  # noqa: TRY400  (no defect)

    def lock_environments(self, configuration: Configuration) -> None:
        """Keep `tawebeval environment remove` from removing the configured environments."""
        roots = [one.root for one in configuration.environments.values()]
        for problem in self._environment_locks.lock_roots(roots):
            log.warn("{problem}", problem=str(problem))

    def stopService(self) -> None:
        """Stop the threads, the sandbox and the cgroups. Blocks until the threads have ended."""
        super().stopService()
        for threads in self._pools:
            threads.stop()
        self._sandbox.writable_trees.close()
        self._cgroups.remove_all_cgroups()


def open_authentication(configuration: Configuration, clock: Any) -> Authentication:
    """Return the authentication of callers.

    Raises: ConfigurationError, if the tokens cannot be read.
    """
    callers = configuration.callers
    source = find_token_file(callers, os.environ)
    return Authentication(RateLimit(callers.requests_per_minute, clock.seconds), source)


def open_metrics_authentication(configuration: Configuration, clock: Any) -> Authentication | None:
    """Return the authentication of metrics readers, None if they need no token.

    Raises: ConfigurationError, if the tokens cannot be read.
    """
    source = find_metrics_token_file(configuration.metrics, os.environ)
    return (
        None
        if source is None
        else Authentication(RateLimit(0, clock.seconds), source, "metrics.tokens")
    )


def find_exposed_endpoints(configuration: Configuration) -> Iterator[SetupProblem]:
    """Yield the endpoints by which anybody may reach a daemon without tokens, as problems.

    Raises: ConfigurationError, for an endpoint that other machines reach, unless `callers.open`.
    """
    if configuration.callers.open:
        yield SetupProblem(
            "no tokens, and callers.open is true: everybody who can connect may run programs here",
            "run `tawebeval token new NAME`, set callers.tokens, and remove callers.open",
        )
        return
    for endpoint in find_endpoints_of_unknown_exposure(configuration.listen):
        yield SetupProblem(
            f"no tokens (callers.tokens): everybody who reaches the socket of {endpoint} may run"
            " programs here",
            "run `tawebeval token new NAME`, and set callers.tokens",
        )


def check_sandbox_readable_paths(
    configuration: Configuration, file: str | Path | None, environment: Mapping[str, str]
) -> None:
    """Check that `sandbox.readable` shows evaluators no path of the daemon or the kernel. Blocks.

    `file` is the configuration file, `environment` that of the daemon. Without a sandbox nothing is
    checked. Raises: ConfigurationError, for a path that equals, contains or is inside a private
    one.
    """
    sandbox = configuration.sandbox
    if sandbox.kind == "none":
        return
    private = _list_private_places(configuration, file, environment)
    for index, path in enumerate(sandbox.readable):
        for place in _list_spellings(path):
            for what, other in private:
                if place.is_relative_to(other) or other.is_relative_to(place):
                    raise ConfigurationError(
                        f"sandbox.readable[{index}]: {path} would show evaluators {what} ({other})",
                        "list only what evaluators need",
                    )


def check_environments(
    configuration: Configuration, file: str | Path | None, environment: Mapping[str, str]
) -> None:
    """Check that evaluators can run in all environments, and see no private path there. Blocks.

    The arguments are those of `check_sandbox_readable_paths`. Raises: ConfigurationError.
    """
    if not configuration.environments:
        return
    private = _list_private_places(configuration, file, environment)
    stores = _list_spellings(locate_store(locate_directories(environment)[0]))
    for name, settings in configuration.environments.items():
        setting = f"environments.{name}.root"
        for place in _list_spellings(settings.root):
            for what, other in private:
                inside = place.is_relative_to(other) and place.parent not in stores
                if inside or other.is_relative_to(place):
                    raise ConfigurationError(
                        f"{setting}: {settings.root} would show evaluators {what} ({other})",
                        "name the root that `tawebeval environment import` made, or a directory"
                        " with nothing else",
                    )
        problem = find_environment_root_problem(Path(settings.root), configuration.sandbox.readable)
        if problem is not None:
            raise ConfigurationError(f"{setting}: {problem[0]}", problem.remedy)


def _list_private_places(
    configuration: Configuration, file: str | Path | None, environment: Mapping[str, str]
) -> Sequence[tuple[str, Path]]:
    return [
        (what, place)
        for what, path in _private_paths(configuration, file, environment)
        for place in _list_spellings(path)
    ]


def _private_paths(
    configuration: Configuration, file: str | Path | None, environment: Mapping[str, str]
) -> Iterator[tuple[str, str | Path]]:
    """Yield a description and the path of each private file or directory."""
    state, cache = locate_directories(environment)
    handed_over = environment.get("CREDENTIALS_DIRECTORY", "")
    paths = (
        ("the state directory", state),
        ("the cache directory", cache),
        ("the archive", configuration.archive.enabled and configuration.archive.directory),
        ("the configuration", file),
        ("the tokens", configuration.callers.tokens),
        ("the metrics' tokens", configuration.metrics.tokens),
        ("the secrets of callbacks", configuration.callbacks.secrets),
        ("systemd's credentials", handed_over),
        *(
            ("a credential", name and Path(handed_over, name))
            for entry in configuration.repositories.credentials
            for name in (entry.password_file, entry.key_file)
        ),
        *(("the kernel's files of processes and devices", path) for path in KERNEL_DIRECTORIES),
    )
    for what, path in paths:
        if path:
            yield what, path


def _list_spellings(path: str | Path) -> set[Path]:
    """Return the absolute path as written, and the path with symbolic links resolved."""
    return {Path(os.path.abspath(path)), Path(os.path.realpath(path))}
