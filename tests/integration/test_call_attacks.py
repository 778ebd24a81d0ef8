"""System calls that evaluators are refused, and privileges that they do not get."""

from __future__ import annotations

import errno
import json
import os
import platform
import resource
from typing import Any

from tawebeval.sandbox.seccomp import make_seccomp_filters
from tests.cases.bpf_interpreter import ALLOW, ERRNO, FilterStack
from tests.integration.attacks import calls
from tests.integration.attacks.case import AttackCase
from tests.integration.client import python


class CallAttacks(AttackCase):
    async def outcomes(self, *tables: dict[str, tuple[object, ...]]) -> Any:
        attacked = await self.attack(calls.CALLS, calls.calls_argument(*tables))
        self.assertEqual(attacked.status["state"], "finished", attacked.events)
        return json.loads(attacked.text)

    async def test_allowed_calls_with_harmful_arguments_are_refused(self) -> None:
        self.assertEqual(await self.outcomes(calls.BY_ARGUMENT), calls.ANSWERS)

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
        descriptors = make_seccomp_filters(internet=False)
        for descriptor in descriptors:
            self.addCleanup(os.close, descriptor)
        return FilterStack.read(descriptors)

    async def test_unlisted_socket_families_do_not_exist(self) -> None:
        tables = (calls.FAMILIES, calls.INTERNET, calls.RAW)
        found = await self.outcomes(*tables)
        self.assertEqual(found, dict.fromkeys(found, errno.EAFNOSUPPORT))
        self.assertEqual(len(found), sum(map(len, tables)))

    async def test_ordinary_calls_work(self) -> None:
        found = await self.outcomes(calls.ALLOWED)
        self.assertEqual(found, dict.fromkeys(calls.ALLOWED, 0))

    async def test_no_terminal_can_be_typed_into(self) -> None:
        attacked = await self.attack(calls.TERMINAL)
        names = ("TIOCSTI", "TIOCLINUX", "TIOCSETD", "SIOCGIFBR", "SIOCSIFVLAN")
        refused = [2 * f"{name} EPERM\n" for name in names]
        self.assertEqual(attacked.text, "".join(["no terminal\n", *refused]))


class PrivilegeAttacks(AttackCase):
    async def test_evaluator_has_no_capability_and_an_ordinary_user(self) -> None:
        found = await self.run_status()
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            self.assertEqual(int(found[name], 16), 0, name)
        self.assertEqual((found["NoNewPrivs"], found["Seccomp"]), ("1", "2"))
        self.assertEqual(found["Uid"].split(), ["1000"] * 4)
        self.assertEqual(found["Gid"].split(), ["1000"] * 4)
        self.assertNotIn("0", found["Groups"].split())

    async def test_crash_starts_no_handler_and_priority_is_ordinary(self) -> None:
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
        attacked = await self.attack_by("exec cat /proc/self/status")
        return {
            name: value.strip()
            for name, _, value in (line.partition(":") for line in attacked.text.splitlines())
        }

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
