"""A Slurm cluster of two nodes on loopback, and test cases whose daemon runs evaluators there."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import ClassVar

from twisted.trial.unittest import SkipTest, TestCase

from tests.cases.patience import PATIENCE
from tests.integration.harness import CONFIGURATION, Daemon, DaemonTestCase, until
from tests.integration.ports import free_port
from tests.integration.processes import descriptors, everybody

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
NODES = ("one", "two")
CPUS = 4  # of each node, whatever the machine has

_SLURM_CONF = """
ClusterName=tawebeval{ctld}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
FirstJobId={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/{tracking}
TaskPlugin=task/{task}
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=bf_interval=2,sched_interval=2
SlurmdTimeout=6
KillWait=2
ReturnToService=2
JobCompType=jobcomp/none
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={one} CPUs={cpus} RealMemory=64000 \
Feature=left
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={two} CPUs={cpus} RealMemory=64000 \
Feature=right
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=main Nodes=one,two Default=YES State=UP PriorityTier=2
PartitionName=low Nodes=one,two State=UP PreemptMode=CANCEL PriorityTier=1
"""
_CGROUP_CONF = "CgroupAutomount=no\nCgroupPlugin=cgroup/v1\nConstrainRAMSpace={limits_memory}\n"


def find_missing() -> str | None:
    """Return why no cluster can be started here; None if it can."""
    if os.geteuid() != 0:
        return "slurmd has to be root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"without {', '.join(missing)}" if missing else None


class Cluster:
    """A running cluster: munged, slurmctld and a slurmd for each node, all of them its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tawebeval-slurm-")).resolve()
        self.folder.chmod(0o755)
        self.configuration = self.folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration)}
        host = socket.gethostname().partition(".")[0]
        freezer = Path("/sys/fs/cgroup/freezer").is_dir()
        self.limits_memory = os.access("/sys/fs/cgroup/memory", os.W_OK)
        ports = {name: free_port() for name in ("ctld", *NODES)}
        self.port = ports["ctld"]
        self.configuration.write_text(
            _SLURM_CONF.format(
                folder=self.folder,
                host=host,
                cpus=CPUS,
                # Nodes of the same name share the cgroups of jobs of the same number.
                first=1000 * self.port,
                tracking="cgroup" if freezer else "linuxproc",
                task="cgroup" if self.limits_memory else "none",
                **ports,
            )
        )
        limits_memory = "yes" if self.limits_memory else "no"
        (self.folder / "cgroup.conf").write_text(_CGROUP_CONF.format(limits_memory=limits_memory))
        (self.folder / "state").mkdir()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        atexit.register(self.stop)

    def start(self) -> None:
        """Start all daemons."""
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        names = ("socket", "pid", "log", "seed")
        paths = {"socket": "--socket", "pid": "--pid-file", "log": "--log-file"}
        files = [f"{paths.get(name, '--seed-file')}={self.folder}/munge.{name}" for name in names]
        self._spawn("munged", "munged", "--force", "--foreground", f"--key-file={key}", *files)
        self.start_controller()
        for node in NODES:
            self.start_node(node)

    def _spawn(self, name: str, *argv: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                argv,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_controller(self) -> None:
        """Start slurmctld."""
        self._spawn("slurmctld", "slurmctld", "-D", "-f", str(self.configuration))

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        self._spawn(node, "slurmd", "-D", "-N", node, "-f", str(self.configuration))

    def kill_controller(self) -> None:
        """End slurmctld as a loss of power would."""
        self._kill("slurmctld")

    def kill_node(self, node: str) -> None:
        """End a node as a loss of power would: with all steps on it."""
        steps = self.list_steps(node)
        self._kill(node)
        for step in steps:
            with contextlib.suppress(ProcessLookupError):
                os.kill(step, signal.SIGKILL)
        # The controller would find out by itself, after SlurmdTimeout and a ping.
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")

    def _kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def list_steps(self, node: str) -> list[int]:
        """Return the slurmstepd of a node, by their sockets: they hide their environment."""
        spool = f"{self.folder}/spool-{node}/"
        lines = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
        inodes = {line[6] for line in lines if len(line) == 8 and line[7].startswith(spool)}
        found = []
        for pid in everybody():
            with contextlib.suppress(OSError):
                opened = (os.readlink(f"/proc/{pid}/fd/{one}") for one in descriptors(pid) or ())
                if any(one.removeprefix("socket:[").rstrip("]") in inodes for one in opened):
                    found.append(pid)
        return found

    def run(self, *argv: str) -> str:
        """Return what a command of Slurm prints."""
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=PATIENCE
        )
        return done.stdout

    def is_ready(self) -> bool:
        """Tell whether both nodes can run jobs."""
        return self.run("sinfo", "--noheader", "--format=%D %t", "--partition=main") == "2 idle\n"

    def read_saved_jobs(self) -> bytes:
        """Return what a controller that is killed knows of jobs afterwards.

        It gives numbers of jobs that it has not saved to others, and ends these with the first.
        """
        path = self.folder / "state" / "job_state"
        return path.read_bytes() if path.exists() else b""

    def list_jobs(self) -> list[str]:
        """Return the jobs that have not ended."""
        return self.run("squeue", "--noheader", "--format=%i %T %N").splitlines()

    async def settle(self) -> None:
        """Wait until both nodes are there and idle; bring back what a test has killed."""
        for node in NODES:
            if node not in self._processes:
                self.start_node(node)
        if "slurmctld" not in self._processes:
            self.start_controller()
        await until(self.is_ready, "both nodes are idle", PATIENCE * 2)

    def stop(self) -> None:
        """End everything."""
        if self._processes:
            for user in ("root", "nobody"):
                self.run("scancel", f"--user={user}")
        for name in ("one", "two", "slurmctld", "munged"):
            process = self._processes.pop(name, None)
            if process is not None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.stop)


RUNNER = f"""
[runner]
kind = "slurm"
shared = "{tempfile.gettempdir()}"
arguments = ["--cpus-per-task=1"]
"""


class ClusterCase(TestCase):
    """Tests with a cluster, which all tests of one run share, whatever their modules."""

    cluster: ClassVar[Cluster]
    _is_started: ClassVar[bool] = False
    _to_end: ClassVar[set[str]] = set()

    def __init__(self, name: str = "runTest") -> None:
        super().__init__(name)
        self._to_end.add(self.id())

    async def start_cluster(self) -> None:
        """Start the cluster, unless an earlier test has; stop it after the last one."""
        missing = find_missing()
        if missing:
            raise SkipTest(missing)
        self.addCleanup(self._stop_cluster_after_the_last)
        if not ClusterCase._is_started:
            ClusterCase.cluster = Cluster()
            ClusterCase._is_started = True
            self.cluster.start()
        await self.cluster.settle()

    def _stop_cluster_after_the_last(self) -> None:
        self._to_end.discard(self.id())
        if not self._to_end:
            ClusterCase._is_started = False
            self.cluster.stop()


class SlurmTestCase(ClusterCase, DaemonTestCase):
    """Tests that share a daemon which runs evaluators on a cluster."""

    configuration = f"{CONFIGURATION}[limits]\nprocesses = 2000\nstderr = '1M'\n{RUNNER}"

    async def setUp(self) -> None:
        await self.start_cluster()
        await super().setUp()

    def make_daemon(self) -> Daemon:
        environment = {**self.environment, "SLURM_CONF": str(self.cluster.configuration)}
        return Daemon(self.configuration, self.drain, self.daemon_name, **environment)
