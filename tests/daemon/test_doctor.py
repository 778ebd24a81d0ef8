"""`daemon.doctor`: each check, with a remedy that helps."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import attrs
from click.testing import CliRunner
from twisted.internet.testing import MemoryReactorClock

from tawebeval.cli import main
from tawebeval.daemon import doctor
from tawebeval.daemon.doctor import Finding, Severity
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.linux import daemon_limits
from tawebeval.sandbox import probe
from tests.cases.doctor_case import BROKEN, OK, RESOURCES, WEAKER, DoctorTestCase
from tests.cases.roots import make_root
from tests.cases.secrets import OLD, format_secret

SYSTEMD = "listen = ['systemd:domain=INET:index=0']"
RUNNING = "[evaluations]\nrunning = 4\n[limits]\nprocesses = 100\n"
WATCHES = "[evaluations]\nrunning = 3\n[limits]\nmemory = 18_000_000\n"
OPEN = "[callers]\nopen = true"
PROXIES = "[http]\ntrusted_proxies = "
TOKEN = f"alice sha256:{'0' * 64}\n"
TOKENS = "[callers]\ntokens = '{0}/tokens'\n"
METRICS = "[metrics]\ntokens = '{0}/tokens'"
CREDENTIAL = "[[repositories.credentials]]\nhost = 'h'\nusername = 'u'\n"
PASSWORD = f"{CREDENTIAL}password_file = '{{0}}/pass'"
CALLBACKS = "[callbacks]\nsecrets = '{0}/secrets'"
SECRET = f"* {format_secret(OLD)}\n"
FILES = "[limits]\nopen_files = 5000"
CONNECTIONS = "[http]\nconnections = 4000"
PROBLEM = SetupProblem("wrong; or so", "mend it")
SAID = "wrong; or so -> mend it"

Arrange = Callable[[DoctorTestCase], object]


def gives(value: object) -> Callable[..., object]:
    """Return a function that returns a value, or raises it if it is an error."""

    def give(*_: object) -> object:
        if isinstance(value, Exception):
            raise value
        return value

    return give


ERROR = gives(ConfigurationError(*PROBLEM))
FULL = gives(OSError(28, "No space left on device"))
HARD = gives((0, 4999))


def replace(place: Any, name: str, fake: object) -> Arrange:
    """Return what replaces something of the machine."""
    return lambda machine: machine.replace(place, name, fake)


def write(name: str, content: str, mode: int = 0o600) -> Arrange:
    """Return what makes a file."""
    return lambda machine: machine.write(name, content, mode)


def assign(path: str, value: object) -> Arrange:
    """Return what changes an attribute of the machine, or of its launcher."""
    *places, name = path.split(".")
    return lambda machine: setattr(reduce(getattr, places, machine), name, value)


def open_to_others(name: str, mode: int) -> Arrange:
    """Return what gives others rights to a path."""
    return lambda machine: (machine.folder / name).chmod(mode)


def fail_to_write(name: str, number: int) -> Arrange:
    """Return what makes writes to a directory fail."""

    def arrange(machine: DoctorTestCase) -> None:
        def probe_disk_write(path: Path) -> None:
            if path == machine.folder / name:
                raise OSError(number, os.strerror(number))

        machine.replace(doctor, "probe_disk_write", probe_disk_write)

    return arrange


def mount_read_only(machine: DoctorTestCase) -> None:
    """Mount the file system of the cache read-only."""
    statvfs = os.statvfs

    def look(path: Path) -> os.statvfs_result:
        *numbers, flags, longest = statvfs(path)
        read_only = os.ST_RDONLY if path == machine.cache else 0
        return os.statvfs_result((*numbers, flags & ~os.ST_RDONLY | read_only, longest))

    machine.replace(os, "statvfs", look)


def forbid_new_directories(machine: DoctorTestCase) -> None:
    """Remove the cache, and let the user make no other."""
    machine.cache.rmdir()
    machine.forbid(machine.folder)


def give_cache_to_another_user(machine: DoctorTestCase) -> None:
    """Let the cache be another user's."""
    if os.geteuid() == 0:
        os.chown(machine.cache, 65534, 65534)
    else:
        machine.environment["CACHE_DIRECTORY"] = "/usr"


