"""Evaluators on nodes that see no directory of the daemon: all files go by srun."""

from __future__ import annotations

import os
import signal
from hashlib import sha256
from pathlib import Path

from twisted.internet.utils import getProcessOutput

from tests.integration.client import data, failure, joined, python, text
from tests.integration.harness import COMMAND, until
from tests.integration.processes import processes
from tests.integration.slurm_case import StreamTestCase
from tests.integration.wire import blocks
from tests.integration.wire.blocks import HELPERS

MIB = 2**20
LAST_FILES = r"""
for number in range(3):
    path = b"file%d" % number
    open(path, "wb").write(b"%d" % number * 10**6)
    file(AS_PATH % path, path)
say(b"late")
"""


class StreamBlockTests(StreamTestCase, blocks.BlockCase):
    """Data and files, and what becomes of broken blocks."""


class TransferTests(StreamTestCase):
    """What is sent to the nodes, and what they keep."""

    async def submit(self, command: str, content: bytes) -> str:
        """Begin an evaluation of a submission; return its identifier."""
        return await self.client.evaluate(
            self.repository.url, self.commit, command, files=(("solution", "large.bin", content),)
        )

    def find_programs(self, name: str) -> list[int]:
        """Return the processes of srun, or of the program on the node."""
        found = processes(str(self.cluster.scratch))
        return [pid for pid in found if Path(f"/proc/{pid}/comm").read_text().startswith(name)]

    async def test_tree(self) -> None:
        """Evaluations at once have one tree, which they can change and no other one sees."""
        self.repository.write("sub/data", "x" * 100_000)
        commit = self.commit = self.repository.commit()
        command = "wc -c < sub/data; cat README; echo bad > README; rm -r sub"
        identifiers = [await self.begin(command) for _ in range(6)]
        for identifier in identifiers:
            self.assertEqual(
                joined(await self.client.follow(identifier)), ["100000\nan evaluator\n"]
            )
        await self.nothing_left_on_nodes()
        trees = self.cluster.scratch.glob("tawebeval-trees-*/*/tree/sub/data")
        self.assertEqual(len(list(trees)), 1, commit)

    async def test_large(self) -> None:
        """A submission of many pieces arrives exactly."""
        content = os.urandom(MIB) * 20
        identifier = await self.submit("sha256sum < $SUBMISSION_FILE_SOLUTION", content)
        expected = f"{sha256(content).hexdigest()}  -\n"
        self.assertEqual(text(await self.client.follow(identifier)), expected)
        await self.nothing_left_on_nodes()

    async def test_last_files(self) -> None:
        """A node that has told the exit still has the files that the output names."""
        identifier = await self.begin(python(HELPERS + LAST_FILES))
        events = await self.client.follow(identifier)
        self.assertEqual([len(one["content_base64"]) for one in data(events)], [1333336] * 3)
        self.assertEqual(text(events), "late")
        await self.nothing_left_on_nodes()

    async def test_cancelled(self) -> None:
        """A transfer whose srun does not go on is cancelled, and leaves nothing behind."""
        identifier = await self.submit("echo never", bytes(60 * MIB))
        programs = await until(lambda: self.find_programs("srun"), "srun runs")
        await until(lambda: list(self.cluster.scratch.glob("tawebeval-node-*")), "the node begins")
        for pid in programs:
            os.kill(pid, signal.SIGSTOP)
        self.assertEqual((await self.client.status(identifier))["state"], "queued")
        await self.client.cancel(identifier)
        failure(await self.client.follow(identifier), "cancelled")
        await self.nothing_left_on_nodes()

    async def test_killed(self) -> None:
        """A node that dies in the middle of a transfer ends the evaluation."""
        identifier = await self.submit("echo never", bytes(60 * MIB))
        part = "tawebeval-node-*/evaluation/submission/solution/large.bin"
        await until(lambda: list(self.cluster.scratch.glob(part)), "a part has arrived")
        for pid in self.find_programs("python"):
            os.kill(pid, signal.SIGKILL)
        failure(await self.client.follow(identifier), "lost")
        await until(lambda: not self.cluster.list_jobs(), "no job is left")
        for place in self.cluster.scratch.glob("tawebeval-node-*"):
            place.rename(self.cluster.hidden / place.name)

    async def test_doctor(self) -> None:
        """A job tells whether the directory for evaluations is on its node."""
        path = self.daemon.folder / "tawebeval.toml"
        scratch = str(self.cluster.scratch)
        for directory, word in ((scratch, "is there"), (f"{scratch}/x", "No such file")):
            path.with_suffix(".new").write_text(path.read_text().replace(scratch, directory))
            command = (str(COMMAND), "doctor", "--config", str(path.with_suffix(".new")))
            environment = {
                **self.cluster.environment,
                "STATE_DIRECTORY": str(self.daemon.state),
                "CACHE_DIRECTORY": str(self.daemon.cache),
            }
            said = await getProcessOutput(command[0], command[1:], environment, errortoo=True)
            self.assertIn(word, said.decode())
