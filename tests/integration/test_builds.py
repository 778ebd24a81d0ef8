"""Builds of problems: one for each commit, seen by all its evaluations and changed by none."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from tests.integration.client import data, failure, text
from tests.integration.harness import until
from tests.integration.starters import KeptDaemonTestCase

UNIQUE = "cat /proc/sys/kernel/random/uuid"
HOLD = "mkfifo ~/gate; read line < ~/gate"


class BuildTests(KeptDaemonTestCase):
    async def define(self, build: str, command: str = "cat built", more: str = "") -> None:
        """Let the daemon have the problem `built`, of the test's own repository."""
        self.repository.write("source", "one\n")
        self.commit = self.repository.commit()
        await self.daemon.reload(
            f"[problems.built]\nrepository = '{self.repository.url}'\ncommit = '{self.commit}'\n"
            f"command = '''{command}'''\nbuild = '''{build}'''\n{more}"
        )

    async def submit(self) -> str:
        return await self.client.evaluate_problem("built")

    async def submit_many(self, count: int) -> list[str]:
        requests = [Deferred.fromCoroutine(self.submit()) for _ in range(count)]
        return list(await gatherResults(requests))

    async def read_many(self, identifiers: list[str]) -> list[list[Any]]:
        requests = [Deferred.fromCoroutine(self.client.follow(one)) for one in identifiers]
        return list(await gatherResults(requests))

    async def wait_for_builds(self, identifiers: list[str], *states: str | None) -> None:
        """Wait until the evaluations are in these states of builds, in whatever order."""

        async def are_so() -> bool:
            found = [(await self.client.status(one))["build"] for one in identifiers]
            return sorted(map(str, found)) == sorted(map(str, states))

        await until(are_so, f"builds are {states}")

    async def find_gate(self) -> Path:
        return (await until(lambda: self.daemon.find_in_homes("gate"), "the build waits"))[0]

    def count_builds(self) -> int:
        return self.daemon.log.count("builds the tree as")

    async def test_many_evaluations_of_a_commit_share_one_build(self) -> None:
        count = self.count_builds()
        # Each changes what it sees.
        await self.define(
            f"{UNIQUE} >built; sleep 0.2", "cat built; echo changed >built; rm source"
        )
        first = await self.read_many(await self.submit_many(30))
        (later,) = await self.read_many([await self.submit()])
        self.assertEqual(len({text(events) for events in (*first, later)}), 1)
        self.assertRegex(text(later), r"^[0-9a-f-]{36}\n$")
        self.assertEqual(self.count_builds(), count + 1)

    async def test_build_sees_no_submission_and_no_secret(self) -> None:
        await self.define("env >built; find / -name solution.txt >>built; pwd >>built; rm source")
        (events,) = await self.read_many([await self.submit()])
        self.assertNotIn("SUBMISSION", text(events))
        self.assertNotIn("solution.txt", text(events))
        self.assertIn("\n/evaluation/tree\n", text(events))

    async def test_failed_build_fails_all_waiting_evaluations_with_its_output(self) -> None:
        await self.define(f"{HOLD}; echo compiling; echo 'no such header' >&2; exit 3")
        identifiers = await self.submit_many(6)
        await self.wait_for_builds(identifiers, "running", *["waiting"] * 5)
        (await self.find_gate()).write_text("\n")
        for events in await self.read_many(identifiers):
            error = failure(events, "build")
            self.assertEqual(error["message"], "the build failed: it exited with status 3")
            self.assertEqual(error["stderr"], "compiling\nno such header\n")
        self.assertEqual(list(self.daemon.cache.rglob("*.new-*")), [])

    async def test_build_has_the_limits_of_the_problem(self) -> None:
        for build, limits, words in (
            ("sleep 600", "wall_clock = 1", "it ran for over 1 seconds"),
            ("yes", "stderr = '1M'", "it printed over 1 MiB on stderr"),
            ("head -c 50M /dev/zero >big; sleep 600", "disk = '5M'", "it wrote over 5 MiB"),
            ("truncate -s 250M 1; for n in 2 3 4 5; do ln 1 $n; done", "cpu = 9", "over 1 GiB"),
        ):
            await self.define(build, more=f"limits = {{ {limits} }}\n")
            (events,) = await self.read_many([await self.submit()])
            self.assertIn(words, failure(events, "build")["message"])

    async def test_tree_that_cannot_be_copied_is_the_fault_of_the_build(self) -> None:
        name = '"No space left on device"'
        deep = "import os\nfor _ in range(1500): os.mkdir('abc'); os.chdir('abc')"
        # Not for directories: who counts the disk may have given their mode bits back.
        for build in (f"touch {name}; chmod 0 {name}", f'python3 -c "{deep}"'):
            await self.define(build)
            (events,) = await self.read_many([await self.submit()])
            # The limits may find the deep tree before it is copied.
            words = "files that cannot be read|nested them too deeply"
            self.assertRegex(failure(events, "build")["message"], words, build)

    async def test_evaluations_waiting_for_a_build_leave_their_slots_to_others(self) -> None:
        await self.define(f"{HOLD}; {UNIQUE} >built")
        identifiers = await self.submit_many(9)  # of four slots
        await self.wait_for_builds(identifiers, "running", *["waiting"] * 8)
        self.assertEqual(text(await self.run_command("echo other")), "other\n")
        (await self.find_gate()).write_text("\n")
        found = {text(events) for events in await self.read_many(identifiers)}
        self.assertEqual(len(found), 1, found)

    async def test_next_evaluation_builds_if_the_building_evaluation_is_cancelled(self) -> None:
        await self.define(f"{HOLD}; {UNIQUE} >built")
        identifiers = await self.submit_many(3)
        await self.wait_for_builds(identifiers, "running", "waiting", "waiting")
        gate = await self.find_gate()
        states = {one: (await self.client.status(one))["build"] for one in identifiers}
        for state in ("waiting", "running"):
            identifier = next(one for one, found in states.items() if found == state)
            identifiers.remove(identifier)
            await self.client.cancel(identifier)
            failure(await self.client.follow(identifier), "cancelled")
        await until(lambda: not gate.exists(), "the build is gone")
        (await self.find_gate()).write_text("\n")
        self.assertRegex(text(await self.client.follow(identifiers[0])), "^[0-9a-f-]{36}\n$")

    async def test_killed_daemon_leaves_no_half_build(self) -> None:
        await self.define(f"{UNIQUE} >built; {HOLD}; {UNIQUE} >>built")
        identifier = await self.submit()
        gate = await self.find_gate()
        await self.daemon.restart()
        await until(lambda: not gate.exists(), "the first build is gone")
        (await self.find_gate()).write_text("\n")
        found = text(await self.client.follow(identifier))
        self.assertRegex(found, "^([0-9a-f-]{36}\n){2}$")
        # A build outlives the daemon.
        for number in (signal.SIGTERM, signal.SIGKILL):
            await self.daemon.restart(number)
            self.assertEqual(text(await self.client.follow(await self.submit())), found)

    async def test_programs_of_a_package_are_built_once(self) -> None:
        validator = "output_validators/own"
        files = {
            "problem.yaml": "name: Sum\nvalidation: custom\nlimits: {time_limit: 5}\n",
            "data/secret/1.in": "1\n",
            "data/secret/1.ans": "1\n",
            f"{validator}/build": f"#!/bin/sh\n{UNIQUE} >word\n",
            f"{validator}/run": '#!/bin/sh\ncp "${0%/*}/word" "$3/teammessage.txt"\nexit 42\n',
        }
        for name, content in files.items():
            self.repository.write(name, content, 0o755)
        # The name says the language.
        judge = "cp $SUBMISSION_FILE_SOLUTION ~/a.py; SUBMISSION_FILE_SOLUTION=~/a.py "
        await self.define("tawebeval-judge --build", f"{judge} tawebeval-judge")
        messages = [
            data(events)[0]["message"]
            for events in await self.read_many([await self.submit() for _ in range(2)])
        ]
        self.assertEqual(len(messages[0]), 36)
        self.assertEqual(messages[0], messages[1])

    async def test_rerun_uses_the_build_of_a_removed_problem(self) -> None:
        await self.define("echo one >built")
        first = await self.submit()

        async def has_finished() -> bool:
            return (await self.client.status(first))["state"] == "finished"

        await until(has_finished, "the evaluation has finished")
        await self.daemon.reload("")
        answer = await self.client.request("POST", f"/evaluation/{first}/rerun")
        self.assertEqual(text(await self.client.follow(answer.json["evaluation_id"])), "one\n")
