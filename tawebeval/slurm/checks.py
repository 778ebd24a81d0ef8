"""Checks of a cluster: by the daemon's start, and by `tawebeval doctor`, also with a job."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tawebeval.config import Configuration
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.linux.privileges import User
from tawebeval.slurm.commands import COMMAND_TIMEOUT, build_command_environment
from tawebeval.slurm.jobs import NODE_MODULE, build_srun_options, merge_job_settings

SLURM_COMMANDS = ("srun", "squeue", "scontrol", "scancel")
"""The commands of Slurm that the daemon runs."""

_JOB_SECONDS = 90.0  # for the job of the check, with its wait for a node
_LATE = "no answer within {:g} seconds"
_INSTALL = "run `apt-get install slurm-client`, and set up this machine as a client of the cluster"


def check_shared_directories(configuration: Configuration, directories: Sequence[Path]) -> None:
    """Check that the daemon's directories lie in `runner.shared`, if it is set.

    Raises: ConfigurationError.
    """
    if not configuration.runner.shared_directory:
        return
    shared = Path(configuration.runner.shared_directory)
    for directory in directories:
        if not directory.resolve().is_relative_to(shared.resolve()):
            raise ConfigurationError(
                f"runner.shared: {directory} is not in {shared}, so the nodes would not see it",
                "name directories in it by STATE_DIRECTORY and CACHE_DIRECTORY",
            )


def check_cluster(
    configuration: Configuration,
    directories: Sequence[Path],
    user: User | None,
    act_as_user: Callable[[], AbstractContextManager[None]],
    environment: Mapping[str, str],
) -> Iterator[str | SetupProblem]:
    """Yield what works of a cluster, from this machine and by a job on a node. Blocks.

    `directories` are the state and the cache. Raises: ConfigurationError, OSError.
    """
    missing = [name for name in SLURM_COMMANDS if shutil.which(name) is None]
    if missing:
        raise ConfigurationError(
            f"runner.kind: {', '.join(missing)} of Slurm is not installed", _INSTALL
        )
    check_shared_directories(configuration, directories)
    run = _CommandRunner(user, build_command_environment(environment))
    pinged = run("scontrol", "ping")
    if " UP" not in pinged:
        raise ConfigurationError(
            f"runner.kind: the controller of Slurm does not answer: {pinged.strip()[:200]}",
            "start slurmctld, or correct SLURM_CONF and munge of this machine",
        )
    yield "the controller of Slurm answers"
    for place, partition in _list_partitions(configuration):
        if f"PartitionName={partition}" not in run("scontrol", "show", "partition", partition):
            raise ConfigurationError(
                f"{place}.partition: the cluster has no partition {partition!r}",
                "choose one that `sinfo` lists",
            )
    yield from _check_by_job(configuration, act_as_user, run)


def _list_partitions(configuration: Configuration) -> Iterator[tuple[str, str]]:
    partitions = {"runner": configuration.runner.partition}
    for kind in ("environments", "problems"):
        for name, one in sorted(getattr(configuration, kind).items()):
            partitions[f"{kind}.{name}.runner"] = one.runner.partition
    return ((place, partition) for place, partition in partitions.items() if partition)


class _CommandRunner:
    """Runs commands of Slurm as the daemon's user, and returns what they print. Blocks."""

    def __init__(self, user: User | None, environment: Mapping[str, str]) -> None:
        self._user = user
        self._environment = environment

    def __call__(self, *argv: str, timeout: float = COMMAND_TIMEOUT, stdin: str = "") -> str:
        user, identity = self._user, dict[str, Any]()
        if user is not None and os.geteuid() == 0:
            identity = {"user": user.uid, "group": user.gid, "extra_groups": ()}
        try:
            done: subprocess.CompletedProcess[bytes] = subprocess.run(
                argv,
                env=dict(self._environment),
                cwd="/",
                input=stdin.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=False,
                **identity,
            )
        except subprocess.TimeoutExpired:
            return _LATE.format(timeout)
        return done.stdout.decode(errors="replace")


