"""Groups that systemd has delegated to the daemon, or not: what the doctor says, and what helps."""

from __future__ import annotations

import json
import shlex

from tests.integration.service_case import ServiceTestCase

_FILE = "/etc/tawebeval/delegation.toml"
_USER, _UID = "somebody", 4242
_DOCTOR = ("tawebeval", "doctor", "--json", "--config", _FILE)
_SERVE = "tawebeval serve"


class DelegationTests(ServiceTestCase):
    """`tawebeval doctor` in units that systemd-run makes.

    The machine's version 2 may have no controller, so what tells is the processor time, which is
    measured without one.
    """

    before: tuple[str, ...] = ()
    """What becomes the user who starts the daemon."""

    def doctor(self, command: str) -> dict[str, dict[str, str]]:
        """Return what the doctor says of the groups, by the first word of it."""
        script = f"TERM=dumb script --quiet --return --command {shlex.quote(command)} /dev/null"
        printed = self.machine.attempt(*self.before, "sh", "-c", script).stdout
        found = json.loads(printed[printed.index("[") : printed.rindex("]") + 1])
        limits = [each for each in found if each["part"] == "limits"]
        return {each["what"].partition(":")[0]: each for each in limits}

    def helped(self, undelegated: str) -> None:
        """Hold that the daemon leaves such a group alone, and that the remedy helps there."""
        found = self.doctor(f"{undelegated} {shlex.join(_DOCTOR)}")
        for each in found.values():
            self.assertEqual(each["health"], "weaker", each)
            self.assertIn("systemd has not delegated it to the daemon", each["what"])
        _, separator, command = found["cpu"]["remedy"].rpartition("; or by: ")
        self.assertTrue(separator, found["cpu"])
        self.assertTrue(command.endswith(_SERVE), command)
        found = self.doctor(command.removesuffix(_SERVE) + shlex.join(_DOCTOR))
        self.assertEqual(found["cpu"]["health"], "ok", found)
        for each in found.values():
            self.assertNotIn("delegated", each["what"])

    def test_remedy_of_the_doctor_helps_a_user(self) -> None:
        self.write(_FILE, "")
        self.machine.attempt("useradd", "--create-home", "--uid", str(_UID), _USER)
        self.control("start", f"user@{_UID}.service")
        self.addCleanup(self.control, "stop", f"user@{_UID}.service")
        own = ("setpriv", f"--reuid={_UID}", f"--regid={_UID}", "--clear-groups", "env")
        home = f"HOME=/home/{_USER}"
        self.before = (*own, home, f"XDG_RUNTIME_DIR=/run/user/{_UID}")
        self.helped("systemd-run --user --quiet --pty")
