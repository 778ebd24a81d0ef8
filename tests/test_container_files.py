"""`etc/seccomp.json` and `etc/compose.yaml`: what containers permit, and what the daemon needs."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import yaml
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tawebeval import __version__
from tawebeval.sandbox import seccomp
from tests.cases.scripts import load_script
from tests.integration.containers import OPTIONS
from tests.run import ROOT

PROFILE_FILE = ROOT / "etc" / "seccomp.json"
# Of what the unit allows (@system-service), the daemon and git use none of these: keyrings, files
# by number, other processes' memory, placement in memory, and calls of other architectures.
NOT_NEEDED = """
    add_key keyctl request_key kcmp name_to_handle_at personality oldfstat oldlstat oldstat
    oldolduname olduname ugetrlimit io_uring_enter io_uring_register io_uring_setup
    open_by_handle_at process_madvise process_vm_readv process_vm_writev userfaultfd
    io_pgetevents io_pgetevents_time64 migrate_pages move_pages set_mempolicy_home_node nice
"""
# What a later systemd than the image's (252) allows besides: calls of later kernels, other names.
LATER = """
    file_getattr file_setattr fstatat getxattrat listmount listxattrat llseek lsm_get_self_attr
    lsm_list_modules mseal newfstat removexattrat setxattrat statmount
"""
# Calls that no container gets, nor its root.
NEVER = """
    add_key bpf chroot delete_module fanotify_init finit_module init_module ioperm iopl kcmp
    kexec_file_load kexec_load keyctl name_to_handle_at open_by_handle_at perf_event_open
    pidfd_getfd process_vm_readv process_vm_writev ptrace quotactl reboot request_key settimeofday
    swapoff swapon syslog userfaultfd
"""


def permitted() -> set[str]:
    """Return the calls that the profile permits, whatever their arguments, or but for a few."""
    profile = json.loads(PROFILE_FILE.read_text())
    found = set()
    for rule in profile["syscalls"]:
        operators = {argument["op"] for argument in rule.get("args", ())}
        if rule["action"] == "SCMP_ACT_ALLOW" and operators <= {"SCMP_CMP_NE"}:
            found.update(rule["names"])
    return found


def list_calls(group: str) -> set[str]:
    """Return the calls of a group of systemd's."""
    command = ["systemd-analyze", "syscall-filter", "--no-pager", group]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    calls = set()
    for line in listed.splitlines()[1:]:
        name = line.strip()
        if name.startswith("@"):
            calls |= list_calls(name)
        elif name and not name.startswith("#"):
            calls.add(name)
    return calls


class ProfileTests(SynchronousTestCase):
    def test_container_permits_all_that_evaluators_may_call(self) -> None:
        calls = {name for names in seccomp.ALLOWED_CALLS.values() for name in names.split()}
        decided = {*seccomp._REFUSED_ARGUMENTS, *seccomp._refuse_sockets(internet=True)}
        self.assertEqual(sorted((calls | decided) - permitted()), [])
        self.assertIn("clone", decided)

    def test_container_permits_all_that_the_daemon_calls(self) -> None:
        if shutil.which("systemd-analyze") is None:
            raise SkipTest("systemd-analyze is not installed (Debian package systemd)")
        calls = list_calls("@system-service") | list_calls("@mount") - {"chroot"}
        self.assertEqual(sorted(calls - permitted() - {*NOT_NEEDED.split(), *LATER.split()}), [])

    def test_container_profile_forbids_calls_that_reach_the_host(self) -> None:
        profile = json.loads(PROFILE_FILE.read_text())
        self.assertEqual(set(NEVER.split()) & permitted(), set())
        self.assertEqual(profile["defaultAction"], "SCMP_ACT_ERRNO")
        (rule,) = (rule for rule in profile["syscalls"] if rule["names"] == ["socket"])
        self.assertEqual(rule["args"], [{"index": 0, "value": 40, "op": "SCMP_CMP_NE"}])


class ComposeTests(SynchronousTestCase):
    """The file for `docker compose`, beside the image and docs/install.md."""

    def setUp(self) -> None:
        text = (ROOT / "etc" / "compose.yaml").read_text()
        self.text = text
        self.service: dict[str, Any] = yaml.safe_load(text)["services"]["tawebeval"]
        script = load_script("image")
        self.image = script.configure(__version__, "", [])["config"]
        self.user = script.UID

    def test_compose_file_fits_the_image(self) -> None:
        self.assertEqual(self.service["image"], f"tawebeval:{__version__}")
        volumes = {volume.partition(":")[2] for volume in self.service["volumes"]}
        self.assertEqual(volumes, set(self.image["Volumes"]))
        (port,) = self.image["ExposedPorts"]
        self.assertTrue(self.service["ports"][0].endswith(f":{port.removesuffix('/tcp')}"))
        check = self.image["Healthcheck"]
        self.assertEqual(self.service["healthcheck"]["test"], check["Test"])
        self.assertIn(f"chown {self.user} tokens", self.text)
        self.assertIn(f"tawebeval:{__version__} token add", self.text)

    def test_health_check_runs_nothing_that_the_user_can_change(self) -> None:
        program, isolated = self.image["Healthcheck"]["Test"][1:3]
        self.assertTrue(program.startswith("/usr/"))
        self.assertEqual(isolated, "-I")
        self.assertNotIn(self.image["User"], ("", "root", "0"))

    def test_documented_options_are_set(self) -> None:
        options = self.service["security_opt"]
        self.assertIn("seccomp=./seccomp.json", options)
        self.assertIn("no-new-privileges=true", options)
        documented = (ROOT / "docs" / "install.md").read_text()
        for option in ("systempaths=unconfined", "writable-cgroups=true", "apparmor=unconfined"):
            self.assertIn(option, options)
            self.assertIn(option, documented)
        for path in ("/proc/*", "/sys/fs/cgroup"):
            self.assertIn(path, self.text)
            self.assertIn(f"unmask={path}", documented)
        self.assertTrue(self.service["read_only"])
        for key, values in (("cap_drop", ["ALL"]), ("tmpfs", ["/tmp"])):
            self.assertEqual(self.service[key], values)
            option = f"--{key.replace('_', '-')}={values[0]}"
            self.assertIn(option, OPTIONS, "the tests' containers have it, too")
