"""What the status says of the memory that an evaluator has used."""

from __future__ import annotations

from tests.integration.cgroups import needs_cgroups
from tests.integration.client import python
from tests.integration.harness import CONFIGURATION, DaemonTestCase

MIB = 2**20
MEMORY = 192 * MIB
PYTHON = 24 * MIB
"""More than any of these programs takes besides what it is told to take."""

WRITE = """
import os
with open("large", "wb") as file:
    for _ in range(240):
        file.write(bytes(2**20))
"""
REMOVE = f"{WRITE}os.remove('large')"
MAP = f"""{WRITE}
import mmap
with open("large", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
    print(sum(mapped[::4096]))
"""
HEAP = "bytearray(100 * 2**20)"
SHARED = """
import mmap
mmap.mmap(-1, 100 * 2**20).write(bytes(100 * 2**20))
"""
TOGETHER = """
import os
ready, said = os.pipe()
over, going = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        os.close(going)
        block = bytearray(25 * 2**20)
        os.write(said, b".")
        os.read(over, 1)
        os._exit(0)
for _ in range(4):
    os.read(ready, 1)
os.close(going)
for _ in range(4):
    os.wait()
"""


class MemoryTests(DaemonTestCase):
    configuration = f"{CONFIGURATION}\n[limits]\nmemory = {MEMORY}\n"

    async def peak(self, program: str) -> int:
        """Return what is said of a program that ends well."""
        identifier = await self.begin(python(program))
        status = await self.client.ended(identifier)
        self.assertEqual(status["state"], "finished", status)
        peak: int = status["usage"]["peak_memory_bytes"]
        return peak

    @needs_cgroups
    async def test_peak_memory_counts_no_page_cache(self) -> None:
        for program in (WRITE, REMOVE, MAP):
            self.assertLess(await self.peak(program), PYTHON, program)

    @needs_cgroups
    async def test_peak_memory_counts_all_of_a_short_life(self) -> None:
        for program in (HEAP, SHARED, TOGETHER):
            peak = await self.peak(program)
            self.assertTrue(100 * MIB <= peak < 100 * MIB + PYTHON, (peak, program))
