"""Evaluators on a cluster: a daemon, and a real Slurm of two nodes on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from tempfile import gettempdir

from twisted.internet import reactor
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.internet.utils import getProcessOutput
from twisted.trial.unittest import SkipTest

from tawebeval.config import Configuration, parse_configuration
from tawebeval.daemon.startup import derive_daemon_label
from tawebeval.errors import ConfigurationError
from tawebeval.sandbox.workspace import derive_directory_name, derive_log_pseudonym
from tawebeval.slurm.commands import SQUEUE_PERIOD, check_cluster
from tests.cases.patience import LONG_PATIENCE
from tests.integration.attacks import bombs
from tests.integration.client import failure, joined, python, text
from tests.integration.harness import COMMAND, until
from tests.integration.processes import new_word, processes
from tests.integration.slurm_case import CPUS, SlurmTestCase
from tests.integration.wire.blocks import HELPERS

MIB = 2**20
BLOCKS = r"""
block(b'{"a": 1}')
with open(os.environ["TEMPORARY_DIRECTORY"] + "/content", "wb") as f: f.write(b"whole")
file(AS_PATH % b"content", (os.environ["TEMPORARY_DIRECTORY"] + "/content").encode())
say(open(os.environ["SUBMISSION_FILE_SOLUTION"], "rb").read())
say(open("README", "rb").read())
os.write(2, b"complaint\n")
sys.exit(3)
"""
SPY = """
import os, socket, sys
for path in sys.argv[2:]:
    print(os.path.exists(path))
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])))
except OSError:
    print("refused")
print([name for name in os.environ if name.startswith("SLURM")])
print(sorted(os.listdir("/evaluation")))
"""
QUEUED = int(os.environ.get("TAWEBEVAL_SLURM_QUEUED", "30"))


class RunTests(SlurmTestCase):
    """Evaluators on a node behave as on this machine."""

    async def test_events(self) -> None:
        """Text, data, files and the exit arrive; the status names job and node."""
        identifier = await self.begin(python(HELPERS + BLOCKS))
        status = await self.client.ended(identifier)
        events = await self.client.follow(identifier)
        self.assertEqual(failure(events, "exit")["status"], 3)
        found = joined(events)
        self.assertEqual(found[0], [{"a": 1}])
        self.assertEqual(found[1][0]["content_base64"], "d2hvbGU=")
        self.assertEqual(found[2], "42\nan evaluator\n")
        self.assertEqual(status["stderr"], "complaint\n")
        self.assertEqual(status["exit"], {"status": 3, "signal": None})
        self.assertGreater(status["usage"]["cpu_seconds"], 0)
        runner = status["runner"]
        self.assertIn(runner.pop("node"), ("one", "two"))
        self.assertTrue(runner.pop("job").isdecimal())
        self.assertEqual(runner, {"kind": "slurm", "queue_reason": None, "retries": 0})

    async def test_limits(self) -> None:
        """Time, memory and processes are limited on the node."""
        identifiers = [
            await self.begin("sleep 600", **{"limits[wall_clock]": "1"}),
            await self.begin(python(bombs.HEAP), **{"limits[memory]": "64M"}),
            await self.begin(
                python(bombs.FORKS), **{"limits[processes]": "20", "limits[wall_clock]": "3"}
            ),
        ]
        late, heap, forks = [await self.client.follow(one) for one in identifiers]
        self.assertEqual(failure(late, "timeout")["limit"], "limits.wall_clock")
        self.assertNotIn("unlimited", text(heap))
        self.assertIn(failure_reason(heap), ("exit", "memory"))
        failure(forks, "timeout")
        self.assertNotIn("unlimited", text(forks))

    async def test_memory(self) -> None:
        """Where Slurm limits the memory of a job, an excess is told, whatever the exit."""
        if not self.cluster.limits_memory:
            raise SkipTest("without the memory controller of cgroups v1")
        begun = {
            end: await self.begin(
                f"{python(bombs.HEAP_OF_CHILDREN)}; {end}", **{"limits[memory]": "128M"}
            )
            for end in ("exit 3", "exit 0")
        }
        for end, identifier in begun.items():
            events = await self.client.follow(identifier)
            self.assertEqual(failure(events, "memory")["limit"], "limits.memory", end)

    async def test_disk(self) -> None:
        """A file that was removed while it is open counts, too, and with the others."""
        program = """
