"""Evaluators on a cluster: a daemon, and a real Slurm of two nodes on this machine."""

from __future__ import annotations

import os
import signal

from twisted.internet import reactor
from twisted.internet.task import deferLater
from twisted.internet.utils import getProcessOutput
from twisted.trial.unittest import SkipTest

from tawebeval.daemon.startup import derive_daemon_label
from tawebeval.sandbox.workspace import derive_log_pseudonym
from tawebeval.slurm.commands import SQUEUE_PERIOD
from tests.integration import evaluator_case
from tests.integration.attacks import bombs
from tests.integration.attacks.case import MIB
from tests.integration.attacks.strays import StrayTests
from tests.integration.client import failure, joined, python, text
from tests.integration.harness import COMMAND, until
from tests.integration.processes import processes
from tests.integration.slurm_case import CPUS, SlurmTestCase

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


class BehaviourTests(SlurmTestCase):
    """Evaluators on a node behave as on this machine."""

    async def test_status_names_job_node_and_usage(self) -> None:
        identifier = await self.begin("cat README $SUBMISSION_FILE_SOLUTION")
        status = await self.client.ended(identifier)
        self.assertEqual(text(await self.client.follow(identifier)), "an evaluator\n42\n")
        self.assertGreater(status["usage"]["cpu_seconds"], 0)
        runner = status["runner"]
        self.assertIn(runner.pop("node"), ("one", "two"))
        self.assertTrue(runner.pop("job").isdecimal())
        self.assertEqual(runner, {"kind": "slurm", "queue_reason": None, "retries": 0})

    async def test_build_on_a_node_is_reused_unchanged_by_the_next_job(self) -> None:
        await self.daemon.reload(
            f"[problems.built]\nrepository = '{self.repository.url}'\ncommit = '{self.commit}'\n"
            "command = 'cat built; echo more >>built'\n"
            "build = 'cat /proc/sys/kernel/random/uuid >built'\n"
        )
        found = [
            text(await self.client.follow(await self.client.evaluate_problem("built")))
            for _ in range(2)
        ]
        self.assertRegex(found[0], r"^[0-9a-f-]{36}\n$")
        self.assertEqual(*found)

    async def test_floods_are_stopped_and_take_no_memory_of_the_daemon(self) -> None:
        before = self.daemon.memory
        for stream, reason, value in (("1", "output", 4 * MIB), ("2", "stderr", MIB)):
            events = await self.run_command(
                python(bombs.FLOOD, stream), **{"limits[output]": str(4 * MIB)}
            )
            error = failure(events, reason)
            self.assertEqual((error["limit"], error["value"]), (f"limits.{reason}", value))
        self.assertLess(self.daemon.memory - before, 48 * MIB)

    async def test_memory_and_processes_are_limited_on_the_node(self) -> None:
        identifiers = [
            await self.begin(python(bombs.HEAP), **{"limits[memory]": "64M"}),
            await self.begin(
                python(bombs.FORKS), **{"limits[processes]": "20", "limits[wall_clock]": "3"}
            ),
        ]
        heap, forks = [await self.client.follow(one) for one in identifiers]
        self.assertNotIn("unlimited", text(heap))
        self.assertIn(heap[-1]["payload"]["reason"], ("exit", "memory"))
        failure(forks, "timeout")
        self.assertNotIn("unlimited", text(forks))

    async def test_job_over_the_memory_limit_fails_with_reason_memory_if_it_exits_with_0_or_3(
        self,
    ) -> None:
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

    async def test_evaluator_sees_neither_job_files_nor_sockets_of_slurm(self) -> None:
        port = self.cluster.port
        folder = self.cluster.folder
        paths = (self.daemon.state, folder, folder / "munge.socket", "/run/munge", "/etc/slurm")
        events = await self.run_command(python(SPY, str(port), *map(str, paths)))
        lines = text(events).splitlines()
        self.assertEqual(lines[:-2], ["False"] * len(paths) + ["refused"])
        self.assertEqual(lines[-2], "[]")
        self.assertEqual(lines[-1], str(["home", "runner", "submission", "tmp", "tools", "tree"]))


class EvaluatorTests(SlurmTestCase, StrayTests, evaluator_case.EvaluatorCase):
    """The wire with evaluators on a cluster: the same tests as on this machine."""


class ClusterTests(SlurmTestCase):
    """What happens in the cluster behind the daemon's back."""

    async def test_job_cancelled_in_slurm_fails_with_reason_revoked(self) -> None:
        identifier = await self.begin_and_wait("echo ready; sleep 600")
        job = (await self.client.status(identifier))["runner"]["job"]
        self.cluster.run("scancel", job)
        failure(await self.client.follow(identifier), "revoked")

    async def test_evaluation_goes_on_and_ends_without_the_controller(self) -> None:
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


class DoctorTests(SlurmTestCase):
    async def test_doctor_runs_a_slurm_job_that_checks_the_node(self) -> None:
        command = (COMMAND, "doctor", "--config", str(self.daemon.folder / "tawebeval.toml"))
        environment = {
            **self.cluster.environment,
            "STATE_DIRECTORY": str(self.daemon.state),
            "CACHE_DIRECTORY": str(self.daemon.cache),
        }
        said = await getProcessOutput(command[0], command[1:], environment, errortoo=True)
        self.assertIn(b"bubblewrap works", said)
        self.assertIn(b"the shared directory is seen", said)


class QueueTests(SlurmTestCase):
    """A cluster without a free node."""

    configuration = SlurmTestCase.configuration.replace("task=1", f"task={CPUS}")

    async def test_status_of_a_waiting_job_has_the_reason_and_a_cancel_ends_it(self) -> None:
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


class PreemptionTests(SlurmTestCase):
    """A partition whose jobs give way to others."""

    configuration = SlurmTestCase.configuration.replace('["--', '["--partition=low", "--')

    async def test_preempted_job_fails_with_reason_preempted(self) -> None:
        identifier = await self.begin_and_wait("echo ready; sleep 600")
        other = ("--parsable", "--partition=main", "--nodes=2", "--exclusive", "--output=/dev/null")
        job = self.cluster.run("sbatch", "--chdir=/", *other, "--wrap=sleep 600")
        events = await self.client.follow(identifier)
        self.cluster.run("scancel", job.strip())
        failure(events, "preempted")
        self.assertEqual(text(events), "ready\n")


class NodeLossTests(SlurmTestCase):
    """A node that fails, with one retry allowed."""

    configuration = SlurmTestCase.configuration + "retries = 1\n"

    async def test_evaluator_that_has_printed_nothing_runs_again_on_the_other_node(self) -> None:
        gate = "gate-of-both-nodes"
        identifier = await self.begin(f"mkfifo ~/{gate}; read line < ~/{gate}; echo again")
        find = self.daemon.find_in_homes
        (lost,) = await until(lambda: find(gate), "the evaluator waits")

        async def running_node() -> str | None:
            status = await self.client.status(identifier)
            return status["runner"]["node"] if status["state"] == "running" else None

        node = await until(running_node, "the daemon knows the node")
        self.cluster.kill_node(node)
        others = await until(lambda: [path for path in find(gate) if path != lost], "it runs again")
        others[0].write_text("\n")
        runner = (await self.client.ended(identifier))["runner"]
        self.assertEqual(joined(await self.client.follow(identifier)), ["again\n"])
        self.assertEqual(runner["retries"], 1)
        self.assertNotEqual(runner["node"], node)
