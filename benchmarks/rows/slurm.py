"""Evaluators on a cluster beside evaluators of this machine, by the same daemon, and bare srun.

The cluster is a real Slurm of two nodes on loopback, that of the tests, with four places each. So
both daemons run eight evaluators at once on the same two processors. Slurm adds srun, slurmstepd
and, on the node, a Python: about 0.1 s of processor time for an evaluator. Output is in files that
the daemon looks at now and then.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from tempfile import gettempdir

from benchmarks.client import Client
from benchmarks.daemon import Daemon, daemon
from benchmarks.measure import CannotRun, Row, interleave
from benchmarks.rows.delivery import SETTINGS, deliver_lines
from benchmarks.rows.start import WHAT, evaluate, in_turn
from benchmarks.rows.throughput import rush
from tests.integration.slurm_case import CPUS, NODES, Cluster, find_missing

CLIENTS = CPUS * len(NODES)
_STARTS = 10
_MAX_START_RATIO, _MIN_STDOUT_RATIO = 3, 0.5
_PATIENCE = 60.0
_SETTINGS = f"{SETTINGS}[evaluations]\nrunning = {CLIENTS}\n"
_RUNNER = """\
[runner]
kind = "slurm"
shared = "{shared}"
"""


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with (
        _cluster() as cluster,
        daemon(
            "auto",
            _SETTINGS + _RUNNER.format(shared=gettempdir()),
            variables={"SLURM_CONF": str(cluster.configuration)},
        ) as slurm,
        daemon("auto", _SETTINGS) as local,
    ):
        samples = interleave(
            rounds,
            {
                "start": partial(_start, cluster, slurm),
                "slurm.run": partial(rush, slurm, CLIENTS),
                "local.run": partial(rush, local, CLIENTS),
                "slurm.print": partial(deliver_lines, slurm),
                "local.print": partial(deliver_lines, local),
            },
        )
    runs, prints = ("slurm.run.rate", "local.run.rate"), ("slurm.print.rate", "local.print.rate")
    return [
        Row(
            f"{WHAT}, on a node of Slurm, to the first line of `srun`, p50",
            "ms",
            samples["start.slurm"],
            samples["start.srun"],
            _MAX_START_RATIO,
            higher_is_better=False,
        ),
        Row(
            f"evaluations on nodes of Slurm, {CLIENTS} clients, to this machine",
            "1/s",
            *(samples[way] for way in runs),
        ),
        Row(
            "stdout of a node of Slurm to an HTTP client, 100-byte lines, to this machine",
            "MB/s",
            *(samples[way] for way in prints),
            target=_MIN_STDOUT_RATIO,
        ),
    ]


@contextmanager
def _cluster() -> Iterator[Cluster]:
    """Run a cluster. Raises: CannotRun."""
    missing = find_missing()
    if missing is not None:
        raise CannotRun(
            f"no Slurm: {missing}; as root, apt-get install slurmctld slurmd slurm-client munge"
        )
    cluster = Cluster()
    try:
        cluster.start()
        deadline = time.monotonic() + _PATIENCE
        while not cluster.is_ready():
            if time.monotonic() > deadline:
                raise CannotRun("the cluster is not ready")
            time.sleep(0.2)
        yield cluster
    finally:
        cluster.stop()


def _start(cluster: Cluster, slurm: Daemon) -> dict[str, float]:
    """Return the medians of the milliseconds that a start on a node takes, and srun there."""
    with Client(slurm.port) as client:
        ways = {"slurm": partial(evaluate, slurm, client), "srun": partial(_run_shell, cluster)}
        return dict(in_turn(ways, _STARTS))


def _run_shell(cluster: Cluster) -> float:
    """Return the seconds to the first line of a shell on a node."""
    command = ["srun", "--chdir=/", "--mpi=none", "/bin/sh", "-c", "echo ready"]
    begin = time.perf_counter()
    with subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE) as srun:
        assert srun.stdout is not None
        srun.stdout.readline()
        return time.perf_counter() - begin
