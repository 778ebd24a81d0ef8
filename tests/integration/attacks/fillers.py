"""Programs that fill the disk, in the directory that they are given; a ceiling as for bombs.

They tell by `filled` that they have got as far as they wanted, wait then, and print `unlimited`
if nobody ends them in time.
"""

from __future__ import annotations

WAIT = "time.sleep(60)"
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

# Likewise, and held by no descriptor: just by a mapping.
MAPPED = (
    """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)  # Python's own mmap would hold a descriptor, too
libc.mmap.restype = ctypes.c_void_p
os.chdir(sys.argv[1])
for number in range(40):
    with open(f"{sys.argv[2]}-{number}", "w+b") as file:
        file.write(b"x" * 2**20)
        file.flush()
        place = libc.mmap(None, ctypes.c_size_t(2**20), 1, 1, file.fileno(), ctypes.c_long(0))
        assert place not in (None, 2**64 - 1), ctypes.get_errno()
        os.unlink(file.name)
"""
    + _WAIT
)

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
