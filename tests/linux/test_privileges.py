"""`linux.privileges`: root is refused, or becomes another user, and rights are dropped; owners."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import sys
from pathlib import Path
from unittest import SkipTest

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import ConfigurationError
from tawebeval.linux.privileges import (
    become_user,
    build_user_environment,
    check_owner,
    check_user_and_locale,
)
from tests.cases.own_python import printed_by

NOBODY = pwd.getpwnam("nobody")


class RefusalTests(SynchronousTestCase):
    def check_refused(self, words: str, name: str) -> None:
        error = self.assertRaises(ConfigurationError, become_user, name)
        self.assertIn(words, str(error))

    def test_start_as_root_is_refused_with_the_user_option(self) -> None:
        for users in ((0, 0, 0), (1000, 1000, 0), (0, 1000, 1000)):
            self.patch(os, "getresuid", lambda users=users: users)
            error = self.assertRaises(ConfigurationError, check_user_and_locale)
            self.assertIn("as root: tawebeval serve --user NAME", str(error))
        self.patch(os, "getresuid", lambda: (1000, 1000, 1000))
        check_user_and_locale()

    def test_locale_without_utf_8_file_names_is_refused(self) -> None:
        self.patch(sys, "getfilesystemencoding", lambda: "iso8859-1")
        error = self.assertRaises(ConfigurationError, check_user_and_locale)
        self.assertIn("file names in iso8859-1, not in UTF-8", str(error))
        self.assertIn("LC_ALL=C.UTF-8", str(error))

    def test_user_option_refuses_root_members_of_the_root_group_and_unknown_users(self) -> None:
        self.check_refused("adduser --system", "nobody-of-this-name")
        self.check_refused("'root' is root", "root")
        self.patch(os, "getgrouplist", lambda *_: [65534, 0])
        self.check_refused("in the group of root", "nobody")

    def test_only_root_can_become_another_user(self) -> None:
        self.patch(os, "geteuid", lambda: 1000)
        self.check_refused("only root can run as 'nobody'", "nobody")
        self.patch(os, "geteuid", lambda: NOBODY.pw_uid)
        become_user("nobody")

    def test_environment_after_a_switch_of_user_has_the_values_of_that_user(self) -> None:
        given = {
            **dict.fromkeys(("HOME", "USER", "LOGNAME", "TMPDIR", "MAIL"), "root's"),
            **dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "SUDO_USER"), "root's"),
            "STATE_DIRECTORY": "/state",
            "PATH": "/bin",
        }
        found = build_user_environment(NOBODY, given)
        own = {"HOME": NOBODY.pw_dir, "USER": "nobody", "LOGNAME": "nobody"}
        kept = {"STATE_DIRECTORY": "/state", "PATH": "/bin", "SHELL": NOBODY.pw_shell}
        self.assertEqual(found, {**own, **kept})


# As root's Python may lie where nobody can read, the command is the shell.
_EXECUTE = """
import os, pwd, sys
from tawebeval.linux import privileges
privileges.subprocess.run = lambda *_, **__: type("Done", (), {"returncode": 0})
sys.executable = "/bin/sh"
os.dup2(0, 20, inheritable=True)
script = "id -u; id -g; id -G; ls /proc/self/fd; echo $HOME; grep -h Cap /proc/self/status"
sys.orig_argv = ["python", "-c", script]
privileges.become_user("nobody")
"""

# setpriv(1) cannot execute this Python, as if it were below a directory of root's.
_SWITCH = """
import os, sys
from tawebeval.linux import privileges
sys.executable = "/closed/python"
os.environ.update(XDG_STATE_HOME="/root")
os.dup2(0, 20, inheritable=True)
privileges.become_user("nobody")
assert "tawebeval.daemon.tap" in sys.modules
assert "XDG_STATE_HOME" not in os.environ
assert not os.path.exists("/proc/self/fd/20")
print(*os.getresuid(), *os.getresgid())
print(*os.getgroups())
"""

# Once the user is changed, no module can be read.
_REPORT = """
import os, pwd, sys
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import Logger, globalLogPublisher
from tawebeval.linux import privileges
os.initgroups = os.setresgid = os.setresuid = lambda *_: None
os.environ["SENTRY_DSN"] = "http://a@127.0.0.1:1/1"
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:1"
os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "10"
privileges.set_process_user(pwd.getpwnam("nobody"))
before = set(sys.modules)
from tawebeval.daemon.logging import make_error_reporter
from tawebeval.evaluations.traces import EvaluationTracer
tracer, reactor = EvaluationTracer(), MemoryReactorClock()
details = type("Details", (), {"trace": tracer.begin_trace([])})
tracer.record_phase(details, "running", 0, 1)
globalLogPublisher.addObserver(make_error_reporter(os.environ, reactor))
Logger().error("an error")
tracer.stop()
for function, positional, named in reactor.triggers["after"]["shutdown"]:
    function(*positional, **named)
