"""Faults around evaluations that outlive the daemon: journals, the starter, and time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tawebeval.linux.launcher_client import is_launcher
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from tawebeval.linux.reaper import list_descendants
from tawebeval.linux.starter_client import start_program
from tawebeval.sandbox.workspace import derive_log_pseudonym
from tests.cases.event_source import EventSource
from tests.integration.client import failure, python, text
from tests.integration.harness import COMMAND, CONFIGURATION, until
from tests.integration.processes import alive
from tests.integration.receivers import Receiver
from tests.integration.resuming_readers import CUTS, LineReader
from tests.integration.starters import KeptDaemon, KeptDaemonTestCase, SharedKeptDaemonTestCase

_LINES = 40_000
_PRINT = f"for n in range({_LINES}): print(n)"
_PRINTED = "".join(f"{n}\n" for n in range(_LINES))


_CONFIGURATION = CONFIGURATION + "[buffers]\nevaluation = 1048576\n"


class FaultCase(KeptDaemonTestCase):
    """A daemon with small buffers."""

    configuration = _CONFIGURATION


class JournalTests(FaultCase):
    """Journals that another process finds otherwise than they were left."""

    async def test_damaged(self) -> None:
        """An evaluation whose journal is damaged is lost, or exact; all others are exact."""
        whole = await self.begin_and_wait("echo ready; sleep 2; echo late; seq 20000")
        command = "echo ready; sleep 1; echo late; sleep 600"
        damaged = [await self.begin_and_wait(command) for _ in range(3)]
        lost = 0
        await self.daemon.end()
        for number, identifier in enumerate(damaged):
            journal = self.open_journal(identifier)
            size = os.fstat(journal).st_size
            at = (0, 4096 + 40, size - 2)[number]
            byte = os.pread(journal, 1, at)[0]
            os.pwrite(journal, bytes([byte ^ 0x20]), at)
        self.daemon.start()
        await self.daemon.ready()
        for identifier in damaged:
            name = derive_log_pseudonym(identifier)
            code = (await self.client.get(f"/evaluation/{identifier}")).code
            if code == 410:
                lost += 1
                await self.daemon.logged(f"{name}: lost: the journal cannot be read:")
                self.assertEqual((await self.client.ask(identifier)).code, 410)
            else:
                self.assertEqual(code, 200)
                await self.client.cancel(identifier)
        self.assertEqual(lost, len(damaged))
        events = await self.client.follow(whole)
        late = "".join(f"{n}\n" for n in range(1, 20_001))
        self.assertEqual(text(events), f"ready\nlate\n{late}")
        await until(lambda: self.daemon.remains() == [], "nothing is left")
        self.daemon.check_log()


class FullStarterTests(FaultCase):
    """A starter that may have few descriptors."""

    configuration = CONFIGURATION + "[limits]\nopen_files = 64\n"
    open_files = 128 + 16  # 128 are spare (linux.starter)

    async def test_full(self) -> None:
        """Evaluations that the starter cannot hold run, and end with the daemon."""
        first = await self.begin_and_wait("echo ready; sleep 5; echo late")
        others = [await self.begin("echo one; sleep 1; exit 3") for _ in range(6)]
        for identifier in others:
            events = await self.client.follow(identifier)
            self.assertEqual(text(events), "one\n")
            self.assertEqual(failure(events, "exit")["status"], 3)
        await self.daemon.logged("Too many open files (RLIMIT_NOFILE)")
        self.assertEqual(text(await self.client.follow(first)), "ready\nlate\n")

    async def test_restart(self) -> None:
        """After a restart an evaluation that was not held is lost, and says so; others go on."""
        first, gate = await self.begin_and_hold("echo late")
        others = [await self.begin_and_wait("echo ready; sleep 600") for _ in range(3)]
        await self.daemon.restart()
        for identifier in others:
            answer = await self.client.ask(identifier, wait=10)
            if answer.code != 410:
                events = await self.client.follow(identifier)
                self.assertEqual(text(events).rstrip("\n"), "ready")
                failure(events, "lost")
        gate.write_text("\n")
        self.assertEqual(text(await self.client.follow(first)), "readylate\n")
        await until(lambda: self.daemon.remains() == [], "nothing is left")
        self.daemon.check_log()


class LostStarterTests(FaultCase):
    """The starter is killed."""

    async def test_killed(self) -> None:
        """Running evaluations are lost, which a waiting client reads before the daemon stops.

        The exit status of `tawebeval serve` tells the failure.
        """
        self.daemon.program = ("sh", "-c", 'shift 3; exec "$0" serve "$@"', str(COMMAND))
        await self.daemon.restart()
        identifier = await self.begin_and_wait("echo ready; sleep 600")
        following = Deferred.fromCoroutine(self.client.follow(identifier))
        await deferLater(reactor, 0.3)
        self.daemon.kill_starter()
        failure(await following, "lost")
        await until(lambda: not self.daemon.running, "the daemon stops")
        self.assertIn("the starter of evaluators has ended", self.daemon.log)
        self.assertEqual(self.daemon.exit_status, 1)
        self.daemon.check_log()

    async def test_forms_meanwhile(self) -> None:
        """They are refused; what was accepted before that says that the starter has ended."""
        await self.client.ended(await self.begin("true"))
        self.daemon.kill_starter()
        answers = [
            await self.client.post(self.repository.url, self.commit, "true") for _ in range(3)
        ]
        self.assertEqual(answers[-1].code, 503)
        for answer in answers:
            if answer.code == 200:
                end = failure(await self.client.follow(answer.json["evaluation_id"]), "lost")
                self.assertIn("the starter of evaluators has ended", end["message"])
        await until(lambda: not self.daemon.running, "the daemon stops")
        self.daemon.check_log()


class LostLauncherTests(FaultCase):
    """The launcher is killed."""

    async def test_evaluation_without_a_broker_is_lost(self) -> None:
        """Another launcher cannot enter the mounts for submissions: that is no evaluator's exit."""
        run = "tawebeval-run -- true"
        identifier, gate = await self.begin_and_hold(f"{run} 2>/dev/null; echo $?; sleep 9")
        for pid in filter(is_launcher, list_descendants(self.daemon.starter_pid)):
            os.kill(pid, signal.SIGKILL)
        self.assertEqual(text(await self.client.follow(await self.begin(f"{run}; echo $?"))), "0\n")
        gate.write_text("\n")
        end = failure(await self.client.follow(identifier), "lost")
        self.assertIn("the sandbox for the submission could not be started", end["message"])


