"""Programs that take all they can get of the machine, or behave as if they did.

Those that could do harm have a ceiling, which is far over the limits of the tests: who gets
there prints `unlimited`.
"""

from __future__ import annotations

FORKS = """
import os, time
for _ in range(300):
    try:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    except OSError:
        time.sleep(600)
print("unlimited")
"""

FORK_BOMB = """
import os, time
end = time.monotonic() + 60
while time.monotonic() < end:
    try:
        os.fork()
    except OSError:
        pass
"""

THREADS = """
import threading, time
for _ in range(300):
    try:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except RuntimeError:
        time.sleep(600)
print("unlimited")
"""

HEAP = """
blocks = [bytearray(b"x") * 2**20 for _ in range(300)]
print("unlimited")
"""

# Each of them well within the limit, all of them together over it.
HEAP_OF_CHILDREN = """
import os, time
told, tell = os.pipe()
for _ in range(10):
    if os.fork() == 0:
        block = bytearray(b"x") * (25 * 2**20)
        os.write(tell, b".")
        time.sleep(600)
        os._exit(0)
for _ in range(10):
    os.read(told, 1)
print("unlimited")
"""

MEMFD = """
import os
files = [os.memfd_create("x") for _ in range(50)]
for file in files:
    for _ in range(3):
        os.write(file, b"x" * 2**21)
print("unlimited")
"""

# System V: it belongs to no process, and stays until somebody removes it or the namespace ends.
SHARED_SEGMENTS = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
libc.shmdt.argtypes = [ctypes.c_void_p]
for _ in range(30):
    segment = libc.shmget(0, ctypes.c_size_t(10 * 2**20), 0o1600)
    place = libc.shmat(segment, None, 0)
    ctypes.memset(place, 1, 10 * 2**20)
    libc.shmdt(place)
print("unlimited")
"""

SHARED_MAPPINGS = """
import mmap
mappings = [mmap.mmap(-1, 10 * 2**20) for _ in range(30)]
for mapping in mappings:
    mapping.write(b"x" * len(mapping))
print("unlimited")
"""

BURN = "while True: pass"

# None of them alone gets to the limit; all of them together are far over it.
BURN_TOGETHER = """
import os, time
for _ in range(30):
    if os.fork() == 0:
        while time.process_time() < 1:
            pass
        os._exit(0)
for _ in range(30):
    os.wait()
print("unlimited")
"""

FLOOD = """
import os, sys
block = b"y" * 65535 + b"\\n"
while True:
    os.write(int(sys.argv[1]), block)
"""

LONG_LINE = """
import os
block = b"y" * 65536
for _ in range(10 * 2**30 // len(block)):
    os.write(1, block)
"""

# Lines of a data block that are no JSON: each is little to print, and much to look at.
BROKEN_VALUES = """
import os
os.write(1, os.environb[b"EVALUATION_DATA_BEGIN"] + b"\\n")
while True:
    os.write(1, b"x\\n" * 32768)
"""

# One file, named again and again: some hundred bytes of stdout for each time.
SAME_FILE = """
import os, sys
with open("large", "wb") as large:
    large.write(b"x" * 2_090_000)
begin, end = (os.environb[b"EVALUATION_FILE_" + name] for name in (b"BEGIN", b"END"))
os.write(1, (begin + b"\\nX-SEGI-As: path\\n\\nlarge\\n" + end + b"\\n") * int(sys.argv[1]))
"""

# A tree of those who ignore what can be ignored, in sessions of their own, with stdout open.
STUBBORN = """
import os, signal, sys, time
for number in range(1, 65):
    if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
for _ in range(10):
    if os.fork() == 0:
        os.setsid()
        os.chdir("/")
        if os.fork():
            os._exit(0)
        while True:
            time.sleep(600)
print("ready", flush=True)
if sys.argv[1] == "stay":
    while True:
        time.sleep(600)
"""
