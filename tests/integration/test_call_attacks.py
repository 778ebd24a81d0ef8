"""System calls that evaluators are refused, and privileges that they do not get."""

from __future__ import annotations

import errno
import json
import platform
import resource

from tawebeval.sandbox.seccomp import make_seccomp_filters
from tests.cases.bpf_interpreter import ALLOW, ERRNO, FilterStack
from tests.integration.attacks import calls
from tests.integration.attacks.case import AttackCase
from tests.integration.client import python


class CallAttacks(AttackCase):
    async def test_dangerous_arguments_and_socket_families_are_refused_and_others_allowed(
        self,
    ) -> None:
        families = {**calls.FAMILIES, **calls.INTERNET, **calls.RAW}
        tables = (calls.BY_ARGUMENT, families, calls.ALLOWED)
        attacked = await self.attack(calls.CALLS, calls.calls_argument(*tables))
        self.assertEqual(attacked.status["state"], "finished", attacked.events)
        expected = {**calls.ANSWERS, **dict.fromkeys(families, errno.EAFNOSUPPORT)}
        expected |= dict.fromkeys(calls.ALLOWED, 0)
        self.assertEqual(json.loads(attacked.text), expected)

    async def test_no_unlisted_call_number_reaches_the_kernel(self) -> None:
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
        self.assertNotIn("succeeded", (await self.attack(calls.OTHER_ARCHITECTURES)).text)

    def filters(self) -> FilterStack:
        return FilterStack.parse(make_seccomp_filters(internet=False))

    async def test_evaluator_cannot_type_into_a_terminal(self) -> None:
        attacked = await self.attack(calls.TERMINAL)
        names = ("TIOCSTI", "TIOCLINUX", "TIOCSETD", "SIOCGIFBR", "SIOCSIFVLAN")
        refused = [2 * f"{name} EPERM\n" for name in names]
        self.assertEqual(attacked.text, "".join(["no terminal\n", *refused]))


class PrivilegeAttacks(AttackCase):
    async def test_evaluator_is_an_ordinary_user_without_capabilities_and_core_dumps(
        self,
    ) -> None:
        script = """
import resource
for name in ("CORE", "NICE", "RTPRIO", "MSGQUEUE"):
    print(name, *resource.getrlimit(getattr(resource, f"RLIMIT_{name}")), sep=": ")
print(open("/proc/self/status").read())
"""
        lines = (await self.attack(script)).text.splitlines()
        pairs = (line.partition(":") for line in lines)
        found = {name: value.strip() for name, _, value in pairs}
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            self.assertEqual(int(found[name], 16), 0, name)
        self.assertEqual((found["NoNewPrivs"], found["Seccomp"]), ("1", "2"))
        self.assertEqual(found["Uid"].split(), ["1000"] * 4)
        self.assertEqual(found["Gid"].split(), ["1000"] * 4)
        self.assertNotIn("0", found["Groups"].split())
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        self.assertEqual(found["CORE"], f"{1 if hard else 0}: {hard}")
        self.assertEqual([found[name] for name in ("NICE", "RTPRIO", "MSGQUEUE")], ["0: 0"] * 3)

    async def test_setuid_programs_grant_nothing(self) -> None:
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

    async def test_no_process_outside_can_be_signalled(self) -> None:
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