import os, time
file = open("x", "wb", 0)
os.unlink("x")
file.write(bytes(int(os.sys.argv[1])))
open("y", "wb", 0).write(bytes(int(os.sys.argv[2])))
time.sleep(600)
"""
        for sizes in ((24 * MIB, 0), (10 * MIB, 10 * MIB)):
            command = python(program, *map(str, sizes))
            failure(await self.run_command(command, **{"limits[disk]": "16M"}), "disk")

    async def test_spy(self) -> None:
        """An evaluator sees neither orders nor Slurm, and cannot connect to its controller."""
        port = self.cluster.port
        folder = self.cluster.folder
        paths = (self.daemon.state, folder, folder / "munge.socket", "/run/munge", "/etc/slurm")
        events = await self.run_command(python(SPY, str(port), *map(str, paths)))
        lines = text(events).splitlines()
        self.assertEqual(lines[:-2], ["False"] * len(paths) + ["refused"])
        self.assertEqual(lines[-2], "[]")
        self.assertEqual(lines[-1], str(["home", "runner", "submission", "tmp", "tools", "tree"]))


def failure_reason(events: list[dict[str, object]]) -> object:
    """Return the reason in the last event."""
    payload = events[-1]["payload"]
    assert isinstance(payload, dict), payload
    return payload["reason"]


class ClusterTests(SlurmTestCase):
    """What happens in the cluster behind the daemon's back."""

    async def test_scancel(self) -> None:
        """A job that somebody cancels in Slurm is told as such."""
        identifier = await self.begin_and_wait("echo ready; sleep 600")
        job = (await self.client.status(identifier))["runner"]["job"]
        self.cluster.run("scancel", job)
        failure(await self.client.follow(identifier), "revoked")

    async def test_controller(self) -> None:
        """An evaluation goes on, ends and is told while the controller is away."""
        identifier, gate = await self.begin_and_hold("echo on")
        name = derive_log_pseudonym(identifier).encode()
        await until(lambda: name in self.cluster.read_saved_jobs(), "the controller has saved it")
        self.cluster.kill_controller()
        gate.write_text("\n")
        self.assertEqual(joined(await self.client.follow(identifier)), ["readyon\n"])
        self.cluster.start_controller()
        self.assertEqual(joined(await self.run_command("echo again")), ["again\n"])

    async def test_evaluation_outlives_a_killed_srun(self) -> None:
        identifier, gate = await self.begin_and_hold("echo on")
        label = derive_daemon_label(self.daemon.state)
        sruns = processes(f"srun\0--job-name=tawebeval-{label}-")
        self.assertTrue(sruns)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # each would else cancel the job
            for pid in sruns:
                os.kill(pid, number)
        await deferLater(reactor, 2 * SQUEUE_PERIOD)  # Slurm is asked meanwhile
        gate.write_text("\n")
        self.assertEqual(joined(await self.client.follow(identifier)), ["readyon\n"])
        await until(lambda: not self.cluster.list_jobs(), "no job is left")

    async def test_evaluation_outlives_an_absence_of_the_shared_directory(self) -> None:
        identifier, gate = await self.begin_and_hold("echo on")
        evaluations, away = self.daemon.state / "evaluations", self.daemon.state / "away"
        evaluations.rename(away)
        (away / gate.relative_to(evaluations)).write_text("\n")
        await self.daemon.logged("runner.shared: limits of a run are not checked")
        away.rename(evaluations)
        self.assertEqual(joined(await self.client.follow(identifier)), ["readyon\n"])

    async def test_evaluation_outlives_a_killed_daemon(self) -> None:
        identifier, gate = await self.begin_and_hold("echo on")
        node = (await self.client.status(identifier))["runner"]["node"]
        await self.daemon.kill()
        self.daemon.start()
        await self.daemon.ready()
        status = await self.client.status(identifier)
        self.assertEqual((status["state"], status["runner"]["node"]), ("running", node))
        gate.write_text("\n")
        self.assertEqual(joined(await self.client.follow(identifier)), ["readyon\n"])
        await until(lambda: not self.cluster.list_jobs(), "no job is left")

    async def test_evaluation_outlives_a_stopped_daemon(self) -> None:
        identifier, gate = await self.begin_and_hold("echo on")
        self.daemon.interrupt()
        await until(lambda: not self.daemon.running, "the daemon stops")
        self.daemon.start()
        await self.daemon.ready()
        self.assertEqual((await self.client.status(identifier))["state"], "running")
        gate.write_text("\n")
        self.assertEqual(joined(await self.client.follow(identifier)), ["readyon\n"])
        await until(lambda: not self.cluster.list_jobs(), "no job is left")

    async def test_evaluation_ends_while_the_daemon_is_away(self) -> None:
        identifier, gate = await self.begin_and_hold("echo on; exit 3")
        await self.daemon.kill()
        gate.write_text("\n")
        state = f"evaluations/{derive_directory_name(identifier)}/job-*/state"
        await until(
            lambda: any("status" in path.read_text() for path in self.daemon.state.glob(state)),
            "the node has told the end",
        )
        self.daemon.start()
        await self.daemon.ready()
        events = await self.client.follow(identifier)
        self.assertEqual(joined(events)[0], "readyon\n")
        self.assertEqual(failure(events, "exit")["status"], 3)
        await until(lambda: not self.cluster.list_jobs(), "no job is left")

    async def test_job_that_is_lost_while_the_daemon_is_away_is_told(self) -> None:
        identifier = await self.begin_and_wait("echo ready; sleep 600")
        job = (await self.client.status(identifier))["runner"]["job"]
        await self.daemon.kill()
        self.cluster.run("scancel", job)
        await until(lambda: not self.cluster.list_jobs(), "no job is left")
        self.daemon.start()
        await self.daemon.ready()
        events = await self.client.follow(identifier)
        self.assertEqual(text(events), "ready\n")
        failure(events, "revoked")

    async def test_killed_program(self) -> None:
        """An evaluator ends with the program on its node."""
        word = new_word()
        identifier = await self.begin_and_wait(f"echo ready; sleep 600 && : {word}")
        for pid in processes(f"-S\0{self.daemon.state}/"):
            if Path(f"/proc/{pid}/comm").read_text().startswith("python"):
                os.kill(pid, signal.SIGKILL)
        failure(await self.client.follow(identifier), "lost")
        await until(lambda: not processes(word), "nothing is left on the node")