def put_state_below_a_file(machine: DoctorTestCase) -> None:
    """Name a state directory below a file."""
    machine.environment["STATE_DIRECTORY"] = str(machine.file / "state")


class Fault(NamedTuple):
    """A fault, and what is said of it: the component, and words of the finding and its remedy.

    `{0}` is the folder of the case. `is_curable`: the remedy is a command after which all is well.
    """

    severity: Severity
    said: str
    settings: str = ""
    arrange: Arrange = lambda _: None
    is_curable: bool = False


OTHERS = "…every user may write"
NO_SANDBOX = '[sandbox]\nkind = "none"'
MANY_WATCHES = "up to 301500 may be needed -> run `sysctl fs.epoll.max_user_watches=301500`"
NO_STARTER = assign("launcher.error", FileNotFoundError(2, "No such file"))
NO_OVERLAYS = assign("launcher.overlay_problem", "no such device")
FEW_WATCHES = write("max_user_watches", "301499\n")
OPEN_FILE = write("tawebeval.toml", "", 0o666)
OVERLAYS = replace(probe, "probe_overlays_or_copies", gives(PROBLEM))
NO_WATCHES = replace(daemon_limits, "EPOLL_WATCH_LIMIT_FILE", Path("/nonexistent"))
SOME_DESCRIPTORS = replace(daemon_limits, "count_allowed_descriptors", gives(4096))
FEW_DESCRIPTORS = replace(daemon_limits, "count_allowed_descriptors", gives(100))
FEW_PROCESSES = replace(daemon_limits, "count_allowed_processes", gives(400))
WITH_TOKENS = write("tokens", TOKEN)
SETTING_FAULTS = (
    Fault(WEAKER, "sandbox: network…-> remove sandbox.network", "[sandbox]\nnetwork = true"),
    Fault(WEAKER, "sandbox: TCP…-> remove sandbox.loopback", "[sandbox]\nloopback = true"),
    Fault(WEAKER, 'sandbox: sandbox.kind is "none"…-> run `apt-get install', NO_SANDBOX),
    Fault(BROKEN, "paths: {0}/state…-> list only", "[sandbox]\nreadable = ['{0}/state']"),
    Fault(BROKEN, "paths: readable[0]", "[sandbox]\nreadable = ['{0}/tawebeval.toml']"),
    Fault(BROKEN, "paths: is not a dir…-> ", "[environments.none]\nroot = '{0}/none'"),
    Fault(BROKEN, "listen: nonsense:1", f"listen = ['nonsense:1']\n{TOKENS}", WITH_TOKENS),
    Fault(BROKEN, "callers: -> set callers.tokens to a file", "listen = ['tcp:80']"),
    Fault(WEAKER, "callers: systemd:domain…-> run `tawebeval token add", SYSTEMD),
    Fault(WEAKER, "callers: callers.open…-> run `tawebeval token add", OPEN),
    Fault(WEAKER, "callers: everybody", f"listen = ['tcp:80']\n{OPEN}"),
    Fault(BROKEN, "callers: remove callers.open or", f"{TOKENS}open = true", WITH_TOKENS),
    Fault(WEAKER, "proxies: no tokens…-> run `tawebeval token", f"{PROXIES}['127.0.0.1']"),
    Fault(WEAKER, "proxies: every host…-> list", f"{TOKENS}{PROXIES}['0.0.0.0/0']", WITH_TOKENS),
)
MACHINE_FAULTS = (
    Fault(BROKEN, "sandbox: No such file -> install a python3", NO_SANDBOX, NO_STARTER),
    Fault(BROKEN, f"sandbox: {SAID}", "", replace(doctor, "open_sandbox", ERROR)),
    Fault(BROKEN, f"sandbox: not work here: {SAID}", "", OVERLAYS),
    Fault(BROKEN, "sandbox: [Errno 28] No space", "", replace(doctor, "open_cgroups", FULL)),
    Fault(WEAKER, "trees: copies…(no such device)…-> overlays need", "", NO_OVERLAYS),
    Fault(BROKEN, "limits: -> set LimitNOFILE=5000", FILES, replace(resource, "getrlimit", HARD)),
    Fault(BROKEN, "watches: checked: [Errno 2] No such", "", NO_WATCHES),
    Fault(WEAKER, f"watches: {MANY_WATCHES}", WATCHES, FEW_WATCHES),
    Fault(BROKEN, f"git: {SAID}", "", replace(doctor, "check_git_version", ERROR)),
    Fault(
        WEAKER, "disk: {0}/state: …to be ready…-> use a larger file system", "", assign("free", 0)
    ),
    Fault(WEAKER, "descriptors: 4096 allowed…-> ", CONNECTIONS, SOME_DESCRIPTORS),
    Fault(BROKEN, "descriptors: -> set LimitNOFILE=", "", FEW_DESCRIPTORS),
    Fault(WEAKER, "processes: up to 560 may be needed -> raise TasksMax=", RUNNING, FEW_PROCESSES),
)
SECRET_FAULTS = (
    Fault(BROKEN, "tokens: {0}/tokens", TOKENS),
    Fault(BROKEN, "tokens: {0}/tokens", TOKENS, write("tokens", "s3cret")),
    Fault(BROKEN, f"tokens: {{0}}/tokens{OTHERS}", TOKENS, write("tokens", TOKEN, 0o666), True),
    Fault(BROKEN, "metrics: {0}/tokens", METRICS, write("tokens", "s3cret")),
    Fault(BROKEN, f"metrics: {{0}}/tokens{OTHERS}", METRICS, write("tokens", TOKEN, 0o602), True),
    Fault(BROKEN, "credentials: {0}/pass", PASSWORD),
    Fault(BROKEN, "credentials: {0}/pass", PASSWORD, write("pass", "s3cret\ns3cret")),
    Fault(BROKEN, "credentials: every user", PASSWORD, write("pass", "s3cret\n", 0o644), True),
    Fault(BROKEN, "callbacks: {0}/secrets", CALLBACKS, write("secrets", "* s3cret\n")),
    Fault(BROKEN, "callbacks: every user", CALLBACKS, write("secrets", SECRET, 0o604), True),
)
DIRECTORY_FAULTS = (
    Fault(BROKEN, f"{{0}}/tawebeval.toml: {OTHERS}", "", OPEN_FILE, True),
    Fault(BROKEN, f"{{0}}/state: {OTHERS}", "", open_to_others("state", 0o702), True),
    Fault(BROKEN, f"{{0}}/cache: {OTHERS}", "", open_to_others("cache", 0o777), True),
    Fault(BROKEN, "forge identifiers", "", write("state/key", "x" * 32, 0o644), True),
    Fault(BROKEN, "1 bytes, and a key has 32 -> remove", "", write("state/key", "x")),
    Fault(BROKEN, "belongs to…chown -R --no-dereference", "", give_cache_to_another_user),
    Fault(BROKEN, "{0}/cache: …mounted read-only -> mount it", "", mount_read_only),
    Fault(BROKEN, "cannot write: Read-only…-> mount", "", fail_to_write("state", errno.EROFS)),
    Fault(BROKEN, "cannot write: No space…-> free", "", fail_to_write("cache", errno.ENOSPC)),
    Fault(BROKEN, "{0}/cache…cannot create it in {0}", "", forbid_new_directories, True),
    Fault(BROKEN, "{0}/tawebeval.toml/state", "", put_state_below_a_file),
)


