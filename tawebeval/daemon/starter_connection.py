"""The starter of evaluators (`linux.starter`), as the environment says.

The unit of systemd, or whoever starts the daemon, names the socket of a starter in an environment
variable. Its evaluators outlive the daemon. Without it the daemon starts one itself, which ends
with the daemon.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from twisted.logger import Logger

from tawebeval.config import Configuration
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.linux.cgroups import find_pids_controller_parent
from tawebeval.linux.rlimits import assess_starter_limits, check_hard_limits
from tawebeval.linux.starter_client import StarterClient
from tawebeval.sandbox.workspace import WritableTrees

STARTER_SOCKET_VARIABLE = "TAWEBEVAL_STARTER"
"""The environment variable with the path of the starter's socket."""

log = Logger()


def open_starter(
    configuration: Configuration, environment: Mapping[str, str], state: Path
) -> tuple[WritableTrees, bool]:
    """Return what starts evaluators, and whether they outlive the daemon. Blocks.

    `state` is the state directory. Without a sandbox evaluations never outlive the daemon. Raises:
    ConfigurationError, if the named starter does not answer, is of another version or may have too
    little for evaluators.
    """
    path = environment.get(STARTER_SOCKET_VARIABLE, "")
    if not path or configuration.sandbox.kind == "none":
        return WritableTrees(state / "starter" / "socket"), False
    trees = WritableTrees(Path(path), is_own=False)
    try:
        client = trees.connect_starter()
    except OSError as error:
        raise ConfigurationError(
            f"{STARTER_SOCKET_VARIABLE}: the starter does not answer: {error.strerror or error}",
            "start tawebeval-starter.service",
        ) from None
    try:
        with suppress(PermissionError):  # of another user
            check_hard_limits(configuration.limits, client.pid)
    except ConfigurationError:
        trees.close()
        raise
    return trees, True


def do_jobs_outlive_daemon(configuration: Configuration) -> bool:
    """Return whether evaluators are jobs of a cluster, which need neither starter nor srun."""
    return configuration.runner.kind == "slurm"


def describe_starter_limits(
    configuration: Configuration, starter: StarterClient
) -> Iterator[str | SetupProblem]:
    """Yield what the starter may have and need: a problem if too few. Blocks, hardly.

    What the kernel does not tell is left out.
    """
    cgroup = find_pids_controller_parent(starter.cgroups)
    with suppress(PermissionError):  # of another user
        for name, assessment in assess_starter_limits(configuration, starter.pid, cgroup):
            what = f"{name}: {assessment}"
            yield SetupProblem(what, assessment.remedy) if assessment.problems else what
