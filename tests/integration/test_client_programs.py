"""The clients in programs of different kinds: forked workers, threads, notebooks, asyncio, trio."""

from __future__ import annotations

import os
import sys

from twisted.internet import reactor
from twisted.internet.utils import getProcessOutputAndValue

from tests.integration.harness import DaemonTestCase

HEAD = """\
import asyncio, os, sys, threading
import trio
from tawebeval.client import AsyncClient, Client
server, repository, commit = sys.argv[1:]
fields = {"repository": repository, "commit": commit, "evaluator_cmd": "seq 300"}
client, many = Client(server), AsyncClient(server)
expected = "".join(f"{n}\\n" for n in range(1, 301))

def follow():
    identifier = client.evaluate({"source": b"x"}, **fields)
    return "".join(event.text for event in client.events(identifier)) == expected

async def follow_async():
    identifier = await many.evaluate({"source": b"x"}, **fields)
    return "".join([event.text async for event in many.events(identifier)]) == expected
"""

# As a server that loads the program before it forks its workers; children have children.
FORKED = """\
print(follow())
def work(depth):
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            good = work(depth - 1) if depth else follow()
            os._exit(0 if good else 1)
        children.append(child)
    good = follow()
    return good and not any(os.waitpid(child, 0)[1] for child in children)
print(work(1))
def again():
    print(asyncio.run(follow_async()))
again()
child = os.fork()
if child == 0:
    again()
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""

# A cell of a notebook runs inside of a loop; in threads and with trio the same client goes on.
LOOPS = """\
async def cell():
    await asyncio.sleep(0)
    found = [follow(), await follow_async()]
    found += await asyncio.gather(*[follow_async() for _ in range(3)])
    found += await asyncio.gather(*[asyncio.to_thread(follow) for _ in range(3)])
    await many.close()
    return found
print(all(asyncio.run(cell())), all(asyncio.run(cell())))
print(trio.run(follow_async))
found = []
def thread():
    found.append(asyncio.run(follow_async()) and follow())
threads = [threading.Thread(target=thread) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
print(found)
print("twisted" in sys.modules)
"""


class ProgramTests(DaemonTestCase):
    """Programs beside a daemon."""

    async def run_program(self, program: str) -> list[str]:
        """Return the lines that a program prints."""
        output, errors, status = await getProcessOutputAndValue(
            sys.executable,
            ["-u", "-c", HEAD + program, self.daemon.url, self.repository.url, self.commit],
            {"PATH": os.environ.get("PATH", os.defpath)},
            str(self.folder),
            reactor,
        )
        self.assertEqual(status, 0, errors.decode())
        return output.decode().splitlines()

    async def test_forked(self) -> None:
        """Children, and their children, use the client that their parent has used."""
        self.assertEqual(await self.run_program(FORKED), ["True"] * 4)

    async def test_loops(self) -> None:
        """Within running loops, in threads and in both kinds of loops events are read."""
        expected = ["True True", "True", "[True, True, True, True]", "False"]
        self.assertEqual(await self.run_program(LOOPS), expected)
