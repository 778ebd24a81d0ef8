"""Evaluators that want more than their limits allow, with the reason that has to end each.

An attack that gets far over its limit ends by itself, and prints `unlimited`. Most of them are the
suite's own (`PROGRAMS`), of tests/integration/attacks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

PROGRAMS: dict[str, str] = json.loads(Path("programs.json").read_text())

MIB = 2**20
CPU, MEMORY, PROCESSES, DISK = 15, 64 * MIB, 40, 24 * MIB  # seconds, bytes, processes, bytes


def limits(*, cpu: int = CPU, memory: int = MEMORY, running: int = 2, more: str = "") -> str:
    """Return a configuration with these limits, in seconds and bytes, and those above.

    `more` are settings of `[repositories]`.
    """
    return f"""
[repositories]
protocols = ["file", "http"]
{more}
tree_bytes = {4 * MIB}

[evaluations]
running = {running}

[service]
drain = 0

[limits]
cpu = {cpu}
memory = {memory}
processes = {PROCESSES}
disk = {DISK}
"""


class Attack(NamedTuple):
    """A program in Python, and the reason and the value of the error that it has to end with."""

    name: str
    program: str
    reason: str
    value: int
    arguments: str = ""


_DISK = """
import os, time
for number in range(20):
    with open(f"/dev/shm/{number}", "wb") as file:
        file.write(b"x" * 2**22)
        os.fsync(file.fileno())
    time.sleep(0.5)
print("unlimited")
"""

ATTACKS = (
    Attack("a heap", PROGRAMS["HEAP"], "memory", MEMORY),
    Attack("heaps of forked children", PROGRAMS["HEAP_OF_CHILDREN"], "memory", MEMORY),
    Attack("files in memory (memfd)", PROGRAMS["MEMFD"], "memory", MEMORY),
    Attack("files in /dev/shm, which lies on the disk", _DISK, "disk", DISK),
    Attack("forks", PROGRAMS["FORKS"], "processes", PROCESSES),
    Attack("processor time of several processes", PROGRAMS["BURN_TOGETHER"], "cpu", CPU),
)
SPIN = """
import os, sys
for _ in range(int(sys.argv[1]) - 1):
    if os.fork() == 0:
        break
else:
    print("spins", flush=True)
while True:
    pass
"""

ALL_MEMORY = """
print("takes all", flush=True)
blocks = [bytearray(b"x") * 2**20 for _ in range(1024)]
print("unlimited")
"""

SOME_MEMORY = """
import time
block = bytearray(b"x") * 2**25
print("has some", flush=True)
time.sleep(600)
"""