class CheckTests(DoctorTestCase):
    def check_faults(self, faults: Sequence[Fault], component: str = "") -> None:
        """Check that each fault is found with its remedy and without secrets."""
        for fault in faults:
            fault.arrange(self)
            name, _, said = f"{component}{fault.said}".partition(": ")
            words = said.format(self.folder).split("…")
            settings = fault.settings.format(self.folder)
            found = self.check(name, fault.severity, *words, settings=settings)
            self.assertNotIn("s3cret", str(found))
            if fault.is_curable:
                command = found.remedy.rpartition("as root: ")[2]
                subprocess.run(command, shell=True, check=True)
                self.check_ok(settings)
            self.reset()

    def test_faulty_settings_are_found_with_their_remedies(self) -> None:
        self.check_faults(SETTING_FAULTS)

    def test_faults_of_the_machine_are_found_with_their_remedies(self) -> None:
        self.check_faults(MACHINE_FAULTS)

    def test_faulty_secret_files_are_found_and_not_shown(self) -> None:
        self.check_faults(SECRET_FAULTS)

    def test_faulty_directories_are_found_with_commands_that_help(self) -> None:
        self.check_faults(DIRECTORY_FAULTS, "permissions: ")

    def test_each_component_is_ok_on_a_good_machine_and_nothing_is_left(self) -> None:
        components = (
            "configuration user sandbox trees limits git listen callers permissions disk"
            " descriptors processes watches starter"
        )
        self.assertEqual(set(components.split()), {each.component for each in self.check_ok()})
        self.assertFalse(self.accounts.exists())
        self.assertGreaterEqual(set(self.users), {"group", "passwd"})
        self.assertEqual(self.closed, [f"doctor-{os.getpid()}"])

    def test_valid_roots_tokens_and_proxies_are_ok(self) -> None:
        make_root(self.folder / "root")
        self.write("tokens", TOKEN)
        (self.folder / "some").mkdir()
        tokens = TOKENS.format(self.folder)
        for settings, component, said in (
            (f"[environments.java]\nroot = '{self.folder}/root'", "paths", "in java"),
            (tokens, "callers", "callers need a token"),
            (f"listen = ['unix:/run/x']\n{tokens}{PROXIES}['unix']", "proxies", "unix: clients'"),
            (f"{SYSTEMD}\n{tokens}{PROXIES}['127.0.0.1']", "proxies", "127.0.0.1: clients'"),
        ):
            (found,) = (one for one in self.check_ok(settings) if one.component == component)
            self.assertIn(said, found.description)

    def test_machine_without_limits_of_descriptors_and_processes_is_ok(self) -> None:
        self.replace(daemon_limits, "count_allowed_descriptors", gives(2**31 - 1))
        self.replace(daemon_limits, "count_allowed_processes", gives(None))
        found = self.check_ok(RUNNING)
        self.assertIn("any number allowed, and up to 560 may", str(found[-1]))

    def test_directories_that_the_daemon_can_make_are_ok(self) -> None:
        self.cache.rmdir()
        self.environment["STATE_DIRECTORY"] = str(self.folder / "one" / "two")
        self.check_ok()

    def test_broken_configuration_ends_the_checks(self) -> None:
        (found,) = self.examine("[limits]\nwall = 1")
        self.assertEqual((found.component, found.severity), ("configuration", BROKEN))
        self.assertIn("limits.wall", found.description)
        for path in (self.folder / "missing", self.folder):
            (found,) = doctor.examine_system(path, {}, MemoryReactorClock())
            self.assertEqual(found.severity, BROKEN)
            self.assertIn(str(path), found.description)

    def test_daemon_needs_no_configuration_file(self) -> None:
        first, *others = doctor.examine_system(None, self.environment, MemoryReactorClock())
        self.assertEqual(first, Finding("configuration", OK, "no file: defaults apply"))
        self.assertEqual({each.severity for each in others}, {OK}, others)

    def test_checks_end_if_the_user_is_root(self) -> None:
        def refuse(command: str) -> None:
            raise ConfigurationError("not as root", f"as root: {command} --user NAME")

        self.replace(doctor, "check_user_and_locale", refuse)
        _, found = self.examine()
        self.assertEqual((found.component, found.severity), ("user", BROKEN))
        for words in ("as root: tawebeval doctor --user NAME", "systemd-run"):
            self.assertIn(words, found.remedy)

    def test_sandbox_is_probed_in_the_directories_or_their_existing_parents(self) -> None:
        self.examine()
        self.assertEqual(self.get_probed_places(), [self.cache, self.state])
        self.assertEqual(self.accounts.parent, self.places[-1].workspaces)
        self.assertEqual(self.launcher.closed, 1)
        for path in (self.state, self.cache):
            path.rmdir()
        self.examine()
        self.assertEqual(self.get_probed_places(), [self.folder, self.folder])
        make = tempfile.mkdtemp

        def make_if_permitted(**arguments: Any) -> str:
            if arguments.get("dir") == self.folder:
                raise PermissionError(13, "Permission denied")
            return make(**arguments)

        self.replace(tempfile, "mkdtemp", make_if_permitted)
        self.examine()
        self.assertEqual(self.get_probed_places(), [Path(tempfile.gettempdir())] * 2)

    def get_probed_places(self) -> list[Path]:
        """Return where the last probe had its directories, which are removed."""
        places = attrs.astuple(self.places[-1])
        self.assertFalse(any(place.exists() for place in places))
        return [place.parent for place in places]

    def test_each_resource_without_a_cgroup_has_a_finding(self) -> None:
        self.missing = dict.fromkeys(RESOURCES, "not here")
        all_found = self.examine()
        found = [each for each in all_found if each.component == "limits"]
        self.assertEqual([each.severity for each in found], [WEAKER] * 4)
        self.assertEqual([each.description.split(":")[0] for each in found], list(RESOURCES))
        self.assertIn("not enforced by cgroups (not here)", found[1].description)
        self.assertEqual({each.remedy for each in found}, {"a unit"})
        self.assertNotIn("watches", [each.component for each in all_found])

    def test_each_endpoint_has_a_finding(self) -> None:
        endpoints = ["nonsense:1", "tcp:no-port", "tcp", "", "ssl:1:privateKey=/nowhere"]
        found = self.examine(f"listen = {[*endpoints, 'tcp:80']}\n{OPEN}")
        listening = [each.severity for each in found if each.component == "listen"]
        self.assertEqual(listening, [*[BROKEN] * len(endpoints), OK])


