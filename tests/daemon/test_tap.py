"""`daemon.tap`: the command `twistd tawebeval`, its options and its messages."""

from __future__ import annotations

import atexit
import gc
import os
import resource
from pathlib import Path
from typing import Any

from twisted.application.service import IService, IServiceMaker
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import capturedLogs, formatEvent
from twisted.plugin import IPlugin
from twisted.python.usage import UsageError
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from tawebeval.daemon import assembly, tap
from tawebeval.daemon.reload import ReloadService
from tawebeval.daemon.tap import Options, makeService
from tawebeval.linux import daemon_limits
from tawebeval.linux.privileges import check_user_and_locale
from tests.cases.databases import close_databases_at_end
from tests.cases.own_python import printed_by
from tests.fakes.sandbox import NO_CGROUPS


class OptionsTests(SynchronousTestCase):
    def test_unknown_options_and_arguments_are_refused(self) -> None:
        for argument in ("--port", "word", "--listen"):
            self.assertRaises(UsageError, Options().parseOptions, [argument])


class MakeServiceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.patch(tap, "check_user_and_locale", lambda: None)
        self.patch(assembly, "drop_capabilities", lambda: None)
        self.reactor = MemoryReactorClock()
        environment = {"STATE_DIRECTORY": f"{self.root}/s", "CACHE_DIRECTORY": f"{self.root}/c"}
        self.patch(os, "environ", environment)

    def make(self, *arguments: str) -> Any:
        options = Options()
        options.parseOptions(arguments)
        return makeService(options, self.reactor, lambda label: NO_CGROUPS)

    def fail_to_make(self, *arguments: str) -> str:
        error = self.assertRaises(SystemExit, self.make, *arguments)
        message = error.code
        assert isinstance(message, str)
        self.assertTrue(message.startswith("tawebeval: "), message)
        return message

    def test_service_listens_at_127_0_0_1_port_8080_and_keeps_freed_memory(self) -> None:
        told: list[bool] = []
        self.patch(tap, "keep_freed_memory", lambda: told.append(True))
        service = self.make()
        self.assertTrue(IService.providedBy(service))
        service.privilegedStartService()
        self.assertEqual([server[0] for server in self.reactor.tcpServers], [8080])
        self.assertEqual(self.reactor.tcpServers[0][3], "127.0.0.1")
        self.assertEqual(told, [True])

    def test_endpoints_of_the_command_line_replace_those_of_the_file(self) -> None:
        path = self.mktemp()
        Path(path).write_text('listen = ["tcp:1111"]\n[callers]\nopen = true')
        service = self.make("-c", path, "-l", "tcp:2222", "--listen", "tcp:3333")
        service.privilegedStartService()
        self.assertEqual([server[0] for server in self.reactor.tcpServers], [2222, 3333])

    def test_reload_reads_the_file_of_the_start_from_any_directory(self) -> None:
        path = Path(self.mktemp())
        path.write_text("[polls]\nwait = 7")
        (reloader,) = (one for one in self.make("-c", str(path)) if isinstance(one, ReloadService))
        self.addCleanup(os.chdir, Path.cwd())
        path.write_text("[polls]\nwait = -1")
        absolute = path.absolute()
        os.chdir("/")
        (problem,) = reloader.reload_files()[0]
        self.assertTrue(problem.startswith(f"{absolute}: polls.wait: "), problem)

    def test_cgroups_are_removed_after_a_failed_start(self) -> None:
        registered: list[Any] = []
        self.patch(atexit, "register", lambda *call: registered.append(call))
        self.fail_to_make("-l", "nonsense:1")
        self.assertIn((NO_CGROUPS.remove_all_cgroups,), registered)

    def test_invalid_configuration_file_or_endpoint_is_named_in_the_message(self) -> None:
        self.root.mkdir()
        close_databases = close_databases_at_end(self)
        broken = self.mktemp()
        Path(broken).write_text("[limits]\ndisk_files = 0")
        for arguments, words in (
            (("-c", broken), (broken, "limits.disk_files")),
            (("-c", "/nonexistent"), ("/nonexistent",)),
            (("-l", "nonsense:1"), ("nonsense:1",)),
            (("-l", "tcp:port"), ("tcp:port",)),
            (("-l", ""), ("listen",)),
        ):
            message = self.fail_to_make(*arguments)
            for word in words:
                self.assertIn(word, message)
            gc.collect()  # what did not start lets go of its directories
            close_databases()

    def test_hard_limit_below_limits_file_size_is_refused(self) -> None:
        self.root.mkdir()
        self.patch(
            daemon_limits,
            "get_hard_limit",
            lambda number, _pid=0: 10 if number == resource.RLIMIT_FSIZE else None,
        )
        self.assertIn("tawebeval: limits.file_size: ", self.fail_to_make())

    def test_too_few_processes_are_warned_of(self) -> None:
        self.patch(daemon_limits, "count_allowed_processes", lambda: 10)
        with capturedLogs() as events:
            self.make()
        said = [str(formatEvent(event)) for event in events]
        self.assertTrue(any("processes: 10 allowed" in one for one in said), said)

    def test_readable_private_path_is_refused_before_directories_are_made(self) -> None:
        path = Path(self.mktemp()).absolute()
        for shown in (self.root, path):
            path.write_text(f'[sandbox]\nreadable = ["{shown}"]')
            start = f"tawebeval: sandbox.readable[0]: {shown} would show evaluators "
            self.assertIn(start, self.fail_to_make("-c", str(path)))
        self.assertFalse(self.root.exists())

    def test_root_user_is_refused_before_directories_are_made(self) -> None:
        self.patch(tap, "check_user_and_locale", check_user_and_locale)
        self.patch(os, "getresuid", lambda: (0, 1000, 1000))
        self.assertIn("as root: tawebeval serve --user NAME", self.fail_to_make())
        self.assertFalse(self.root.exists())


