"""`daemon.doctor`: every part of it, ok, weaker and broken, with a remedy that helps."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

from click.testing import CliRunner
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli import main
from tawebeval.daemon import allowances, doctor, doctor_storage, room
from tawebeval.daemon.findings import Finding, Health
from tawebeval.errors import ConfigurationError
from tawebeval.linux import descriptors, launcher_client, rlimits
from tawebeval.linux.cgroups.controllers import Memory
from tawebeval.linux.cgroups.group import Cgroups, Remedy
from tawebeval.sandbox.probe import Places
from tests.fake_cells import FakeTrees
from tests.fake_process import FakeProcess
from tests.test_signatures import OLD, written

OK, WEAKER, BROKEN = Health
NOFILE = resource.RLIMIT_NOFILE

MISSING = dict.fromkeys(("memory", "processes", "cpu", "weight"), "not here")


class DoctorTestCase(SynchronousTestCase):
    """A machine where all is well, seen by a user who is not root."""

    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp()).resolve()
        self.addCleanup(subprocess.run, ["rm", "-rf", self.folder])
        self.file = self.folder / "tawebeval.toml"
        self.state, self.cache = self.folder / "state", self.folder / "cache"
        self.environment = {
            "STATE_DIRECTORY": str(self.state),
            "CACHE_DIRECTORY": str(self.cache),
        }
        for path in (self.state, self.cache):
            path.mkdir(mode=0o700)
        self.problem: tuple[str, str] | None = None
        self.missing: dict[str, str] = {}
        self.systemd_run = ""
        self.closed: list[str] = []
        self.patch(doctor, "open_cgroups", self.open_cgroups)
        self.patch(doctor, "open_bubblewrap", self.open_bubblewrap)
        self.trees = FakeTrees()
        self.places: list[Places] = []
        self.patch(doctor, "try_with_overlays", self.try_with_overlays)
        self.patch(doctor, "unreadable", lambda: iter(()))
        self.patch(doctor, "check_git", lambda: "git version 2.39.5")
        self.lowered: dict[str, int] = {}
        self.patch(rlimits, "find_lowered", lambda: self.lowered.items())
        self.watches = self.folder / "max_user_watches"
        self.watches.write_text(f"{2**50}\n")
        self.patch(allowances, "WATCHES", self.watches)
        self.free = 2**50
        self.patch(room.shutil, "disk_usage", lambda path: SimpleNamespace(free=self.free))

    def open_cgroups(self, name: str, owner: object) -> Cgroups:
        enforced = {what: (Memory(), None) for what in MISSING if what not in self.missing}
        home = SimpleNamespace(close=lambda: self.closed.append(name))
        remedy = Remedy("a unit", self.systemd_run)
        return Cgroups([home], enforced, self.missing, remedy)  # type: ignore[arg-type, list-item]

    def try_with_overlays(
        self, sandbox: object, privileges: object, places: Places
    ) -> tuple[str, str] | None:
        self.places.append(places)
        return self.problem

    def open_bubblewrap(self, configuration: object, accounts: Path, *_: object) -> object:
        self.accounts = accounts
        self.users = os.listdir(accounts)
        return SimpleNamespace(
            program="/usr/bin/bwrap",
            network=configuration.sandbox.network,  # type: ignore[attr-defined]
            filter=os.open("/dev/null", os.O_RDONLY),
            trees=self.trees,
        )

    def examine(self, settings: str = "", uid: int | None = None) -> list[Finding]:
        """Return all findings."""
        self.file.write_text(settings)
        process = FakeProcess(os.geteuid() or 1000 if uid is None else uid)
        return list(doctor.examine(self.file, self.environment, process, MemoryReactorClock()))

    def check(self, part: str, health: Health, *words: str, settings: str = "") -> Finding:
        """Hold that some part is the only one that is not ok, and what is said of it."""
        found = [each for each in self.examine(settings) if each.health is not OK]
        self.assertEqual([(each.part, each.health) for each in found], [(part, health)], found)
        for word in words:
            self.assertIn(word, f"{found[0].what} -> {found[0].remedy}")
        return found[0]


class ExaminationTests(DoctorTestCase):
    """What runs: the user, the sandbox, limits, git, endpoints."""

    def test_well(self) -> None:
        """Where all is well each part says so, once or more, and nothing is left of the look."""
        found = self.examine()
        self.assertEqual({each.health for each in found}, {OK}, found)
        parts = (
            "configuration user sandbox trees limits git listen callers permissions disk"
            " quotas descriptors processes watches"
        )
        self.assertEqual(set(parts.split()), {each.part for each in found})
        self.assertFalse(self.accounts.exists())
        self.assertGreaterEqual(set(self.users), {"group", "passwd"})
        self.assertEqual(self.closed, [f"doctor-{os.getpid()}"])

    def test_configuration(self) -> None:
        """Where it cannot be read, or has a mistake, nothing else is said."""
        (found,) = self.examine("[limits]\nwall = 1")
        self.assertEqual((found.part, found.health), ("configuration", BROKEN))
        self.assertIn("limits.wall", found.what)
        for path in (self.folder / "missing", self.folder):
            (found,) = doctor.examine(path, {}, FakeProcess(), MemoryReactorClock())
            self.assertEqual(found.health, BROKEN)
            self.assertIn(str(path), found.what)

    def test_nothing_configured(self) -> None:
        """Without a file the defaults are examined."""
        process, reactor = FakeProcess(os.geteuid() or 1000), MemoryReactorClock()
        found = list(doctor.examine(None, self.environment, process, reactor))
        self.assertIn("the defaults", found[0].what)
        self.assertEqual({each.health for each in found}, {OK}, found)

    def test_root(self) -> None:
        """Root without a user to become would not start, and nothing is tried as root."""
        _, found = self.examine(uid=0)
        self.assertEqual((found.part, found.health), ("user", BROKEN))
        self.assertIn("adduser --system", found.remedy)
        self.assertIn("systemd-run", found.remedy)  # the unit has a user already

    def test_another_user(self) -> None:
        """Who is not root cannot become somebody."""
        _, found = self.examine('[service]\nuser = "nobody"', uid=1000)
        self.assertEqual((found.part, found.health), ("user", BROKEN))
        self.assertNotIn("systemd-run", found.remedy)

    def test_python(self) -> None:
        """A Python that the user cannot read is named."""
        self.patch(doctor, "unreadable", lambda: iter([Path("/root/python")]))
        self.check("python", WEAKER, "/root/python", "every user can read")

    def test_no_sandbox(self) -> None:
        """Having none is the operator's choice, and weaker."""
        self.check("sandbox", WEAKER, "leave out", settings='[sandbox]\nkind = "none"')

    def test_nothing_can_be_started(self) -> None:
        """Without one, evaluators are started by a process that has to be there all the same."""
        self.patch(launcher_client, "_PYTHONS", ("/nonexistent/python",))
        found = self.examine('[sandbox]\nkind = "none"')
        (broken,) = (each for each in found if each.part == "sandbox" and each.health is BROKEN)
        self.assertIn("no evaluator can be started: No such file", broken.what)
        self.assertIn("install a python3", broken.remedy)

    def test_overlays(self) -> None:
        """They are tried where they will be, if that is there; what is copied is said, and why."""
        self.examine()
        self.assertEqual(self.places, [Places(self.cache, self.state)])
        self.assertEqual(self.trees.closed, 1)
        self.trees.problem = "no such device"
        self.check("trees", WEAKER, "copied", "(no such device)", "Linux 5.11", "python3")
        for path in (self.state, self.cache):
            path.rmdir()
        self.examine()
        self.assertEqual(self.places[-1], Places())

    def test_sandbox_missing(self) -> None:
        """What the daemon would say, the remedy apart."""

        def missing(*_: object) -> object:
            raise ConfigurationError("there is no bubblewrap; install it")

        self.patch(doctor, "open_bubblewrap", missing)
        found = self.check("sandbox", BROKEN)
        self.assertEqual((found.what, found.remedy), ("there is no bubblewrap", "install it"))

    def test_sandbox_broken(self) -> None:
        """It was tried, and does not work."""
        self.problem = ("no namespaces", "allow them")
        found = self.check("sandbox", BROKEN, "does not work: no namespaces")
        self.assertEqual(found.remedy, "allow them")

    def test_readable(self) -> None:
        """What would be shown, and is the daemon's own, is said as at the start."""
        for path in (self.state, self.file):
            settings = f'[sandbox]\nreadable = ["{path}"]'
            found = self.check(
                "sandbox", BROKEN, "sandbox.readable[0]", str(path), settings=settings
            )
            self.assertEqual(found.remedy, "name no more than they need")

    def test_network(self) -> None:
        """A sandbox with the network protects less."""
        self.check("sandbox", WEAKER, "network", settings="[sandbox]\nnetwork = true")

    def test_loopback(self) -> None:
        """A sandbox with a loopback interface does not bound what TCP takes."""
        self.check("sandbox", WEAKER, "127.0.0.1", settings="[sandbox]\nloopback = true")

    def test_limits(self) -> None:
        """What cgroups do not hold is weaker; the reason and the remedy are told."""
        self.missing = {"memory": "it is read-only"}
        found = self.check("limits", WEAKER, "RLIMIT_DATA", "(it is read-only)")
        self.assertEqual(found.remedy, "a unit")

    def test_systemd_run(self) -> None:
        """A command that would help is told after it was tried."""
        self.missing = {"memory": "it is not delegated"}
        program = self.folder / "systemd-run"
        self.systemd_run = f"{program} --user"
        told = "-p Delegate=yes -p OOMPolicy=continue"
        for script, tells in (
            (f'test "$*" = "--user --quiet --pipe --wait {told} true"', True),
            ("exit 1", False),
        ):
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
            found = self.check("limits", WEAKER, "(it is not delegated)", "a unit")
            command = f"{self.systemd_run} --pty {told} tawebeval serve"
            self.assertEqual(command in found.remedy, tells, found.remedy)
        program.unlink()
        self.assertNotIn("systemd-run", self.check("limits", WEAKER).remedy)

    def test_oom_policy(self) -> None:
        """A unit that systemd would end with the first evaluation that meets its limit."""
        for policy, told in (("continue", False), ("", False), ("stop", True), ("kill", True)):
            self.patch(Cgroups, "oom_policy", lambda _, policy=policy: policy)
            if told:
                self.check("limits", WEAKER, f"OOMPolicy={policy} ends", "-> OOMPolicy=continue")
            else:
                self.assertEqual({each.health for each in self.examine()}, {OK})

    def test_watches(self) -> None:
        """Epoll may watch as much as fits into the memory of evaluators, where that has an end."""
        settings = "[evaluations]\nrunning = 3\n[limits]\nmemory = 18_000_000\n"
        for there, health in ((300_800, OK), (300_799, WEAKER)):
            self.watches.write_text(f"{there}\n")
            found = [each for each in self.examine(settings) if each.part == "watches"]
            self.assertEqual([each.health for each in found], [health])
            self.assertEqual(found[0].what, f"{there} are allowed here, and 300800 may be needed")
        self.assertEqual(found[0].remedy, "sysctl fs.epoll.max_user_watches=300800")
        self.missing = {"memory": "it is read-only"}
        self.assertNotIn("watches", [each.part for each in self.examine(settings)])

    def test_limits_without_a_sandbox(self) -> None:
        """Without both nothing limits processes: the user's are not counted apart."""
        self.missing = MISSING
        for settings, what in (("", "RLIMIT_NPROC"), ('[sandbox]\nkind = "none"', "not limited")):
            found = [each for each in self.examine(settings) if each.part == "limits"]
            self.assertEqual([each.health for each in found], [WEAKER] * 4)
            self.assertIn(what, found[1].what)

    def test_git(self) -> None:
        """A git that is missing or old."""

        def missing() -> str:
            raise ConfigurationError("there is no git; install git 2.37")

        self.patch(doctor, "check_git", missing)
        self.check("git", BROKEN, "no git -> install git 2.37")

    def test_listen(self) -> None:
        """What is no endpoint is named; what systemd opens need not be open here."""
        callers = "[callers]\nopen = true"
        for endpoint in ("nonsense:1", "tcp:no-port", "tcp", "", "ssl:1:privateKey=/nowhere"):
            found = self.examine(f"listen = ['{endpoint}']\n{callers}")
            self.assertEqual([each.health for each in found if each.part == "listen"], [BROKEN])
        self.check("callers", WEAKER, settings=f"listen = ['tcp:80']\n{callers}")

    def test_callers(self) -> None:
        """Who could reach a daemon without tokens."""
        self.check("callers", BROKEN, "-> name a file of tokens", settings="listen = ['tcp:80']")
        systemd = "listen = ['systemd:domain=INET:index=0']"
        self.check("callers", WEAKER, "systemd:domain", "token new", settings=systemd)
        self.check("callers", WEAKER, "callers.open", settings="[callers]\nopen = true")

    def test_proxies(self) -> None:
        """Whose word is taken for the addresses of others."""
        tokens = self.folder / "tokens"
        tokens.write_text(f"alice sha256:{'0' * 64}\n")
        callers = f"[callers]\ntokens = '{tokens}'\n"

        def settings(proxy: str) -> str:
            return f"{callers}[http]\ntrusted_proxies = ['{proxy}']"

        def believed(text: str) -> list[str]:
            found = self.examine(text)
            self.assertEqual({each.health for each in found}, {OK}, found)
            return [each.what for each in found if each.part == "proxies"]

        what = "127.0.0.1 tell by X-Forwarded-For for whom they ask"
        self.assertEqual(believed(settings("127.0.0.1")), [what])
        self.assertEqual(believed(""), [])
        self.check("proxies", WEAKER, "0.0.0.0/0: whoever", settings=settings("0.0.0.0/0"))
        self.check("proxies", WEAKER, "listens on no UNIX", settings=settings("unix"))
        for endpoint in ("unix:/run/x", "systemd:domain=UNIX:index=0"):
            listen = f"listen = ['{endpoint}']\n"
            self.assertIn("unix tell", believed(listen + settings("unix"))[0])
        callers = ""
        self.check("proxies", WEAKER, "no tokens", settings=settings("127.0.0.1"))

    def test_descriptors(self) -> None:
        """More connections than descriptors."""
        self.patch(descriptors, "allowed", lambda: 4096)
        self.check("descriptors", WEAKER, "LimitNOFILE=", settings="[http]\nconnections = 4000")
        self.patch(descriptors, "allowed", lambda: 2**31 - 1)
        self.assertEqual({each.health for each in self.examine()}, {OK})

        self.patch(descriptors, "allowed", lambda: 100)
        self.check("descriptors", BROKEN, "100 are allowed here", "LimitNOFILE=")

    def test_processes(self) -> None:
        """More processes for all evaluators than there may be."""
        settings = "[evaluations]\nrunning = 4\n[limits]\nprocesses = 100\n"
        self.patch(rlimits, "processes_allowed", lambda: 400)
        said = ("400 are allowed here", "528 may be needed", "TasksMax=", "evaluations.running")
        self.check("processes", WEAKER, *said, settings=settings)
        self.patch(rlimits, "processes_allowed", lambda: None)
        (found,) = (each for each in self.examine(settings) if each.part == "processes")
        self.assertEqual((found.health, found.what[:10]), (OK, "any number"))

    def test_hard_limits(self) -> None:
        """A limit that the kernel would not set."""
        settings = "[limits]\nopen_files = 5000\n"
        self.patch(descriptors, "allowed", lambda: 2**31 - 1)
        self.patch(resource, "getrlimit", lambda which: (0, 4999 if which == NOFILE else -1))
        self.check("limits", BROKEN, "limits.open_files", "LimitNOFILE=", settings=settings)

    def test_lowered_hard_limits(self) -> None:
        """A limit that evaluators could not make unlimited for what they start."""
        self.lowered = {"CORE": 0}
        self.check("limits", WEAKER, "RLIMIT_CORE", "is 0", "LimitCORE=infinity")

    def test_what_cannot_be_looked_at(self) -> None:
        """An error of the system is a finding, and the other parts are looked at."""

        def refuse(*_: object) -> object:
            raise OSError(errno.ENOSPC, "No space left on device")

        self.patch(doctor, "open_cgroups", refuse)
        self.check("sandbox", BROKEN, "No space left")