class DoctorTests(SlurmTestCase):
    """`tawebeval doctor` and the start, with a cluster that is well and others."""

    async def test_well(self) -> None:
        """The command sends a job, which tells that its node is well."""
        command = (COMMAND, "doctor", "--config", str(self.daemon.folder / "tawebeval.toml"))
        environment = {
            **self.cluster.environment,
            "STATE_DIRECTORY": str(self.daemon.state),
            "CACHE_DIRECTORY": str(self.daemon.cache),
        }
        said = await getProcessOutput(command[0], command[1:], environment, errortoo=True)
        self.assertIn(b"bubblewrap works", said)
        self.assertIn(b"the shared directory is seen", said)

    async def test_faults(self) -> None:
        """Each fault is named by its setting."""
        well = (self.daemon.folder / "tawebeval.toml").read_text()
        for old, new, what in (
            (
                "--cpus-per-task=1",
                "--partition=none",
                "runner.kind: a job does not run on a node: srun: error: invalid partition",
            ),
            (
                "--cpus-per-task=1",
                "--reservation=none",
                "runner.kind: a job does not run on a node: srun: error",
            ),
            (f'"{gettempdir()}"', '"/usr"', "is not in /usr, so the nodes would not see it"),
        ):
            configuration = parse_configuration(well.replace(old, new))
            said = await deferToThread(self.find_fault, configuration)
            self.assertIn(what, said)

    def find_fault(self, configuration: Configuration) -> str:
        """Return the error of the checks."""
        with self.assertRaises(ConfigurationError) as found:
            list(check_cluster(configuration, self.daemon.state, self.cluster.environment))
        return str(found.exception)


