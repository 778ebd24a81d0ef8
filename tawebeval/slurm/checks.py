"""Checks of a cluster: by the daemon's start, and by `tawebeval doctor`, also with a job."""

from __future__ import annotations

import secrets
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from tawebeval.config import Configuration
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.sandbox.bubblewrap import build_isolation_options
from tawebeval.slurm.attempts import NODE_PYTHON
from tawebeval.slurm.commands import COMMAND_TIMEOUT, build_command_environment
from tawebeval.slurm.jobs import build_srun_options

_COMMANDS = ("srun", "squeue", "scontrol", "scancel")
_JOB_SECONDS = 90.0  # for the job of the check, with its wait for a node
_TRIED: Mapping[str, Sequence[str]] = {
    "bubblewrap": ("bwrap", *build_isolation_options("check"), "--ro-bind", "/", "/", "/bin/true"),
    NODE_PYTHON: (NODE_PYTHON, "-I", "-S", "-c", "pass"),
}
_LATE = "no answer within {:g} seconds"


def check_shared_directory(configuration: Configuration, state: Path) -> None:
    """Check that the state directory lies in `runner.shared`. Raises: ConfigurationError."""
    shared = Path(configuration.runner.shared)
    if not state.resolve().is_relative_to(shared.resolve()):
        raise ConfigurationError(
            f"runner.shared: {state} is not in {shared}, so the nodes would not see it",
            "name a directory in it by STATE_DIRECTORY",
        )


def check_cluster(
    configuration: Configuration, state: Path, environment: Mapping[str, str]
) -> Iterator[str | SetupProblem]:
    """Yield what works of a cluster, from this machine and by a job on a node. Blocks.

    Raises: ConfigurationError, OSError.
    """
    if missing := [name for name in _COMMANDS if shutil.which(name) is None]:
        raise ConfigurationError(
            f"runner.kind: {', '.join(missing)} of Slurm is not installed",
            "run `apt-get install slurm-client`, and set up this machine as a client of the"
            " cluster",
        )
    check_shared_directory(configuration, state)
    run = partial(_run, build_command_environment(environment))
    pinged = run("scontrol", "ping")
    if " UP" not in pinged:
        raise ConfigurationError(
            f"runner.kind: the controller of Slurm does not answer: {pinged.strip()[:200]}",
            "start slurmctld, or correct SLURM_CONF and munge of this machine",
        )
    yield "the controller of Slurm answers"
    yield from _judge_report(_run_job(configuration, run))


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


def _run_job(configuration: Configuration, run: Callable[..., str]) -> str:
    """Return what a script in the shared directory prints on a node."""
    runner, name = configuration.runner, f"tawebeval-doctor-{secrets.token_hex(8)}"
    script = Path(runner.shared) / name
    try:
        script.write_text("\n".join(_list_commands(configuration)))
    except OSError as error:
        raise ConfigurationError(
            f"runner.shared: {runner.shared}: {error.strerror}", "let the daemon's user write there"
        ) from None
    try:
        options = build_srun_options(configuration.limits, name, runner)
        command = ("srun", "--quiet", *options, "--", "/bin/sh", str(script))
        return run(*command, timeout=_JOB_SECONDS)
    finally:
        run("scancel", f"--name={name}")
        script.unlink()


def _list_commands(configuration: Configuration) -> Iterator[str]:
    """Yield commands of a shell, which print a line for each problem, and then the node."""
    for what, argv in _TRIED.items():
        yield f'said=$({shlex.join(argv)} 2>&1) || echo "fails {what}:" $said'
    roots = (one.root for one in configuration.environments.values())
    for path in map(shlex.quote, (*roots, *configuration.sandbox.readable)):
        yield f"test -e {path} || echo missing {path}"
    yield 'echo "node ${SLURMD_NODENAME:-$(uname -n)}"'


def _judge_report(printed: str) -> Iterator[str | SetupProblem]:
    """Yield what a job has found. Raises: ConfigurationError, if evaluators cannot run there."""
    if printed == _LATE.format(_JOB_SECONDS):
        raise ConfigurationError(
            f"runner.kind: no node was free within {_JOB_SECONDS:g} seconds",
            "look at `sinfo` and `squeue`, and check again when a node is free",
        )
    told = [line.partition(" ") for line in printed.splitlines()]
    nodes = [text for word, _, text in told if word == "node"]
    if not nodes:
        said = " ".join(printed.split())[-300:] or "it printed nothing"
        raise ConfigurationError(
            f"runner.kind: a job does not run on a node: {said}",
            "mount runner.shared on this machine and all nodes under the same path, and check the"
            " options in [runner]",
        )
    where = f"on the node {nodes[0]}"
    for word, _, text in told:
        if word == "fails":
            raise ConfigurationError(
                f"runner.kind: {where} this does not work: {text[:300]}",
                "run `apt-get install bubblewrap python3` on all nodes, and allow user namespaces"
                " there",
            )
    yield f"{where} bubblewrap works, and the shared directory is seen"
    for word, _, text in told:
        if word == "missing":
            yield SetupProblem(f"{where} {text} is missing", "make it on all nodes")