class CallbackTests(FaultCase):
    """A callback that is not delivered when the daemon ends."""

    async def setUp(self) -> None:
        self.receiver = Receiver(500, 200)
        self.addCleanup(self.receiver.stop)
        await super().setUp()

    def configure(self) -> str:
        """Return the configuration, for a second attempt that nobody waits for."""
        return self.configuration + self.configure_callbacks(first_delay=600)

    async def test_forgotten(self) -> None:
        """It is repeated also if all events were read meanwhile, and then forgotten, too."""
        identifier = await self.begin("echo one", callback_url=self.receiver.url)
        await until(lambda: len(self.receiver.posts) == 1, "the first attempt")
        self.assertEqual(text(await self.client.follow(identifier)), "one\n")
        await self.restart_and_compare()
        await self.daemon.restart()
        await deferLater(reactor, 0.5)
        self.assertEqual(len(self.receiver.posts), 2)

    async def restart_and_compare(self) -> None:
        """Restart the daemon, and compare the second attempt with the first one."""
        await self.daemon.restart()
        await until(lambda: len(self.receiver.posts) == 2, "the second attempt")
        first, second = self.receiver.posts
        self.assertEqual(first.body, second.body)
        self.assertEqual(first.headers["webhook-id"], second.headers["webhook-id"])
        await self.daemon.logged(": delivered, attempts:")


class CheckoutTests(FaultCase):
    """A checkout that is damaged while no daemon runs."""

    async def test_in_use(self) -> None:
        """Its evaluator goes on with it; a new evaluation gets a complete one."""
        identifier, gate = await self.begin_and_hold("cat README")
        (checkout,) = (self.daemon.cache / "repositories").glob("*.tree")
        await self.daemon.end()
        (checkout / "added").write_text("")
        self.daemon.start()
        await self.daemon.ready()
        self.assertEqual(text(await self.client.follow(await self.begin("ls"))), "README\n")
        self.assertTrue((checkout / "added").exists())
        gate.write_text("\n")
        self.assertEqual(text(await self.client.follow(identifier)), "readyan evaluator\n")