class QueueTests(SlurmTestCase):
    """A cluster without a free node."""

    template = SlurmTestCase.template.replace("task=1", f"task={CPUS}")

    async def test_queue(self) -> None:
        """The wait is shown as queued, with Slurm's reason, and a cancel ends it."""
        running = [await self.begin_and_wait("echo ready; sleep 600") for _ in range(2)]
        waiting = await self.begin("echo late")

        async def reason() -> object:
            status = await self.client.status(waiting)
            self.assertIn(status["state"], ("fetching", "queued"))
            return status["runner"] and status["runner"]["queue_reason"]

        self.assertIn(await until(reason, "the reason is shown"), ("Resources", "Priority"))
        self.assertEqual((await self.client.status(waiting))["state"], "queued")
        await self.client.cancel(waiting)
        failure(await self.client.follow(waiting), "cancelled")
        third = await self.begin("echo third")
        await self.client.cancel(running[0])
        self.assertEqual(joined(await self.client.follow(third)), ["third\n"])
        await self.client.cancel(running[1])
        await until(lambda: not self.cluster.list_jobs(), "no job is left")

    async def test_waiting_job_of_a_killed_daemon_is_replaced(self) -> None:
        running = [await self.begin_and_wait("echo ready; sleep 600") for _ in range(2)]
        late = await self.begin("echo late")
        await until(lambda: len(self.cluster.list_jobs()) == 3, "the third job waits")
        (waiting,) = (job for job in self.cluster.list_jobs() if "PENDING" in job)
        number = waiting.split()[0]
        self.cluster.run("scontrol", "hold", number)
        await self.daemon.kill()
        self.daemon.start()
        await self.daemon.ready()
        await until(
            lambda: all(job.split()[0] != number for job in self.cluster.list_jobs()),
            "the old job is cancelled",
        )
        for identifier in running:
            self.assertEqual((await self.client.status(identifier))["state"], "running")
            await self.client.cancel(identifier)
        self.assertEqual(joined(await self.client.follow(late)), ["late\n"])
        await until(lambda: not self.cluster.list_jobs(), "no job is left")


class LongQueueTests(SlurmTestCase):
    """Many jobs that wait, as many as TAWEBEVAL_SLURM_QUEUED says."""

    template = QueueTests.template.replace("running = 4", f"running = {QUEUED + 2}")

    async def test_controller(self) -> None:
        """They outlast a restart of the controller, run in their turn, and leave when cancelled."""
        running = [await self.begin_and_wait("echo ready; sleep 600") for _ in range(2)]
        waiting = [await self.begin(f"echo {number}") for number in range(QUEUED)]
        names = [derive_log_pseudonym(identifier).encode() for identifier in waiting]

        def are_saved() -> bool:
            saved = self.cluster.read_saved_jobs()
            return all(name in saved for name in names)

        await until(are_saved, "the controller has saved all jobs", LONG_PATIENCE)
        self.cluster.kill_controller()
        self.cluster.start_controller()
        for identifier in running:
            await self.client.cancel(identifier)
        for number, identifier in enumerate(waiting[:2]):
            self.assertEqual(joined(await self.client.follow(identifier)), [f"{number}\n"])
        for identifier in waiting[2:]:
            await self.client.cancel(identifier)
        await until(lambda: not self.cluster.list_jobs(), "no job is left", LONG_PATIENCE)


class PreemptionTests(SlurmTestCase):
    """A partition whose jobs give way to others."""

    template = SlurmTestCase.template.replace('["--', '["--partition=low", "--')

    async def test_preempted(self) -> None:
        """A job that gives way ends its evaluation with a reason of its own."""
        identifier = await self.begin_and_wait("echo ready; sleep 600")
        other = ("--parsable", "--partition=main", "--nodes=2", "--exclusive", "--output=/dev/null")
        job = self.cluster.run("sbatch", "--chdir=/", *other, "--wrap=sleep 600")
        events = await self.client.follow(identifier)
        self.cluster.run("scancel", job.strip())
        failure(events, "preempted")
        self.assertEqual(text(events), "ready\n")


class NodeLossTests(SlurmTestCase):
    """A node that fails, with one retry allowed."""

    template = SlurmTestCase.template + "retries = 1\n"

    async def test_evaluator_of_a_lost_node_is_not_begun_again(self) -> None:
        identifier = await self.begin_and_wait("echo ready; sleep 600")
        self.cluster.kill_node((await self.client.status(identifier))["runner"]["node"])
        events = await self.client.follow(identifier)
        failure(events, "node")
        self.assertEqual(text(events), "ready\n")