class CommandTests(DoctorTestCase):
    def run_command(self, *findings: Finding, options: tuple[str, ...] = ()) -> tuple[int, str]:
        self.replace(doctor, "examine_system", lambda file, environment: iter(findings))
        result = CliRunner().invoke(main, ["doctor", *options])
        return result.exit_code, result.output

    def test_exit_status_is_that_of_the_worst_finding(self) -> None:
        ok, weaker, broken = (Finding("part", health, "what") for health in Severity)
        for findings, status in (((ok, ok), 0), ((weaker, ok), 1), ((ok, broken, weaker), 2)):
            self.assertEqual(self.run_command(*findings)[0], status)

    def test_findings_are_printed_as_lines_or_as_json(self) -> None:
        finding = Finding("disk", WEAKER, "small", "a larger one")
        _, said = self.run_command(finding)
        first, second, last = said.splitlines()
        self.assertIn("the daemon starts", last)
        self.assertNotIn("starts", self.run_command(attrs.evolve(finding, severity=BROKEN))[1])
        self.assertEqual(first.split(), ["weaker", "disk", "small"])
        self.assertEqual(second.split(), ["->", "a", "larger", "one"])
        self.assertEqual(first.index("small"), second.index("->"))
        status, said = self.run_command(finding, options=("--json",))
        wanted = {"part": "disk", "health": "weaker", "what": "small", "remedy": "a larger one"}
        self.assertEqual((status, json.loads(said)), (1, [wanted]))
