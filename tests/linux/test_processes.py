"""`linux.kernel_files`, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.kernel_files import (
    list_descendant_pids,
    measure_cpu_seconds,
    measure_largest_process_memory,
    read_process_stat,
)
from tests.cases.patience import PATIENCE

SIZE = 64 * 2**20
THREAD_ALONE = f"""
import ctypes, threading, time
held = bytearray(b"x") * {SIZE}
threading.Thread(target=time.sleep, args=(600,)).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""

BURN_IN_CHILDREN = """
import os, time
def burn():
    while time.process_time() < 0.1: pass
if not os.fork():
    burn()
    os._exit(0)
os.wait()
if not os.fork():
    burn()
    print(flush=True)
    time.sleep(600)
os.wait()
"""


class MeasureTests(SynchronousTestCase):
    def test_cpu_time_includes_running_and_reaped_descendants(self) -> None:
        command = [sys.executable, "-S", "-c", BURN_IN_CHILDREN]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as one:
            assert one.stdout is not None
            one.stdout.readline()
            tree = (one.pid, *list_descendant_pids(one.pid))
            measured = measure_cpu_seconds(one.pid)
            for pid in tree:
                os.kill(pid, signal.SIGKILL)
        self.assertEqual(len(tree), 2)
        self.assertGreater(measured, 0.15)

    def test_ended_process_has_used_no_cpu_time(self) -> None:
        with subprocess.Popen(["true"]) as one:
            one.wait()
        self.assertEqual(measure_cpu_seconds(one.pid), 0)

    def test_memory_counts_though_the_main_thread_has_ended(self) -> None:
        command = ["/usr/bin/python3", "-S", "-c", THREAD_ALONE]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as one:
            self.addCleanup(one.kill)
            assert one.stdout is not None
            one.stdout.readline()
            deadline = time.monotonic() + PATIENCE
            while read_process_stat(one.pid)[0] != b"Z":
                self.assertLess(time.monotonic(), deadline)
            measured = measure_largest_process_memory(one.pid)
            one.kill()
        self.assertTrue(SIZE <= measured < 2 * SIZE, measured)