class PremisesTests(DoctorTestCase):
    """What lies on the disk."""

    def write(self, name: str, content: str, mode: int = 0o600) -> Path:
        """Make a file with a mode."""
        path = self.folder / name
        path.write_text(content)
        path.chmod(mode)
        return path

    def cure(self, finding: Finding) -> None:
        """Do as the remedy says, which then helps."""
        subprocess.run(finding.remedy.removeprefix("as root: "), shell=True, check=True)
        self.assertEqual({each.health for each in self.examine(self.file.read_text())}, {OK})

    def test_tokens(self) -> None:
        """A file of tokens can be read, and nobody else adds one."""
        tokens = self.folder / "tokens"
        settings = f"listen = ['tcp:80']\n[callers]\ntokens = '{tokens}'\n"
        self.check("tokens", BROKEN, str(tokens), settings=settings)
        self.write("tokens", "nonsense")
        self.check("tokens", BROKEN, str(tokens), settings=settings)
        self.write("tokens", f"alice sha256:{'0' * 64}\n", 0o666)
        self.cure(self.check("tokens", BROKEN, "others may write", settings=settings))
        both = settings + "open = true"
        self.check("callers", BROKEN, "one of them is a mistake", settings=both)

    def test_tokens_of_metrics(self) -> None:
        """Where the metrics go by tokens these are looked at alike."""
        settings = "[metrics]\nreaders = 'tokens'\n"
        self.check("metrics", BROKEN, "metrics.readers", settings=settings)
        tokens = self.write("readers", f"prometheus sha256:{'0' * 64}\n")
        tokens.chmod(0o666)
        self.check("metrics", BROKEN, "others may", settings=f"{settings}tokens = '{tokens}'\n")

    def test_tokens_only_for_root(self) -> None:
        """What the daemon's user cannot read it cannot read again."""
        tokens = self.write("tokens", f"alice sha256:{'0' * 64}\n")
        self.forbid(tokens)
        self.check("tokens", WEAKER, "SIGHUP", settings=f"[callers]\ntokens = '{tokens}'\n")

    def forbid(self, path: Path) -> None:
        """Let the daemon's user have no right to a file."""
        access = os.access

        def may(asked: Path, mode: int, **more: bool) -> bool:
            return asked != path and access(asked, mode, **more)

        self.patch(doctor_storage.os, "access", may)

    def test_credentials(self) -> None:
        """Secrets are there, and nobody else's."""
        secret = self.folder / "secret"
        settings = (
            "[[repositories.credentials]]\nhost = 'h'\nusername = 'u'\n"
            f"password_file = '{secret}'\n"
        )
        self.check("credentials", BROKEN, str(secret), settings=settings)
        self.write("secret", "xyzzy\n", 0o644)
        finding = self.check("credentials", BROKEN, "every user", settings=settings)
        self.assertNotIn("xyzzy", str(finding))
        self.cure(finding)
        self.forbid(secret)
        self.check("credentials", WEAKER, "SIGHUP", "chown", settings=settings)

    def test_secrets_of_callbacks(self) -> None:
        """They are there, nobody else's, and the daemon's user can read them again."""
        secrets = self.folder / "callbacks"
        settings = f"[callbacks]\nenabled = true\nsecrets = '{secrets}'\n"
        self.check("callbacks", BROKEN, str(secrets), settings=settings)
        self.write("callbacks", "* s3cret\n")
        finding = self.check("callbacks", BROKEN, "line 1", settings=settings)
        self.assertNotIn("s3cret", str(finding))
        self.write("callbacks", f"* {written(OLD)}\n", 0o604)
        self.cure(self.check("callbacks", BROKEN, "every user", settings=settings))
        self.forbid(secrets)
        self.check("callbacks", WEAKER, "SIGHUP", "chown", settings=settings)
        self.check("callbacks", BROKEN, "LoadCredential", settings="callbacks.enabled = true")

    def test_key_for_ssh(self) -> None:
        """A key is read by ssh, as the daemon's user."""
        key, hosts = self.write("ssh", "key"), self.write("hosts", "h ssh-ed25519 AAAA", 0o644)
        self.forbid(key)
        settings = (
            "[[repositories.credentials]]\nhost = 'h'\nusername = 'u'\n"
            f"key_file = '{key}'\nknown_hosts_file = '{hosts}'\n"
        )
        self.check("credentials", BROKEN, "ssh can use it", settings=settings)

    def test_configuration_for_others(self) -> None:
        """Who writes the configuration decides what runs."""
        self.file.touch()
        self.file.chmod(0o666)
        self.cure(self.check("permissions", BROKEN, str(self.file)))

    def test_directories_for_others(self) -> None:
        """Nobody else may write into the directories."""
        self.cache.chmod(0o777)
        self.cure(self.check("permissions", BROKEN, str(self.cache)))

    def test_key(self) -> None:
        """The key is secret, and whole."""
        self.write("state/key", "x" * 32, 0o644)
        self.cure(self.check("permissions", BROKEN, "make identifiers"))
        self.write("state/key", "x")
        self.check("permissions", BROKEN, "1 bytes", "remove it")

    def test_owner(self) -> None:
        """What is not the daemon's user's is refused, and the remedy names nothing around it."""
        if os.geteuid() == 0:
            os.chown(self.cache, 65534, 65534)
        else:
            self.environment["CACHE_DIRECTORY"] = "/usr"
        finding = self.check("permissions", BROKEN, "belongs to")
        self.assertIn("chown -R --no-dereference", finding.remedy)
        self.assertEqual(finding.remedy.split()[-1], self.environment["CACHE_DIRECTORY"])

    def test_read_only(self) -> None:
        """A file system that cannot be written to is said, also of what is not there yet."""
        read_only = set[Path]()
        statvfs = os.statvfs

        def looked(path: Path) -> os.statvfs_result:
            *numbers, flags, longest = statvfs(path)
            flags = flags | os.ST_RDONLY if path in read_only else flags & ~os.ST_RDONLY
            return os.statvfs_result((*numbers, flags, longest))

        self.patch(doctor_storage.os, "statvfs", looked)
        for path in (self.state, self.cache):
            read_only.clear()
            read_only.add(path)
            self.check("permissions", BROKEN, f"{path}: its file", "read-only", "mount it")
        for path in (self.state, self.cache):
            path.rmdir()
        read_only.clear()
        read_only.add(self.folder)
        found = self.examine()
        broken = [each.what for each in found if each.health is BROKEN]
        self.assertEqual(len(broken), 2)
        for what, path in zip(broken, (self.state, self.cache), strict=True):
            self.assertTrue(what.startswith(f"{path}: its file system"), what)

    def test_not_written(self) -> None:
        """A file system that takes nothing is found out although nothing else shows it."""
        failing: dict[Path, int] = {}

        def write(path: Path) -> None:
            if path in failing:
                raise OSError(failing[path], os.strerror(failing[path]))

        self.patch(doctor_storage, "write_and_read", write)
        for path in (self.state, self.cache):
            for number, remedy in ((errno.EROFS, "mount it"), (errno.ENOSPC, "make room")):
                failing.clear()
                failing[path] = number
                said = f"{path}: cannot be written to: {os.strerror(number)}"
                self.check("permissions", BROKEN, said, remedy)

    def test_closed(self) -> None:
        """What is the daemon's user's, and closed to it all the same, is said with its path."""
        names = ("accounts", "uploads", "evaluations", "lock")
        for path in (self.state / name for name in names[:3]):
            path.mkdir()
        self.write("state/lock", "")
        self.write("state/key", "x" * 32)
        access = os.access
        for path in (self.state, self.cache, *(self.state / name for name in names)):
            self.forbid(path)
            right = "u+w" if path.name == "lock" else "u+rwx"
            self.check("permissions", BROKEN, f"{path}: ", f"chmod {right} {path}")
            self.patch(doctor_storage.os, "access", access)
        asked: list[int] = []

        def may(path: Path, mode: int, **more: bool) -> bool:
            asked.extend([mode] if path.name == "key" else [])
            return access(path, mode, **more)

        self.patch(doctor_storage.os, "access", may)
        self.assertEqual({each.health for each in self.examine()}, {OK})
        self.assertEqual(asked, [os.R_OK], "the key is only read")

    def test_missing(self) -> None:
        """Directories that are not there are made by the daemon, if it can."""
        self.cache.rmdir()
        self.environment["STATE_DIRECTORY"] = str(self.folder / "one" / "two")
        self.assertEqual({each.health for each in self.examine()}, {OK})
        self.forbid(self.folder)
        self.state.joinpath("key").touch()
        self.environment["STATE_DIRECTORY"] = str(self.state)
        self.state.joinpath("key").unlink()
        self.cure(self.check("permissions", BROKEN, "cannot make it"))

    def test_odd_places(self) -> None:
        """A file in the way of a directory is no reason for a traceback."""
        self.environment["STATE_DIRECTORY"] = str(self.file / "state")
        found = [each for each in self.examine() if each.health is not OK]
        self.assertEqual([(each.part, each.health) for each in found], [("permissions", BROKEN)])

    def test_room(self) -> None:
        """Two directories of one file system, which is smaller than what may be written to it."""
        self.free = 0
        self.check("disk", WEAKER, f"{self.state} and {self.cache}", "repositories.cache")

    def test_quotas(self) -> None:
        """Quota directories without a quota stop the start, and the doctor says so."""
        for number in range(os.cpu_count() or 1):
            (self.state / "quotas" / str(number)).mkdir(parents=True)
        self.check("quotas", BROKEN, f"{self.state}/quotas/0: ", "enforces no quota", "prjquota")
        self.patch(doctor_storage, "check_quotas", lambda directories, configuration: None)
        found = [each.what for each in self.examine() if each.part == "quotas"]
        self.assertRegex(
            found[0], rf"^{self.state}/quotas: \d+ evaluations, each held to \d+ bytes$"
        )