WITHOUT_WATCHES = """
import errno, select
from tawebeval.daemon.process import install_poll_reactor_if_needed

class FullEpoll:
    def __enter__(self):
        return self
    def __exit__(self, *error):
        pass
    def register(self, descriptor, events=0):
        raise OSError(errno.ENOSPC, "no watch")

if {is_full}:
    select.epoll = FullEpoll
install_poll_reactor_if_needed()
from twisted.internet import reactor
print(type(reactor).__name__)
"""
CLOCK = """
import sys, time
from twisted.plugins.tawebeval_plugin import tawebeval
tawebeval.options
assert "twisted.internet.reactor" not in sys.modules
from tawebeval.daemon import tap

def end():
    from twisted.internet import reactor
    print(abs(reactor.seconds() - time.monotonic()))
    raise SystemExit

tap.check_user_and_locale = end
tap.makeService(None)
"""


class ReactorTests(SynchronousTestCase):
    def test_poll_reactor_is_used_if_no_epoll_watch_is_free(self) -> None:
        for is_full, name in ((True, "PollReactor"), (False, "EPollReactor")):
            self.assertEqual(printed_by(WITHOUT_WATCHES.format(is_full=is_full)).strip(), name)

    def test_service_and_not_its_plugin_installs_a_reactor_with_the_monotonic_clock(self) -> None:
        self.assertLess(float(printed_by(CLOCK)), 60)


class PluginTests(SynchronousTestCase):
    def test_twistd_plugin_has_the_name_and_the_module_of_the_daemon(self) -> None:
        from twisted.plugins import tawebeval_plugin

        maker = tawebeval_plugin.tawebeval
        verifyObject(IServiceMaker, maker)
        self.assertTrue(IPlugin.providedBy(maker))
        self.assertEqual((maker.tapname, maker.module), ("tawebeval", "tawebeval.daemon.tap"))
        self.assertIs(maker.options, Options)
