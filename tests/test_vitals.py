"""`daemon.vitals`: figures of the process itself."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon.vitals import Vitals, open_descriptors


class VitalsTests(SynchronousTestCase):
    """This very process."""

    def values(self) -> dict[str, float]:
        """Return the figures by their names."""
        return {
            sample.name: sample.value
            for metric in Vitals(lambda: 77, 1234.5).collect()
            for sample in metric.samples
        }

    def test_values(self) -> None:
        """They are those that the kernel has."""
        values = self.values()
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.assertLessEqual(values["process_cpu_seconds_total"], used.ru_utime + used.ru_stime)
        self.assertGreater(values["process_cpu_seconds_total"], 0)
        self.assertEqual(values["process_open_fds"], 77)
        self.assertEqual(values["process_max_fds"], resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self.assertEqual(values["process_start_time_seconds"], 1234.5)
        peak = used.ru_maxrss * 1024
        self.assertGreater(values["process_resident_memory_bytes"], peak / 10)
        self.assertLessEqual(
            values["process_resident_memory_bytes"], values["process_virtual_memory_bytes"]
        )

    def test_start(self) -> None:
        """If nothing else is said it was started when this was made."""
        before = time.time()
        vitals = Vitals()
        after = time.time()
        (metric,) = (one for one in vitals.collect() if one.name == "process_start_time_seconds")
        self.assertTrue(before <= metric.samples[0].value <= after)

    def test_descriptors(self) -> None:
        """One more is one more, whichever way they are counted."""
        real = Path("/proc/self/fd")
        before = open_descriptors(real)
        with open("/dev/null", encoding="ascii"):
            self.assertEqual(open_descriptors(real), before + 1)
        self.assertEqual(open_descriptors(real), before)

    def test_older_kernel(self) -> None:
        """Where the directory has no size its entries are counted."""

        class Sizeless(type(Path())):  # type: ignore[misc]
            """A directory as older kernels show it."""

            def stat(self, **_: object) -> os.stat_result:
                return os.stat_result((0,) * 10)

        folder = Path(self.mktemp())
        folder.mkdir()
        for name in "abc":
            (folder / name).touch()
        self.assertEqual(open_descriptors(Sizeless(folder)), 3)
