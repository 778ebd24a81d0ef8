"""Checks of a cluster: by the daemon's start, and by `tawebeval doctor`, also with a job."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from tawebeval.config import Configuration
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.linux.filetree import remove_tree
from tawebeval.sandbox.bubblewrap import build_isolation_options
from tawebeval.slurm.attempts import NODE_PYTHON, build_node_command, write_node_program
from tawebeval.slurm.commands import COMMAND_TIMEOUT, build_command_environment
from tawebeval.slurm.jobs import build_srun_options

SLURM_COMMANDS = ("srun", "squeue", "scontrol", "scancel")
"""The commands of Slurm that the daemon runs."""

_JOB_SECONDS = 90.0  # for the job of the check, with its wait for a node
_TRIED = ("bwrap", *build_isolation_options("check"), "--ro-bind", "/", "/", "/bin/true")
_LATE = "no answer within {:g} seconds"
_INSTALL = "run `apt-get install slurm-client`, and set up this machine as a client of the cluster"


def check_shared_directories(configuration: Configuration, directories: Sequence[Path]) -> None:
    """Check that the daemon's directories lie in `runner.shared`. Raises: ConfigurationError."""
    shared = Path(configuration.runner.shared)
    for directory in directories:
        if not directory.resolve().is_relative_to(shared.resolve()):
            raise ConfigurationError(
                f"runner.shared: {directory} is not in {shared}, so the nodes would not see it",
                "name directories in it by STATE_DIRECTORY and CACHE_DIRECTORY",
            )


def check_cluster(
    configuration: Configuration,
    directories: Sequence[Path],
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
    run = partial(_run, build_command_environment(environment))
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
                f"{place}.arguments: the cluster has no partition {partition!r}",
                "choose one that `sinfo` lists",
            )
    yield from _check_by_job(configuration, run)


def _list_partitions(configuration: Configuration) -> Iterator[tuple[str, str]]:
    arguments = {"runner": configuration.runner.arguments}
    for kind in ("environments", "problems"):
        for name, one in sorted(getattr(configuration, kind).items()):
            arguments[f"{kind}.{name}.runner"] = one.runner.arguments
    for place, options in arguments.items():
        for option in options:
            if option.startswith("--partition="):
                yield place, option.partition("=")[2]


def _run(environment: Mapping[str, str], *argv: str, timeout: float = COMMAND_TIMEOUT) -> str:
    """Return what a command of Slurm prints. Blocks."""
    try:
        done = subprocess.run(
            argv,
            env=dict(environment),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _LATE.format(timeout)
    return done.stdout.decode(errors="replace")


def _check_by_job(
    configuration: Configuration, run: Callable[..., str]
) -> Iterator[str | SetupProblem]:
    """Yield what a job finds on its node."""
    runner, token = configuration.runner, secrets.token_hex(16)
    name = f"tawebeval-doctor-{token[:8]}"
    options = build_srun_options(configuration.limits, name, runner)
    directory = Path(runner.shared) / name
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigurationError(
            f"runner.shared: {runner.shared}: {error.strerror}", "let the daemon's user write there"
        ) from None
    try:
        check = directory / "check"
        told = {"token": token, "argv": _TRIED, "paths": _list_paths(configuration)}
        check.write_text(json.dumps(told))
        command = build_node_command(write_node_program(directory), ("--check", str(check)))
        printed = run("srun", "--quiet", *options, "--", *command, timeout=_JOB_SECONDS)
    finally:
        run("scancel", f"--name={name}")
        remove_tree(directory)
    yield from _judge_report(printed, token)


def _list_paths(configuration: Configuration) -> Sequence[str]:
    """Return the paths that the configuration names, and that nodes need."""
    environments = configuration.environments.values()
    return [*(one.root for one in environments), *configuration.sandbox.readable, NODE_PYTHON]


def _judge_report(printed: str, token: str) -> Iterator[str | SetupProblem]:
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
            f"runner.kind: a job does not run on a node: {said}",
            f"install {NODE_PYTHON} on all nodes, mount runner.shared there under the same path,"
            " and check the options in [runner]",
        )
    where = f"on the node {told['node']}"
    if told["token"] != token:
        raise ConfigurationError(
            f"runner.shared: {where} the directory has other files than here",
            "mount the same file system on this machine and all nodes",
        )
    if told["problem"] is not None:
        raise ConfigurationError(
            f"runner.kind: {where} bubblewrap does not work: {told['problem']}",
            "run `apt-get install bubblewrap` on all nodes, and allow user namespaces there",
        )
    yield f"{where} bubblewrap works (Python {told['python']}), and the shared directory is seen"
    for path in told["missing"]:
        yield SetupProblem(f"{where} {path} is missing", "make it on all nodes")
