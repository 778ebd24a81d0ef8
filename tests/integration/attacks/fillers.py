"""Programs that fill the disk, in the directory that they are given; a ceiling as for bombs.

They tell by `filled` that they have got as far as they wanted, wait then, and print `unlimited`
if nobody ends them in time.
"""

from __future__ import annotations

from textwrap import indent

from tests.integration.attacks.calls import number_of

WAIT = "time.sleep(600)"
"""How they wait to be ended."""

_WAIT = f"""
print("filled", flush=True)
import time
{WAIT}
print("unlimited")
"""

MANY_FILES = (
    """
import os, sys
os.chdir(sys.argv[1])
for number in range(40):
    with open(f"{sys.argv[2]}-{number}", "wb") as file:
        file.write(b"x" * 2**20)
"""
    + _WAIT
)

ONE_FILE = """
import sys
with open(f"{sys.argv[1]}/{sys.argv[2]}", "wb", buffering=0) as file:
    for _ in range(100):
        try:
            file.write(b"x" * 2**20)
        except OSError as error:
            sys.exit(str(error))
print("unlimited")
"""

INODES = (
    """
import os, sys
os.chdir(sys.argv[1])
for number in range(3000):
    os.close(os.open(f"{sys.argv[2]}-{number}", os.O_CREAT | os.O_WRONLY))
"""
    + _WAIT
)

# What has no name any more is in no directory.
NAMELESS = (
    """
import os, sys
os.chdir(sys.argv[1])
held = []
for number in range(40):
    file = open(f"{sys.argv[2]}-{number}", "wb")
    file.write(b"x" * 2**20)
    file.flush()
    os.unlink(file.name)
    held.append(file)
"""
    + _WAIT
)

# Likewise, and held by a thread of a process whose first thread has ended.
OF_A_THREAD = f"""
import ctypes, threading
def hold():
{indent(NAMELESS, "    ")}
threading.Thread(target=hold).start()
ctypes.CDLL(None).syscall({number_of("exit")}, 0)
"""

# Who may not look into a directory cannot count what is there.
CLOSED = (
    """
import os, sys
os.chdir(sys.argv[1])
os.mkdir(sys.argv[2])
for number in range(40):
    with open(f"{sys.argv[2]}/{number}", "wb") as file:
        file.write(b"x" * 2**20)
os.chmod(sys.argv[2], 0)
"""
    + _WAIT
)

# Deeper than any path can be, and than Python recurses.
DEEP = (
    """
import os, sys
os.chdir(sys.argv[1])
for number in range(1500):
    os.mkdir(sys.argv[2])
    os.chdir(sys.argv[2])
with open("end", "wb") as file:
    file.write(b"x" * 2**20)
"""
    + _WAIT
)

SPARSE = """
import os, sys
with open(f"{sys.argv[1]}/{sys.argv[2]}", "wb") as file:
    file.truncate(7 * 2**20)
print(os.stat(file.name).st_blocks == 0)
"""

# Takes blocks without writing, past any look at what was written, and past RLIMIT_FSIZE. What
# programs do where a file system does not support that writes, and is to work.
ALLOCATED = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
file = os.open(f"{sys.argv[1]}/{sys.argv[2]}", os.O_CREAT | os.O_RDWR)
size = 16 * 2**20
keep_size = libc.fallocate(file, 1, ctypes.c_long(0), ctypes.c_long(size))
print(os.strerror(ctypes.get_errno()) if keep_size else "allocated")
reserve = ctypes.create_string_buffer(struct.pack("=hh4xqqiI16x", 0, 0, 0, size, 0, 0))
reserved = libc.ioctl(file, ctypes.c_ulong(0x40305828), reserve)
print(os.strerror(ctypes.get_errno()) if reserved else "allocated")
print(os.fstat(file).st_blocks * 512 < size)
os.posix_fallocate(file, 0, 2**20)
print(os.fstat(file).st_blocks * 512 >= 2**20)
"""
