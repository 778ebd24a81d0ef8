"""Programs that leave processes behind, or make very many of them."""

from __future__ import annotations

# Leaves a process in a session of its own, in another directory, whose parent has gone;
# it says when that is there.
LEFT_BEHIND = """
import os, sys, time
told, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        os.write(1, b"there\\n")
        os.write(tell, b".")
        {before}
        time.sleep(60)
    os._exit(0)
os.read(told, 1)
{after}
"""

# Each shell waits for the next one; the last says that all are there.
DEEP = "if [ $1 -eq 0 ]; then echo deep; sleep 60; else sh $0 $(($1 - 1)) $2; :; fi"