def _check_by_job(
    configuration: Configuration,
    act_as_user: Callable[[], AbstractContextManager[None]],
    run: _CommandRunner,
) -> Iterator[str | SetupProblem]:
    """Yield what a job finds on its node."""
    runner, token = configuration.runner, secrets.token_hex(16)
    content = json.dumps(
        {
            "token": token,
            "sandbox": msgspec.to_builtins(configuration.sandbox),
            "environments": [
                (name, one.root, one.variables)
                for name, one in sorted(configuration.environments.items())
            ],
            "directory": None if runner.shared_directory else runner.node_directory,
            "cache": runner.node_cache_bytes,
            "free_disk": configuration.limits.free_disk,
        }
    )
    options = build_srun_options(
        merge_job_settings(runner), configuration.limits, f"tawebeval-doctor-{token[:8]}"
    )
    python = runner.node_python or sys.executable
    command = ("srun", "--quiet", *options, "--", python, "-I", "-m", NODE_MODULE, "--check")
    try:
        if runner.shared_directory:
            with _write_shared_file(Path(runner.shared_directory), content, act_as_user) as path:
                printed = run(*command, str(path), timeout=_JOB_SECONDS)
        else:
            printed = run(*command, "-", timeout=_JOB_SECONDS, stdin=content)
    finally:
        run("scancel", f"--name=tawebeval-doctor-{token[:8]}")
    files = (
        "the shared directory is seen"
        if runner.shared_directory
        else f"{runner.node_directory} is there"
    )
    yield from _judge_report(printed, token, files)


@contextmanager
def _write_shared_file(
    shared: Path, content: str, act_as_user: Callable[[], AbstractContextManager[None]]
) -> Iterator[Path]:
    path = shared / f"tawebeval-doctor-{secrets.token_hex(4)}"
    try:
        with act_as_user():
            path.touch(0o600)
            path.write_text(content)
    except OSError as error:
        raise ConfigurationError(
            f"runner.shared: {shared}: {error.strerror}", "let the daemon's user write there"
        ) from None
    try:
        yield path
    finally:
        with act_as_user():
            path.unlink(missing_ok=True)


def _judge_report(printed: str, token: str, files: str) -> Iterator[str | SetupProblem]:
    """Yield what a job has found. Raises: ConfigurationError, if evaluators cannot run there."""
    for line in printed.splitlines():
        if line.startswith('{"node":'):
            told = json.loads(line)
            break
    else:
        if printed == _LATE.format(_JOB_SECONDS):
            raise ConfigurationError(
                f"runner.kind: no node was free within {_JOB_SECONDS:g} seconds",
                "look at `sinfo` and `squeue`, and check again when a node is free",
            )
        said = " ".join(printed.split())[-300:] or "it printed nothing"
        raise ConfigurationError(
            f"runner.kind: a job does not run tawebeval: {said}",
            "set runner.python to a Python on the nodes with tawebeval, and check the options in"
            " [runner]",
        )
    where = f"on the node {told['node']}"
    if told["problem"] is not None:
        what, remedy = told["problem"]
        raise ConfigurationError(f"runner.kind: {where} no evaluator can run: {what}", remedy)
    if told["token"] != token:
        raise ConfigurationError(
            f"runner.shared: {where} the directory has other files than here",
            "mount the same file system on this machine and all nodes",
        )
    whose = "the whole evaluation" if told["has_memory_cgroup"] else "each process"
    yield (
        f"{where} bubblewrap works (Python {told['python']}), {files}, and limits.memory holds for"
        f" {whose}"
    )
    if told["cache_problem"] is not None:
        remedy = "remove that directory there; until then each evaluation gets its tree anew"
        yield SetupProblem(f"{where} {told['cache_problem']}", remedy)
    for what, remedy in told["environments"]:
        yield SetupProblem(f"{where} {what}", remedy)