class RestartTests(SharedKeptDaemonTestCase):
    """Restarts after which the starter serves the next test."""

    configuration = _CONFIGURATION

    async def test_waiting(self) -> None:
        """A waiting poll is answered, without an event or an end; a stream has no end."""
        identifier, gate = await self.begin_and_hold("echo late")
        page = await self.client.page(identifier)
        polls = [
            Deferred.fromCoroutine(self.client.page(identifier, page["end"], wait=30))
            for _ in range(3)
        ]
        source = EventSource()
        path = f"/evaluation/{identifier}/events?after={page['end']}"
        stream = Deferred.fromCoroutine(
            self.client.stream(path, source.feed, {"Accept": "text/event-stream"})
        )
        stream.addErrback(lambda failure: failure.trap(*CUTS) and None)
        await until(self.client.streams, "the stream begins")
        await self.daemon.restart(signal.SIGTERM)
        for poll in polls:
            self.assertEqual(await poll, {"begin": page["end"], "end": page["end"], "data": []})
        await stream
        self.assertEqual(source.events, [])
        gate.write_text("\n")
        reader = LineReader(self.client, identifier, page["data"])
        await reader.read()
        self.assertEqual(text(reader.events), "readylate\n")
        self.daemon.check_log()

    async def test_times(self) -> None:
        """Events have the times at which they were stored, and their cursors, as before."""
        identifier = await self.begin_and_wait("echo one; sleep 0.1; echo two; echo ready")
        await self.client.ended(identifier)
        path = f"/evaluation/{identifier}/events?times=1"
        before = (await self.client.get(path)).json
        for number in (signal.SIGTERM, signal.SIGKILL):
            await self.daemon.restart(number)
            self.assertEqual((await self.client.get(path)).json, before)

    async def test_full_pipe(self) -> None:
        """An evaluator that fills its pipe waits; its time limit does not run meanwhile."""
        program = f"import time; print('ready'); time.sleep(0.5)\n{_PRINT}"
        identifier = await self.begin_and_wait(python(program), **{"limits[wall_clock]": "4"})
        await self.daemon.end()
        await deferLater(reactor, 6)
        self.daemon.start()
        await self.daemon.ready()
        reader = LineReader(self.client, identifier)
        await reader.read()
        self.assertEqual(text(reader.events), f"ready\n{_PRINTED}")
        assert reader.status is not None
        self.assertEqual(reader.status["state"], "finished")

    async def test_silent(self) -> None:
        """The time limit of a silent evaluator does not run without a daemon, and then goes on."""
        command = "echo ready; sleep 600"
        identifier = await self.begin_and_wait(command, **{"limits[wall_clock]": "4"})
        await self.daemon.end()
        await deferLater(reactor, 6)
        self.daemon.start()
        await self.daemon.ready()
        self.assertEqual((await self.client.status(identifier))["state"], "running")
        failure(await self.client.follow(identifier), "timeout")

    async def test_unclaimed(self) -> None:
        """The next daemon kills an evaluator whose start its daemon has not lived to tell.

        It does so whether or not there are cgroups, and kills no other one.
        """
        identifier = await self.begin_and_wait("echo ready; sleep 600")
        await self.daemon.end()
        with open(os.devnull, "r+b") as null:
            streams = (null.fileno(),) * 3
            # With a child, as bwrap has one.
            argv = ["/bin/sh", "-c", "sleep 61234; exit"]
            unclaimed = start_program(str(self.daemon.socket), argv, streams)
        await until(lambda: list_descendants(unclaimed.pid), "it has a child")
        (child,) = list_descendants(unclaimed.pid)
        self.daemon.start()
        await self.daemon.ready()
        await until(lambda: not alive(unclaimed.pid) and not alive(child), "both have ended")
        self.assertEqual((await self.client.status(identifier))["state"], "running")

    async def test_second_daemon(self) -> None:
        """A daemon with the same state ends; evaluations of the first one go on."""
        identifier, gate = await self.begin_and_hold("echo late")
        other = KeptDaemon(self.configuration)
        self.addCleanup(other.remove)
        other.share(self.daemon)
        other.start()
        await until(lambda: not other.running, "the second daemon ends")
        self.assertEqual((await self.client.status(identifier))["state"], "running")
        await self.daemon.restart(signal.SIGKILL)
        gate.write_text("\n")
        self.assertEqual(text(await self.client.follow(identifier)), "readylate\n")
        self.assertEqual(Path(self.daemon.socket).exists(), True)