print(sorted(sys.modules.keys() - before))
"""


class ExecutionTests(SynchronousTestCase):
    def test_executed_command_has_no_user_group_or_capability_of_root(self) -> None:
        if os.geteuid():
            raise SkipTest("only root can become another user: run the tests as root")
        uid, gid, groups, *rest = printed_by(_EXECUTE).splitlines()
        self.assertEqual((uid, gid), (str(NOBODY.pw_uid), str(NOBODY.pw_gid)))
        self.assertEqual(set(map(int, groups.split())), {*os.getgrouplist("nobody", NOBODY.pw_gid)})
        self.assertEqual(rest[:5], ["0", "1", "2", "3", NOBODY.pw_dir])  # 3 is of ls(1)
        capabilities = {name: int(value, 16) for name, value in map(str.split, rest[5:])}
        del capabilities["CapBnd:"]
        self.assertEqual(set(capabilities.values()), {0})

    def test_root_becomes_a_user_who_cannot_read_python(self) -> None:
        if os.geteuid():
            raise SkipTest("only root can become another user: run the tests as root")
        users, groups = printed_by(_SWITCH).splitlines()
        uid, gid = NOBODY.pw_uid, NOBODY.pw_gid
        self.assertEqual(users, f"{uid} {uid} {uid} {gid} {gid} {gid}")
        self.assertEqual(set(map(int, groups.split())), {*os.getgrouplist("nobody", gid)})

    def test_trace_and_error_report_import_no_module_after_a_switch_of_user(self) -> None:
        self.assertEqual(printed_by(_REPORT).splitlines(), ["[]"])


_DROP = """
import json, os, subprocess, sys
from tawebeval.linux.privileges import drop_capabilities
drop_capabilities()
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines())
names = ("CapInh", "CapPrm", "CapEff", "CapAmb", "NoNewPrivs")
print(json.dumps([int(status[name], 16) for name in names] + [os.stat("/proc/self/mem").st_uid]))
"""


_REFUSED = """
import sys
from click.testing import CliRunner
from tawebeval.cli import main
for command in sys.argv[1:]:
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code, command
    print(result.output.replace("\\n", " "))
"""


class DropTests(SynchronousTestCase):
    def test_no_right_is_left_and_none_can_be_gained(self) -> None:
        self.assertEqual(json.loads(printed_by(_DROP)), [0, 0, 0, 0, 1, 0])

    def test_commands_run_as_root_are_refused_with_the_user_option(self) -> None:
        if os.geteuid():
            raise SkipTest("this is for root")
        commands = ("starter", "serve", "try . --evaluator true x=1")  # the last one imports no TLS
        told = printed_by(_REFUSED, *commands).splitlines()
        for command, said in zip(commands, told, strict=True):
            self.assertIn(f"as root: tawebeval {command.split()[0]} --user NAME", said)


STRANGER = 54321


class OwnerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).resolve()
        (self.folder / "ours").mkdir(parents=True)
        (self.folder / "dangling").symlink_to("nowhere")

    def test_own_and_missing_directories_pass(self) -> None:
        check_owner(self.folder, ("ours", "missing", "dangling"))

    def test_directory_of_root_passes_if_writable(self) -> None:
        self.patch(os, "geteuid", lambda: STRANGER)
        owner = attrs.make_class("Status", {"st_uid": attrs.field(default=0)})
        self.patch(Path, "stat", lambda path, **_: owner())
        self.patch(Path, "lstat", lambda path: owner())
        check_owner(self.folder, ())
        self.patch(os, "access", lambda *_, **__: False)
        error = self.assertRaises(ConfigurationError, check_owner, self.folder, ())
        self.assertIn("belongs to root", str(error))

    def test_owner_of_a_link_to_the_directory_does_not_matter(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("only root can give a file to another user: run the tests as root")
        link = self.folder / "link"
        link.symlink_to("ours")
        os.chown(self.folder / "ours", STRANGER, STRANGER)
        self.patch(os, "geteuid", lambda: STRANGER)
        check_owner(link, ())
        os.chown(self.folder / "ours", STRANGER + 1, STRANGER)
        os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
        self.assertRaises(ConfigurationError, check_owner, link, ())

    def test_foreign_directory_is_named_with_owner_and_remedy(self) -> None:
        self.patch(os, "geteuid", lambda: STRANGER)
        self.patch(os, "access", lambda *_, **__: False)
        error = self.assertRaises(ConfigurationError, check_owner, self.folder, ("ours",))
        owner = pwd.getpwuid(os.getuid()).pw_name
        self.assertIn(f"{self.folder} belongs to {owner}", str(error))
        self.assertIn(f"{STRANGER}: {shlex.quote(str(self.folder))}", str(error))

    def test_subdirectory_of_another_owner_is_named(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("only root can give a file to another user: run the tests as root")
        os.chown(self.folder / "ours", STRANGER, STRANGER)
        (self.folder / "link").symlink_to("ours")
        check_owner(self.folder, ("link",))  # it is the link itself that counts
        error = self.assertRaises(
            ConfigurationError, check_owner, self.folder, ("dangling", "ours")
        )
        self.assertIn(f"{self.folder / 'ours'} belongs to {STRANGER}", str(error))
        self.assertTrue(str(error).endswith(f"root: {shlex.quote(str(self.folder))}"))
