"""System calls that evaluators are refused, and privileges that they do not get."""

from __future__ import annotations

import errno
import json
import os
import platform
import resource
from typing import Any

from twisted.trial.unittest import SkipTest

from tawebeval.sandbox.seccomp import make_seccomp_filters
from tests.cases.bpf_interpreter import ALLOW, ERRNO, FilterStack
from tests.integration.attacks import calls
from tests.integration.attacks.case import AttackCase
from tests.integration.client import python


class CallAttacks(AttackCase):
    """Against the filter."""

    async def outcomes(self, *tables: dict[str, tuple[object, ...]]) -> Any:
        """Return the error number of each call."""
        attacked = await self.attack(calls.CALLS, calls.calls_argument(*tables))
        self.assertEqual(attacked.status["state"], "finished", attacked.events)
        return json.loads(attacked.text)

    async def test_refused(self) -> None:
        """Mounts, namespaces, others' memory, keys, handles, the kernel's inside: EPERM."""
        found = await self.outcomes(calls.REFUSED)
        self.assertEqual(found, dict.fromkeys(calls.REFUSED, errno.EPERM))

    async def test_missing(self) -> None:
        """What programs can do without is not there: they fall back to what they know."""
        found = await self.outcomes(calls.MISSING)
        self.assertEqual(found, dict.fromkeys(calls.MISSING, errno.ENOSYS))

    async def test_arguments(self) -> None:
        """What an allowed call would take from everybody is refused by its arguments."""
        self.assertEqual(await self.outcomes(calls.BY_ARGUMENT), calls.ANSWERS)

    async def test_numbers(self) -> None:
        """No number that the list does not name reaches the kernel, known today or not."""
        filters = self.filters()
        expected = {}
        # The kernel passes uretprobe and uprobe, its own calls, by all filters, and sends SIGILL.
        probes = {335, 336} if platform.machine() == "x86_64" else set()
        for number in {*range(1024), *range(2**30, 2**30 + 16), 2**31 - 1} - probes:
            answer = filters.answer(number, *[2**64 - 1] * 6, architecture=calls.ARCHITECTURE)
            if answer != ALLOW:
                expected[str(number)] = answer - ERRNO
        self.assertGreater(len(expected), 600)
        attacked = await self.attack(calls.NUMBERS, json.dumps([*map(int, expected)]))
        self.assertEqual(json.loads(attacked.text), expected)

    def filters(self) -> FilterStack:
        """Return the filters that evaluators have."""
        descriptors = make_seccomp_filters(internet=False)
        for descriptor in descriptors:
            self.addCleanup(os.close, descriptor)
        return FilterStack.read(descriptors)

    async def test_families(self) -> None:
        """The Internet, netlink, packets, virtual machines' sockets: no such family."""
        tables = (calls.FAMILIES, calls.INTERNET, calls.RAW)
        found = await self.outcomes(*tables)
        self.assertEqual(found, dict.fromkeys(found, errno.EAFNOSUPPORT))
        self.assertEqual(len(found), sum(map(len, tables)))

    async def test_allowed(self) -> None:
        """What ordinary programs need works: the test above would tell if it did not."""
        found = await self.outcomes(calls.ALLOWED)
        self.assertEqual(found, dict.fromkeys(calls.ALLOWED, 0))

    async def test_other_architectures(self) -> None:
        """Calls by the numbers of 32 bits, which the filter does not know, get nowhere."""
        if platform.machine() != "x86_64":
            raise SkipTest("this machine has no calls of another architecture")
        attacked = await self.attack(calls.OTHER_ARCHITECTURES)
        self.assertEqual(attacked.text, "int80 refused\nx32 refused\n")

    async def test_terminal(self) -> None:
        """There is no terminal, and nothing can be typed into one, whatever the upper bits say."""
        attacked = await self.attack(calls.TERMINAL)
        refused = [2 * f"{name} EPERM\n" for name in ("TIOCSTI", "TIOCLINUX", "TIOCSETD")]
        self.assertEqual(attacked.text, "".join(["no terminal\n", *refused]))


class PrivilegeAttacks(AttackCase):
    """Against the rights that a process has."""

    async def test_rights(self) -> None:
        """No capability of any kind, none to be had, the filter on, and an ordinary user."""
        found = await self.run_status()
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            self.assertEqual(int(found[name], 16), 0, name)
        self.assertEqual((found["NoNewPrivs"], found["Seccomp"]), ("1", "2"))
        self.assertEqual(found["Uid"].split(), ["1000"] * 4)
        self.assertEqual(found["Gid"].split(), ["1000"] * 4)
        self.assertNotIn("0", found["Groups"].split())

    async def test_limits(self) -> None:
        """A crash starts no handler of the machine's, and no priority is above others'."""
        script = """
import resource
for name in ("CORE", "NICE", "RTPRIO", "MSGQUEUE"):
    print(name, *resource.getrlimit(getattr(resource, f"RLIMIT_{name}")))
"""
        found = (await self.attack(script)).text
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        core = f"CORE {1 if hard else 0} {hard}"
        self.assertEqual(found, f"{core}\nNICE 0 0\nRTPRIO 0 0\nMSGQUEUE 0 0\n")

    async def run_status(self) -> dict[str, str]:
        """Return what /proc says of the evaluator."""
        attacked = await self.attack_by("exec cat /proc/self/status")
        return {
            name: value.strip()
            for name, _, value in (line.partition(":") for line in attacked.text.splitlines())
        }

    async def test_setuid_programs(self) -> None:
        """Programs that make others root make nobody anything, nor do those that are copied."""
        script = """
import os, subprocess
found = subprocess.run(["find", "/usr", "-type", "f", "-perm", "/6000", "-print", "-quit"],
                       capture_output=True).stdout
print("found" if found else "none")
open("copy", "wb").write(open("/bin/cat", "rb").read())
os.chmod("copy", 0o6755)
print([line.split()[1] for line in subprocess.run(["./copy", "/proc/self/status"],
      capture_output=True, text=True).stdout.splitlines() if line.startswith(("CapEff", "NoNew"))])
print(subprocess.run(["su", "-c", "id -u"], capture_output=True, stdin=-3).stdout)
"""
        attacked = await self.attack(script)
        self.assertEqual(attacked.text.splitlines()[1:], [str(["0" * 16, "1"]), "b''"])

    async def test_kill(self) -> None:
        """Nobody outside can be signalled: nobody is even seen."""
        script = """
import os, signal, sys
me = os.getpid()
for pid in {int(sys.argv[1]), int(sys.argv[2]), 2**22 - 1}:
    try:
        os.kill(pid, signal.SIGKILL if pid > 100 else 0)
        print("killed", pid)
    except (ProcessLookupError, PermissionError) as error:
        pass
try:
    os.kill(-1, signal.SIGCONT)  # harmless, should anybody get it
    print("all were told")
except ProcessLookupError:
    pass
print(sorted(int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) > me))
"""
        pid = self.daemon.pid
        attacked = await self.attack_by(python(script, str(pid), str(pid + 1)))
        self.assertNotIn("killed", attacked.text)
        self.assertEqual(attacked.text, "[]\n")
        self.assertEqual(self.daemon.pid, pid)
        self.assertTrue(self.daemon.running)
