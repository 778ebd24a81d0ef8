"""`linux.privileges`: rights that are really given up, by a Python that ends with the test."""

from __future__ import annotations

import ctypes
import os
from unittest import SkipTest

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux import privileges
from tawebeval.linux.privileges import CAP_NET_BIND_SERVICE, CurrentProcess
from tests.cases.own_python import printed_by

PORTS = 1 << CAP_NET_BIND_SERVICE

BEGIN = """\
import ctypes, os
from tawebeval.linux.privileges import CurrentProcess
process = CurrentProcess()

def status(name):
    with open("/proc/self/status") as file:
        return next(line.split()[1] for line in file if line.startswith(f"{name}:"))

def dumpable():
    return ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
"""


class KernelTests(SynchronousTestCase):
    """What the kernel says afterwards."""

    def run_python(self, script: str) -> list[str]:
        """Return the words that a script prints, which has a `process` of its own."""
        return printed_by(BEGIN + script).split()

    def need_root(self) -> None:
        """Skip a test that others than root cannot make."""
        if os.geteuid() != 0:
            raise SkipTest("only root has rights to lose: run the tests as root")

    def test_hide(self) -> None:
        """A process that hides is not dumpable any more, and knows."""
        script = "print(dumpable(), process.is_tracing_forbidden())\n"
        said = self.run_python(f"{script}process.forbid_tracing()\n{script}")
        self.assertEqual(said, ["1", "False", "0", "True"])

    def test_gain_nothing(self) -> None:
        """It cannot be taken back, and stands in /proc."""
        said = self.run_python("process.set_no_new_privileges()\nprint(status('NoNewPrivs'))")
        self.assertEqual(said, ["1"])

    def test_no_capabilities(self) -> None:
        """Whoever has none may say so."""
        said = self.run_python("process.set_capabilities(0)\nprint(process.get_capabilities())")
        self.assertEqual(said, ["0"])

    def test_capabilities(self) -> None:
        """Just those are left, in the two sets that count; gone ones do not come back."""
        self.need_root()
        script = f"""
process.set_capabilities({PORTS})
print(process.get_capabilities() == {PORTS}, status("CapInh"), status("CapAmb"))
print(int(status("CapEff"), 16) == int(status("CapPrm"), 16) == {PORTS})
try:
    process.set_capabilities({PORTS} | 1)
except PermissionError:
    print("refused")
"""
        none = "0" * 16
        self.assertEqual(self.run_python(script), ["True", none, none, "True", "refused"])

    def test_high_capabilities(self) -> None:
        """The second word of the sets is counted, too."""
        self.need_root()
        high = self.run_python("print(process.get_capabilities() >> 32)")
        said = self.run_python(
            "process.set_capabilities(process.get_capabilities() >> 32 << 32)\n"
            "print(process.get_capabilities() >> 32, process.get_capabilities() & 0xFFFFFFFF)"
        )
        self.assertEqual(said, [*high, "0"])

    def test_keep(self) -> None:
        """What is kept outlives root, and what is not does not."""
        self.need_root()
        change = (
            "process.set_user_ids(65534, 65534, 65534)\nprint(bool(process.get_capabilities()))"
        )
        self.assertEqual(self.run_python(change), ["False"])
        self.assertEqual(self.run_python(f"process.keep_capabilities()\n{change}"), ["True"])

    def test_bounding_set(self) -> None:
        """Nothing is left in it."""
        self.need_root()
        said = self.run_python("process.empty_bounding_set()\nprint(int(status('CapBnd'), 16))")
        self.assertEqual(said, ["0"])

    def test_ids(self) -> None:
        """Users and groups are changed one by one, and threads counted."""
        self.need_root()
        script = """
process.set_supplementary_groups({3, 4})
process.set_group_ids(-1, 5, -1)
process.set_user_ids(-1, 6, -1)
print(process.get_user_ids()[1], process.get_group_ids()[1], end=" ")
print(*sorted(process.get_supplementary_groups()))
process.set_environment({"HOME": "/home/x"})
print(os.environ["HOME"], process.count_threads())
"""
        self.assertEqual(self.run_python(script), ["6", "5", "3", "4", "/home/x", "1"])

    def test_errors(self) -> None:
        """What the kernel refuses is an error in its own words."""
        self.patch(ctypes, "get_errno", lambda: 1)
        with self.assertRaises(PermissionError):
            privileges.raise_on_error(-1)
        self.assertGreaterEqual(CurrentProcess().count_threads(), 1)
