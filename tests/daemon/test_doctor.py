"""`daemon.doctor`: every part of it, ok, weaker and broken, with a remedy that helps."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from click.testing import CliRunner
from twisted.internet.testing import MemoryReactorClock

from tawebeval.cli import main
from tawebeval.daemon import doctor
from tawebeval.daemon.findings import Finding, Severity
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.linux import rlimits
from tawebeval.linux.cgroups import CgroupManager
from tawebeval.sandbox import probe
from tests.cases.doctor_case import BROKEN, OK, RESOURCES, WEAKER, DoctorTestCase
from tests.cases.roots import make_root
from tests.fakes.process import FakeProcess

NONE = '[sandbox]\nkind = "none"'
SYSTEMD = "listen = ['systemd:domain=INET:index=0']"
RUNNING = "[evaluations]\nrunning = 4\n[limits]\nprocesses = 100\n"
PROXIES = "[http]\ntrusted_proxies = "

# What is said of a machine where all is well by settings that are not.
SETTINGS = (
    ("[sandbox]\nnetwork = true", "sandbox", WEAKER, ("network",)),
    ("[sandbox]\nloopback = true", "sandbox", WEAKER, ("127.0.0.1",)),
    ("listen = ['tcp:80']", "callers", BROKEN, ("-> set callers.tokens to a file",)),
    (SYSTEMD, "callers", WEAKER, ("systemd:domain", "token new")),
    ("[callers]\nopen = true", "callers", WEAKER, ("callers.open", "everybody", "token new")),
    ("listen = ['tcp:80']\n[callers]\nopen = true", "callers", WEAKER, ()),
    (PROXIES + "['127.0.0.1']", "proxies", WEAKER, ("no tokens", "token new")),
    (NONE, "sandbox", WEAKER, ('sandbox.kind is "none"', "-> run `apt-get install", "remove")),
)


def gives(value: object) -> Callable[..., object]:
    """Return a function that returns a value, or raises it if it is an error."""

    def give(*_: object) -> object:
        if isinstance(value, Exception):
            raise value
        return value

    return give


PROBLEM = SetupProblem("wrong; or so", "mend it")
SAID = "wrong; or so -> mend it"
ERROR = gives(ConfigurationError(*PROBLEM))
FULL = gives(OSError(28, "No space left on device"))
HARD = gives((0, 4999))
FILES = "[limits]\nopen_files = 5000"
CONNECTIONS = "[http]\nconnections = 4000"
FEW = "400 allowed, and up to 528 may be needed -> raise TasksMax="

# What is said of a part where something of the machine is replaced, and with which settings.
FAULTS = (
    ("python", WEAKER, SAID, doctor, "find_unreadable_import_directories", gives([PROBLEM]), ""),
    ("sandbox", BROKEN, SAID, doctor, "open_sandbox", ERROR, ""),
    (
        "sandbox",
        BROKEN,
        f"not work here: {SAID}",
        probe,
        "probe_overlays_or_copies",
        gives(PROBLEM),
        "",
    ),
    ("sandbox", BROKEN, "checked: [Errno 28] No space", doctor, "open_cgroups", FULL, ""),
    ("limits", WEAKER, "OOMPolicy=stop ends", CgroupManager, "query_oom_policy", gives("stop"), ""),
    ("limits", WEAKER, "OOMPolicy=kill ends", CgroupManager, "query_oom_policy", gives("kill"), ""),
    ("limits", WEAKER, SAID, rlimits, "find_lowered_hard_limits", gives([PROBLEM]), ""),
    ("limits", BROKEN, "-> set LimitNOFILE=5000", resource, "getrlimit", HARD, FILES),
    (
        "watches",
        BROKEN,
        "checked: [Errno 2] No such",
        rlimits,
        "EPOLL_WATCH_LIMIT_FILE",
        Path("/nonexistent"),
        "",
    ),
    ("git", BROKEN, SAID, doctor, "check_git_version", ERROR, ""),
    (
        "descriptors",
        WEAKER,
        "4096 allowed",
        rlimits,
        "count_allowed_descriptors",
        gives(4096),
        CONNECTIONS,
    ),
    (
        "descriptors",
        BROKEN,
        "-> set LimitNOFILE=",
        rlimits,
        "count_allowed_descriptors",
        gives(100),
        "",
    ),
    ("processes", WEAKER, FEW, rlimits, "count_allowed_processes", gives(400), RUNNING),
)


class SystemChecksTests(DoctorTestCase):
    """What runs: the user, the sandbox, limits, git, endpoints."""

    def test_well(self) -> None:
        """Where all is well each part says so, once or more, and nothing is left of the look."""
        parts = (
            "configuration user sandbox trees limits git listen callers permissions disk"
            " descriptors processes watches starter"
        )
        self.assertEqual(set(parts.split()), {each.component for each in self.check_ok()})
        self.assertFalse(self.accounts.exists())
        self.assertGreaterEqual(set(self.users), {"group", "passwd"})
        self.assertEqual(self.closed, [f"doctor-{os.getpid()}"])

    def test_settings(self) -> None:
        """Settings that protect less than others, or that no daemon would start with."""
        for settings, part, health, words in SETTINGS:
            self.check(part, health, *words, settings=settings)

    def test_faults(self) -> None:
        """A fault of the machine is told of its part, with the remedy; all others are ok."""
        for part, health, said, module, name, fake, settings in FAULTS:
            patched = self.patch(module, name, fake)
            self.check(part, health, said, settings=settings)
            patched.restore()

    def test_no_fault(self) -> None:
        """What a machine may have all the same."""
        self.patch(CgroupManager, "query_oom_policy", gives("continue"))
        self.patch(rlimits, "count_allowed_descriptors", gives(2**31 - 1))
        self.patch(rlimits, "count_allowed_processes", gives(None))
        found = self.check_ok(RUNNING)
        self.assertIn("any number allowed, and up to 528 may", str(found[-1]))

    def test_configuration(self) -> None:
        """Where it cannot be read, or has a mistake, nothing else is said; it need not be there."""
        (found,) = self.examine("[limits]\nwall = 1")
        self.assertEqual((found.component, found.severity), ("configuration", BROKEN))
        self.assertIn("limits.wall", found.description)
        for path in (self.folder / "missing", self.folder):
            (found,) = doctor.examine_system(path, {}, FakeProcess(), MemoryReactorClock())
            self.assertEqual(found.severity, BROKEN)
            self.assertIn(str(path), found.description)
        process, reactor = FakeProcess(os.geteuid() or 1000), MemoryReactorClock()
        first, *others = doctor.examine_system(None, self.environment, process, reactor)
        self.assertEqual(first, Finding("configuration", OK, "no file: defaults apply"))
        self.assertEqual({each.severity for each in others}, {OK}, others)

    def test_user(self) -> None:
        """Root needs a user to become, which a unit may have; nobody else can become one."""
        for settings, uid, remedy, of_unit in (
            ("", 0, "adduser --system", True),
            ('[service]\nuser = "nobody"', 1000, "start the daemon as root", False),
        ):
            _, found, *others = self.examine(settings, uid)
            self.assertEqual((found.component, found.severity), ("user", BROKEN))
            self.assertIn(remedy, found.remedy)
            self.assertEqual("systemd-run" in found.remedy, of_unit)
            self.assertEqual("sandbox" in {each.component for each in others}, of_unit)
            if of_unit:
                said = (
                    "the other checks are those of a daemon with service.user = nobody,"
                    f" STATE_DIRECTORY={self.state}, CACHE_DIRECTORY={self.cache}"
                )
                self.assertIn(Finding("user", OK, said), others)

    def test_root_alone_gets_no_findings_about_the_home_of_nobody(self) -> None:
        """The directories are those that the manual names for a daemon that root starts."""
        self.environment = {}
        found = self.examine("", 0)
        self.assertEqual([each for each in found if "nonexistent" in each.description], [])

    def test_user_beside_unit(self) -> None:
        """Where the unit is installed root gets no remedies for another user than the unit's."""
        unit = self.write("tawebeval.service", "")
        self.patch(doctor, "UNIT_FILE_PATHS", (self.folder / "missing", unit))
        _, found = self.examine("", 0)
        self.assertEqual((found.component, found.severity), ("user", BROKEN))
        self.assertTrue(found.remedy.startswith("to check tawebeval.service, run the systemd-run"))
        _, found, *others = self.examine('[service]\nuser = "nobody"', 0)
        self.assertEqual((found.component, found.severity), ("user", OK))
        self.assertNotEqual(others, [])

    def test_nothing_can_be_started(self) -> None:
        """Without a sandbox the starter of evaluators has to work all the same."""
        self.trees.error = FileNotFoundError(2, "No such file")
        said = "no evaluator can be started: No such file -> install a python3"
        self.check("sandbox", BROKEN, said, settings=NONE)

    def test_overlays(self) -> None:
        """They are tried where they are or will be; what is copied is said, and why."""
        self.examine()
        self.assertEqual(self.get_probed_places(), [self.cache, self.state])
        self.assertEqual(self.accounts.parent, self.places[-1].workspaces)
        self.assertEqual(self.trees.closed, 1)
        self.trees.overlay_problem = "no such device"
        self.check("trees", WEAKER, "copies", "(no such device)", "Linux 5.11", "python3")
        for path in (self.state, self.cache):
            path.rmdir()
        self.examine()
        self.assertEqual(self.get_probed_places(), [self.folder, self.folder])
        make = tempfile.mkdtemp

        def make_if_permitted(**arguments: Any) -> str:
            if arguments.get("dir") == self.folder:
                raise PermissionError(13, "Permission denied")
            return make(**arguments)

        self.patch(tempfile, "mkdtemp", make_if_permitted)
        self.examine()
        self.assertEqual(self.get_probed_places(), [Path(tempfile.gettempdir())] * 2)

    def get_probed_places(self) -> list[Path]:
        """Return where the last probe had its directories, which are removed."""
        places = attrs.astuple(self.places[-1])
        self.assertFalse(any(place.exists() for place in places))
        return [place.parent for place in places]

    def test_readable(self) -> None:
        """What would be shown, and is the daemon's own, is said as at the start."""
        for path in (self.state, self.file):
            settings = f'[sandbox]\nreadable = ["{path}"]'
            words = "sandbox.readable[0]", str(path), "-> list only what evaluators need"
            self.check("sandbox", BROKEN, *words, settings=settings)

    def test_environments(self) -> None:
        """Roots are checked as at the start."""
        root = make_root(self.state.parent / "root")
        settings = f'[environments.java]\nroot = "{root}"\n'
        (found,) = (one for one in self.check_ok(settings) if one.component == "environments")
        self.assertEqual(found.description, "evaluators can run in java")
        settings += f'[environments.none]\nroot = "{root}/usr"'
        words = "environments.none.root", "has no program /usr/bin/prlimit", "-> install util-linux"
        self.check("environments", BROKEN, *words, settings=settings)

    def test_no_cgroups(self) -> None:
        """Each resource has a line of its own."""
        self.missing = dict.fromkeys(RESOURCES, "not here")
        found = [each for each in self.examine() if each.component == "limits"]
        self.assertEqual([each.severity for each in found], [WEAKER] * 4)
        self.assertEqual([each.description.split(":")[0] for each in found], list(RESOURCES))
        self.assertIn("RLIMIT_NPROC", found[1].description)
        self.assertEqual({each.remedy for each in found}, {"a unit"})

    def test_watches(self) -> None:
        """Epoll may watch as much as fits into the memory of evaluators, where that has an end."""
        settings = "[evaluations]\nrunning = 3\n[limits]\nmemory = 18_000_000\n"
        for there, health in ((301_500, OK), (301_499, WEAKER)):
            rlimits.EPOLL_WATCH_LIMIT_FILE.write_text(f"{there}\n")
            (found,) = (each for each in self.examine(settings) if each.component == "watches")
            said = f"{there} allowed, and up to 301500 may be needed"
            self.assertEqual((found.severity, found.description), (health, said))
        self.assertEqual(found.remedy, "run `sysctl fs.epoll.max_user_watches=301500`")
        self.missing = {"memory": "it is read-only"}
        self.assertNotIn("watches", [each.component for each in self.examine(settings)])

    def test_listen(self) -> None:
        """What is no endpoint is named, each one; what systemd opens need not be open here."""
        endpoints = ["nonsense:1", "tcp:no-port", "tcp", "", "ssl:1:privateKey=/nowhere"]
        found = self.examine(f"listen = {[*endpoints, 'tcp:80']}\n[callers]\nopen = true")
        listening = [each.severity for each in found if each.component == "listen"]
        self.assertEqual(listening, [*[BROKEN] * len(endpoints), OK])

    def test_proxies(self) -> None:
        """Whose word is taken for the addresses of others, where callers have tokens."""
        tokens = self.write("tokens", f"alice sha256:{'0' * 64}\n")
        callers = f"[callers]\ntokens = '{tokens}'\n"
        for network, said in (("0.0.0.0/0", "0.0.0.0/0: every host"), ("unix", "without a UNIX")):
            self.check("proxies", WEAKER, said, settings=f"{callers}{PROXIES}['{network}']")
        for endpoint, network in (
            ("unix:/run/x", "unix"),
            ("systemd:domain=UNIX:index=0", "unix"),
            ("tcp:8080:interface=127.0.0.1", "127.0.0.1"),
        ):
            found = self.check_ok(f"listen = ['{endpoint}']\n{callers}{PROXIES}['{network}']")
            (said,) = (each.description for each in found if each.component == "proxies")
            self.assertEqual(said, f"{network}: clients' addresses are taken from X-Forwarded-For")
        self.assertNotIn("proxies", [each.component for each in self.check_ok(callers)])
        both = f"{callers}open = true"
        self.check("callers", BROKEN, "remove callers.open or", settings=both)


class CommandTests(DoctorTestCase):
    """The command, as from a shell."""

    def run_command(self, *findings: Finding, options: tuple[str, ...] = ()) -> tuple[int, str]:
        """Return the exit status, and what is printed."""
        self.patch(doctor, "examine_system", lambda file, environment: iter(findings))
        result = CliRunner().invoke(main, ["doctor", *options])
        return result.exit_code, result.output

    def test_status(self) -> None:
        """The exit status is that of the worst finding."""
        ok, weaker, broken = (Finding("part", health, "what") for health in Severity)
        for findings, status in (((ok, ok), 0), ((weaker, ok), 1), ((ok, broken, weaker), 2)):
            self.assertEqual(self.run_command(*findings)[0], status)

    def test_output(self) -> None:
        """A line for each finding, and one for its remedy; a list for programs."""
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