class CommandTests(DoctorTestCase):
    """The command, as from a shell."""

    def run_command(self, *findings: Finding, options: tuple[str, ...] = ()) -> tuple[int, str]:
        """Return the exit status, and what is printed."""
        self.patch(doctor, "examine", lambda file, environment: iter(findings))
        result = CliRunner().invoke(main, ["doctor", *options])
        return result.exit_code, result.output

    def test_status(self) -> None:
        """The exit status is that of the worst finding."""
        ok, weaker, broken = (Finding("part", health, "what") for health in Health)
        self.assertEqual(self.run_command(ok, ok)[0], 0)
        self.assertEqual(self.run_command(weaker, ok)[0], 1)
        self.assertEqual(self.run_command(ok, broken, weaker)[0], 2)

    def test_lines(self) -> None:
        """A line for each finding, and one for its remedy."""
        _, said = self.run_command(Finding("disk", WEAKER, "small", "a larger one"))
        first, second = said.splitlines()
        self.assertEqual(first.split(), ["weaker", "disk", "small"])
        self.assertEqual(second.split(), ["->", "a", "larger", "one"])
        self.assertEqual(first.index("small"), second.index("->"))

    def test_json(self) -> None:
        """The same for programs."""
        status, said = self.run_command(
            Finding("disk", WEAKER, "small", "a larger one"), options=("--json",)
        )
        self.assertEqual(status, 1)
        self.assertEqual(
            json.loads(said),
            [{"part": "disk", "health": "weaker", "what": "small", "remedy": "a larger one"}],
        )
