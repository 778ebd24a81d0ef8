"""`daemon.reload`: all files are read before any of them counts; some settings count at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import msgspec
from twisted.internet.testing import MemoryReactor
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, CredentialSettings, ProblemSettings, ServiceSettings
from tawebeval.core.form import LIMIT_UNITS
from tawebeval.daemon.configuration import read_configuration
from tawebeval.daemon.reload import (
    ConfigurationFile,
    ReloadableConfiguration,
    ReloadService,
    find_changed_settings,
    merge_reloadable_settings,
)
from tawebeval.errors import ConfigurationError
from tawebeval.linux.privileges import ReloadableFiles, ReloadableFilesOwner
from tests.cases.roots import make_root
from tests.cases.settings import list_settings, read_setting
from tests.fakes.world import FakeNotifier


@attrs.define
class FakeSource:
    """A file that says something, or is broken."""

    name: str
    says: str = "old"
    broken: str = ""
    notes: Sequence[str] = ()
    path: Path = Path("/etc/file")
    counts: str = "old"

    def list_reloadable_files(self) -> Sequence[ReloadableFiles[Any]]:
        take = partial(setattr, self, "counts")
        return [ReloadableFiles(self.name, (self.path,), self._read, take, lambda _: self.notes)]

    def _read(self) -> str:
        if self.broken:
            raise ConfigurationError(self.broken)
        return self.says


class ReloaderTests(SynchronousTestCase):
    def reload(
        self, *sources: ReloadableFilesOwner | None, copies: str = ""
    ) -> tuple[tuple[list[str], list[str]], list[str]]:
        """Reload; return what has come of it, and what is logged of each level."""
        notifier = FakeNotifier("/notify")
        reloader = ReloadService(sources, copies, notifier, MemoryReactor())
        with capturedLogs() as logged:
            outcome = reloader.reload_files()
        self.assertEqual([one.split("=")[0] for one in notifier.sent], ["RELOADING", "READY"])
        self.levels = [event["log_level"] for event in logged]
        return outcome, [str(formatEvent(event)) for event in logged]

    def test_reloaded_files_are_applied_and_logged_with_their_notes(self) -> None:
        one = FakeSource("one", "new")
        two = FakeSource("two", "new", notes=["listen: has changed"], path=Path("/etc/two"))
        outcome, said = self.reload(one, None, two)
        self.assertEqual(outcome, ([], ["listen: has changed"]))
        self.assertEqual((one.counts, two.counts), ("new", "new"))
        reloaded = ["one: reloaded from /etc/file", "two: reloaded from /etc/two"]
        self.assertEqual(said, [*reloaded, "listen: has changed"])
        self.assertEqual(self.levels, [LogLevel.info, LogLevel.info, LogLevel.warn])

    def test_reload_with_an_error_changes_nothing_and_reports_each_error(self) -> None:
        good = FakeSource("good", "new", notes=["a note"])
        others = [FakeSource(name, "new", f"{name}: line 1") for name in ("bad", "worse")]
        outcome, said = self.reload(good, *others)
        self.assertEqual(outcome, (["bad: line 1", "worse: line 1"], []))
        self.assertEqual([one.counts for one in (good, *others)], ["old", "old", "old"])
        self.assertEqual(
            said,
            [
                "reload refused, nothing is changed: bad: line 1",
                "reload refused, nothing is changed: worse: line 1",
            ],
        )
        self.assertEqual(self.levels, [LogLevel.error] * 2)

    def test_failed_reload_is_reported_to_systemd_at_begin_and_end(self) -> None:
        notifier = FakeNotifier("/notify")
        self.patch(FakeSource, "_read", lambda source: 1 / 0)
        reloader = ReloadService([FakeSource("one")], "", notifier, MemoryReactor())
        self.assertRaises(ZeroDivisionError, reloader.reload_files)
        self.assertEqual([one.split("=")[0] for one in notifier.sent], ["RELOADING", "READY"])

    def test_reload_of_a_credential_copied_by_systemd_advises_a_restart(self) -> None:
        for copies, count in (("/etc", 1), ("/run/credentials/y", 0), ("", 0)):
            outcome, _ = self.reload(FakeSource("callers.tokens"), copies=copies)
            self.assertEqual(len(outcome[1]), count, outcome)
            for note in outcome[1]:
                self.assertTrue(note.startswith("callers.tokens: /etc/file is a copy"), note)
                self.assertIn("restart", note)

    def test_reload_without_files_is_logged(self) -> None:
        self.assertEqual(
            self.reload(None),
            (([], []), ["nothing to reload: the daemon was started without files"]),
        )


class ConfigurationReloadTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.file = Path(self.mktemp()).absolute()
        self.taken: list[Configuration] = []

    def begin(self, text: str) -> None:
        self.file.write_text(text)
        written = read_configuration(self.file)
        file = ConfigurationFile(self.file, (), written)
        configuration_reload = ReloadableConfiguration(
            file, SimpleNamespace(configuration=written), (self.taken.append,)
        )
        self.reloader = ReloadService(
            [configuration_reload], "", FakeNotifier("/notify"), MemoryReactor()
        )

    def refused(self) -> str:
        """Reload in vain, so that nothing has changed; return the problem."""
        outcome = self.reloader.reload_files()
        (problem,) = outcome[0]
        self.assertEqual(self.taken, [])
        return problem

    def test_reload_applies_live_settings_and_names_changes_that_need_a_restart(self) -> None:
        self.begin("")
        self.file.write_text("[log]\nlevel = 'warn'\n[http]\nconnections = 99\nbase_path = '/x'")
        notes = [
            f"http.{name}: changed; takes effect after a restart"
            for name in ("connections", "base_path")
        ]
        for _ in range(2):
            self.assertEqual(self.reloader.reload_files(), ([], notes))
            self.assertEqual(self.taken.pop().log.level, "warn")
        self.file.write_text("")
        self.assertEqual(self.reloader.reload_files(), ([], []))
        self.assertEqual(self.taken.pop(), Configuration())

    def test_reloaded_environment_needs_a_root_directory_and_a_running_sandbox(self) -> None:
        root = make_root(Path(self.mktemp()).absolute())
        table = f"[environments.java]\nroot = '{root}'\n"
        self.begin("")
        self.file.write_text(table + "[environments.none]\nroot = '/srv/none'")
        self.assertEqual(
            self.refused(),
            "environments.none.root: /srv/none is not a directory; make one by `tawebeval"
            " environment import`",
        )
        self.file.write_text(table)
        self.assertEqual(self.reloader.reload_files(), ([], []))
        self.assertEqual(list(self.taken.pop().environments), ["java"])
        self.begin("[sandbox]\nkind = 'none'")
        self.file.write_text(table)
        self.assertIn("restart the daemon", self.refused())

    def test_reloaded_problem_is_checked_against_the_running_settings(self) -> None:
        problem = "[problems.p]\nrepository = 'https://example.org/p.git'\ncommand = 'x'\n"
        problem += f"commit = '{'c' * 40}'\nlimits = {{ cpu = 400 }}\n"
        self.begin("")
        self.file.write_text(f"[limits]\ncpu = 400\n{problem}")
        self.assertEqual(
            self.refused(),
            "problems.p.limits.cpu: 400 s is over the maximum, 300 s (limits.maximum.cpu); the"
            " daemon's settings differ from the file's; restart the daemon",
        )

    def test_file_of_problems_is_reloaded_with_the_configuration(self) -> None:
        file, problems = Path(self.mktemp()).resolve(), Path(self.mktemp()).resolve()
        table = f"repository = 'https://example.org/p.git'\ncommit = '{'a' * 40}'\ncommand = 'x'\n"
        problems.write_text(f"[one]\n{table}")
        file.write_text(f"evaluations.problems = '{problems}'\n[problems.two]\n{table}")
        seen: list[Configuration] = []
        started = read_configuration(file)
        self.assertEqual(set(started.problems), {"one", "two"})
        (reloadable,) = ReloadableConfiguration(
            ConfigurationFile(file, (), started),
            SimpleNamespace(configuration=started),
            (seen.append,),
        ).list_reloadable_files()
        self.assertEqual(reloadable.paths, (file, problems))
        problems.write_text(f"[three]\n{table}")
        reloadable.apply_content(reloadable.read_files())
        self.assertEqual(set(seen[0].problems), {"two", "three"})
        problems.write_text(f"[three]\n{table}x = 1")
        error = self.assertRaises(ConfigurationError, reloadable.read_files)
        self.assertTrue(str(error).startswith(f"{problems}: problems.three.x: unknown"), str(error))


CONFIGURE = Path(__file__).resolve().parents[2] / "docs" / "configure.md"

SETTINGS = tuple(list_settings(Configuration))
BEFORE = Configuration(service=ServiceSettings(name="a"))

# Where not any value of the same type will do.
OTHERS: dict[str, Any] = {
    "repositories.credentials": (CredentialSettings("h", "u", password_file="/p"),),
    "repositories.private_networks": ("10.0.0.0/8",),
    "callbacks.private_networks": ("10.0.0.0/8",),
    "http.base_path": "/judge",
    "http.trusted_proxies": ("10.0.0.1",),
    "evaluations.environment": {"A": "b"},
    "service.peers": {"b": "http://10.0.0.2:8080"},
    "problems": {"p": ProblemSettings("https://example.org/p.git", "./run", commit="c" * 40)},
    **{f"limits.maximum.{name}": 2**40 for name in LIMIT_UNITS},
}


def changed(path: str) -> Configuration:
    """Return a configuration with another value of this setting."""
    before = read_setting(BEFORE, path)
    if isinstance(before, bool):
        other: Any = not before
    elif isinstance(before, int | float):
        other = before + 1
    else:
        other = ("other",) if isinstance(before, tuple) else "other"
    section, _, key = path.rpartition(".")
    change = {key: OTHERS.get(path, other)}
    while section:
        table = msgspec.structs.replace(read_setting(BEFORE, section), **change)
        section, _, key = section.rpartition(".")
        change = {key: table}
    return msgspec.structs.replace(BEFORE, **change)


class LiveReloadTests(SynchronousTestCase):
    def test_each_changed_setting_is_found_and_documented_if_it_takes_effect_at_once(self) -> None:
        taken = set()
        for path in SETTINGS:
            wanted = changed(path)
            self.assertEqual(list(find_changed_settings(BEFORE, wanted)), [path])
            found = merge_reloadable_settings(BEFORE, wanted)
            self.assertIn(found, (BEFORE, wanted))
            if found == wanted:
                taken.add(path)
        head = "settings that take effect at once |\n| --- | --- |\n"
        _, _, below = CONFIGURE.read_text("utf-8").partition(head)
        told = set()
        for row in below.partition("\n\n")[0].splitlines():
            _, sections, settings, _ = row.split("|")
            for section in re.findall(r"`\[(\w+)\]`", sections):
                named = [f"{section}.{key}" for key in re.findall(r"`(\w+)`", settings)]
                told.update([section] if settings.strip() == "all" else named)
        self.assertEqual(taken, told)

    def test_changed_peers_need_a_restart_if_the_daemon_name_changed_too(self) -> None:
        wanted = Configuration(service=ServiceSettings(name="a", peers={"b": "http://10.0.0.2"}))
        self.assertEqual(merge_reloadable_settings(Configuration(), wanted), Configuration())

    def test_reload_applies_live_settings_and_leaves_other_settings_unchanged(self) -> None:
        wanted = msgspec.structs.replace(BEFORE, log=changed("log.level").log, listen=("tcp:1",))
        running = changed("http.connections")
        self.assertEqual(list(find_changed_settings(BEFORE, wanted)), ["listen", "log.level"])
        found = merge_reloadable_settings(running, wanted)
        self.assertEqual(found, msgspec.structs.replace(running, log=wanted.log))
