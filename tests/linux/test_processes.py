"""`linux.kernel_files`, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.kernel_files import list_descendants, measure_cpu_seconds

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
    def test_time_of_descendants_counts_whether_they_run_or_were_waited_for(self) -> None:
        command = [sys.executable, "-S", "-c", BURN_IN_CHILDREN]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as one:
            assert one.stdout is not None
            one.stdout.readline()
            tree = (one.pid, *list_descendants(one.pid))
            measured = measure_cpu_seconds(one.pid)
            for pid in tree:
                os.kill(pid, signal.SIGKILL)
        self.assertEqual(len(tree), 2)
        self.assertGreater(measured, 0.15)

    def test_ended_process_has_none(self) -> None:
        with subprocess.Popen(["true"]) as one:
            one.wait()
        self.assertEqual(measure_cpu_seconds(one.pid), 0)
