"""`daemon.assembly`: the daemon put together, on a reactor in memory."""

from __future__ import annotations

import atexit
import os
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.application.internet import TimerService
from twisted.internet.defer import Deferred
from twisted.internet.error import CannotListenError
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import (
    ArchiveSettings,
    CallerSettings,
    Configuration,
    CredentialSettings,
    EvaluationSettings,
    HttpSettings,
    LimitSettings,
    RepositoryFetchSettings,
    RunnerSettings,
    ServiceSettings,
)
from tawebeval.core.tokens import generate_token
from tawebeval.daemon import assembly
from tawebeval.daemon import assembly as module
from tawebeval.daemon.assembly import Daemon, EvaluationService, build_daemon, make_periodic_timer
from tawebeval.daemon.configuration import read_configuration
from tawebeval.daemon.logging import LogWriter, format_text
from tawebeval.daemon.reload import ConfigurationFile, ReloadService, compute_stop_timeout
from tawebeval.daemon.startup import DaemonDirectories, open_directories
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import ConfigurationError, EvaluationFailure
from tawebeval.evaluations.service import EvaluationRegistry
from tawebeval.sandbox.bubblewrap import TrustedCommandSandbox
from tawebeval.slurm.job import SlurmSandbox
from tawebeval.web.routes import WebContext
from tawebeval.web.server.channel import ApiSite
from tests.cases.databases import close_databases_at_end
from tests.cases.secrets import OLD, format_secret
from tests.fakes.clients import Answer, Connection
from tests.fakes.sandbox import NO_CGROUPS
from tests.fakes.world import FakeNotifier, InlineThreads, straw


class ServiceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.dropped = 0
        self.patch(assembly, "drop_capabilities", self.drop_capabilities)
        root = Path(self.mktemp()).resolve()
        environment = {"STATE_DIRECTORY": f"{root}/s", "CACHE_DIRECTORY": f"{root}/c"}
        self.directories: DaemonDirectories = open_directories(environment, straw())
        for lock in self.directories.directory_locks:
            self.addCleanup(lock.close)
        self.reactor: Any = MemoryReactorClock()
        # That is for names, which strangers' servers answer when they like.
        self.reactor.getThreadPool = self.fail  # type: ignore[attr-defined]
        # Nor do ours have a reactor that runs, to come back to.
        self.patch(WorkerThreads, "run_in_thread", InlineThreads.run_in_thread)
        self.close_databases = close_databases_at_end(self)

    def drop_capabilities(self) -> None:
        """Count, for the tests' own process keeps its rights."""
        self.dropped += 1

    def file_with(self, text: str) -> Path:
        # Not below the checkout: a `password_file` has no space in its path.
        descriptor, path = tempfile.mkstemp()
        self.addCleanup(Path(path).unlink, missing_ok=True)
        with open(descriptor, "w") as file:
            file.write(text)
        return Path(path)

    def write_token(self, name: str = "alice") -> str:
        """Create a file with a token of a caller; return its path."""
        return str(self.file_with(generate_token(name, straw())[1]))

    def make(
        self,
        log_writer: LogWriter | None = None,
        file: ConfigurationFile | None = None,
        **settings: Any,
    ) -> Daemon:
        self.close_databases()
        daemon = build_daemon(
            file.initial_configuration if file else Configuration(**settings),
            self.directories,
            self.reactor,
            NO_CGROUPS,
            file,
            log_writer,
        )
        self.addCleanup(self.evaluations(daemon).context.sandbox.workspace_launcher.close)
        return daemon

    def start(self, **settings: Any) -> Daemon:
        daemon = self.make(**settings)
        daemon.privilegedStartService()
        daemon.startService()
        self.addCleanup(lambda: daemon.stopService() if daemon.running else None)
        return daemon

    def fail_to_make(self, **settings: Any) -> str:
        return str(self.assertRaises(ConfigurationError, self.make, **settings))

    def fail_to_start(self, daemon: Daemon) -> str:
        error = self.assertRaises(SystemExit, daemon.startService)
        return str(error.code)

    def request(self, line: str, token: str = "") -> Answer:
        """Return the answer to a request on a connection of its own."""
        connection = Connection(self.site())
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request(line, **headers)
        return connection.answer()

    def note_calls_from_thread(self) -> list[Callable[[], None]]:
        """Note what signals ask the reactor to call from now on."""
        calls: list[Callable[[], None]] = []
        self.reactor.callFromThread = calls.append
        return calls

    def evaluations(self, daemon: Daemon) -> EvaluationService:
        evaluations = daemon.getServiceNamed("evaluations")
        assert isinstance(evaluations, EvaluationService)
        return evaluations

    def site(self) -> ApiSite:
        site: ApiSite = self.reactor.tcpServers[0][1]
        return site

    def context(self) -> WebContext:
        application: Any = self.site().application
        context: WebContext = application.context
        return context

    def note_calls(self, name: str) -> list[tuple[Any, ...]]:
        """Note the arguments of each call of a class or function by `assembly` from now on."""
        calls: list[tuple[Any, ...]] = []
        original = getattr(module, name)

        def note(*arguments: Any, **options: Any) -> Any:
            calls.append((*arguments, *options.values()))
            return original(*arguments, **options)

        self.patch(module, name, note)
        return calls

    def test_endpoints_share_a_site_and_are_opened_once_at_the_start(self) -> None:
        listen = ("tcp:1", "tcp:2:interface=127.0.0.1", "unix:/x", "tcp:1")
        daemon = self.make(listen=listen, callers=CallerSettings(open=True))
        self.assertEqual((self.reactor.tcpServers, self.reactor.unixServers), ([], []))
        daemon.privilegedStartService()
        self.assertEqual([server[0] for server in self.reactor.tcpServers], [1, 2])
        self.assertEqual([server[0] for server in self.reactor.unixServers], ["/x"])
        sites = [server[1] for server in (*self.reactor.tcpServers, *self.reactor.unixServers)]
        self.assertEqual(len(set(map(id, sites))), 1)

    def test_log_has_the_urls_of_each_endpoint(self) -> None:
        with capturedLogs() as events:
            self.start(
                listen=("tcp:1", "tcp:2:interface=127.0.0.1", "unix:/x"),
                callers=CallerSettings(open=True),
                http=HttpSettings(base_path="/judge"),
            )
        lines = [formatEvent(event) for event in events]
        self.assertEqual(
            [line for line in lines if line.startswith("ready: ")],
            [
                f"ready: {url}/judge/ (page), API at {url}/judge/evaluate"
                for url in ("http://localhost:1", "http://localhost:2", "http://unix:/x:")
            ],
        )

    def test_each_kind_of_blocking_work_has_its_thread_pool_from_start_to_stop(self) -> None:
        made: list[tuple[int, str]] = []
        done: list[str] = []

        def own(reactor: object, most: int, name: str, **options: bool) -> Any:
            self.assertIs(reactor, self.reactor)
            made.append((most, name))
            start, stop = (partial(done.append, f"{what} {name}") for what in ("start", "stop"))
            return SimpleNamespace(
                name=name, start=start, stop=stop, run_in_thread=InlineThreads().run_in_thread
            )

        self.patch(WorkerThreads, "create", own)
        monitors = self.note_calls("LimitMonitor")
        daemon = self.make()
        expected = [(20, "work"), (1, "watch"), (2, "count"), (8, "upload"), (4, "check")]
        expected += [(12, "servers"), (8, "receivers"), (2, "peers"), (1, "store")]
        self.assertEqual((sorted(made), done), (sorted(expected), []))
        evaluations = self.evaluations(daemon)
        threads = evaluations.context.worker_threads
        self.assertEqual(threads.name, "work")  # type: ignore[attr-defined]
        ((_, *watching),) = monitors
        self.assertEqual([pool.name for pool in watching], ["watch", "count"])
        daemon.privilegedStartService()
        daemon.startService()
        self.assertEqual(self.context().form_receiver_factory._threads.name, "upload")  # type: ignore[attr-defined]
        self.assertEqual(sorted(done), sorted(f"start {name}" for _, name in expected))
        self.successResultOf(daemon.stopService())
        stops = sorted(f"stop {name}" for _, name in expected)
        self.assertEqual(sorted(done[len(expected) :]), stops)

    def test_start_removes_unfinished_repositories_and_uploads(self) -> None:
        stray = self.directories.repositories / "half.new"
        form = self.directories.uploads / "form"
        for left in (stray, form):
            left.mkdir()
        self.start()
        self.assertFalse(form.exists())
        self.assertFalse(stray.exists())

    def test_timers_make_all_periodic_calls(self) -> None:
        made = self.note_calls("make_periodic_timer")
        for archive in (False, True):
            made.clear()
            daemon = self.make(archive=ArchiveSettings(enabled=archive))
            names = "expire_evaluations retry_next_calls check_disks sync_if_due"
            expected = [(names.split(), ()), (["start_probe_if_needed"], (10,))]
            expected += [(["start_excess_removal"], (60,))] if archive else []
            found = [([call.__name__ for call in calls], rest) for calls, _, *rest in made]
            self.assertEqual([(calls, tuple(rest)) for calls, rest in found], expected)
            self.assertEqual({reactor for _, reactor, *_ in made}, {self.reactor})
            self.assertEqual(sum(isinstance(one, TimerService) for one in daemon), len(made))

    def test_sandbox_probe_uses_this_machine_even_if_evaluations_run_on_a_cluster(self) -> None:
        made = self.note_calls("SandboxProbe")
        shared = str(self.directories.state_directory)
        daemon = self.make(runner=RunnerSettings(kind="slurm", shared=shared))
        self.assertIsInstance(self.evaluations(daemon).context.sandbox, SlurmSandbox)
        (probed, *_) = made[0][1].args
        self.assertNotIsInstance(probed, SlurmSandbox)

    def test_drain_gets_its_configured_time_and_a_signal_ends_the_drain_at_once(self) -> None:
        calls = self.note_calls_from_thread()
        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.signal(number, lambda *_: None)
            self.addCleanup(signal.signal, number, before)
        told: list[float] = []
        self.patch(EvaluationRegistry, "end_drain_early", lambda registry: told.append(0))
        daemon = self.start(service=ServiceSettings(drain=7))
        for hook, arguments, options in self.reactor.whenRunningHooks:
            hook(*arguments, **options)
        evaluations = self.evaluations(daemon)
        registry = evaluations.registry
        closing: Deferred[None] = Deferred()

        async def close(drain: float, end: float) -> bool:
            told.extend((drain, end))
            await closing
            return False

        self.patch(registry, "drain_and_close", close)
        idle = Connection(self.site())
        signal.raise_signal(signal.SIGTERM)
        self.assertEqual(calls, [])
        stopped = daemon.stopService()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        self.assertEqual(told, [7, 5])
        self.reactor.advance(1)
        self.assertTrue(idle.closed, "who asks nothing learns of the end at its beginning")
        idle.lose()
        for call in calls:
            call()
        self.assertEqual(told, [7, 5, 0, 0])
        closing.callback(None)
        self.successResultOf(stopped)
        self.assertEqual(told, [7, 5, 0, 0], "it is closed once")

    def test_stop_closes_ports_first_and_waits_for_connections(self) -> None:
        closed: list[Any] = []
        listen_tcp = self.reactor.listenTCP

        def listen(*args: Any, **kwargs: Any) -> Any:
            port = listen_tcp(*args, **kwargs)
            port.stopListening = lambda: closed.append(port)
            return port

        self.reactor.listenTCP = listen
        daemon = self.start()
        connection = Connection(self.site())
        connection.send(b"GET /health HTTP/1.1\r\n")
        connections = [connection, Connection(self.site())]
        drain = connection.channel.drain_connection

        def check_and_drain() -> None:
            self.assertEqual(len(closed), 1)
            drain()

        self.patch(connection.channel, "drain_connection", check_and_drain)
        stopped = daemon.stopService()
        self.assertEqual(connection.answer().status, 503)
        startup = daemon.getServiceNamed("startup")
        for one in connections:
            self.assertNoResult(stopped)
            self.assertTrue(startup.running)
            one.lose()
        self.successResultOf(stopped)
        self.assertFalse(startup.running)

    def test_ports_are_closed_before_evaluations_are_handed_over(self) -> None:
        daemon = self.start()
        evaluations = self.evaluations(daemon)
        self.patch(type(evaluations), "evaluations_outlast_daemon", True)
        listening: list[int] = []
        self.patch(
            evaluations.registry,
            "hand_all_to_next_daemon",
            lambda: listening.append(len(daemon._list_listeners())),
        )
        self.successResultOf(daemon.stopService())
        self.assertEqual(listening, [0])

    def test_log_thread_starts_with_the_service_and_stops_after_the_shutdown(self) -> None:
        writer = LogWriter(StringIO(), format_text, "info")
        done: list[object] = []
        self.patch(writer.line_writer, "start", lambda: done.append("start"))
        self.patch(atexit, "register", lambda *call: done.append(call))
        daemon = self.make(log_writer=writer)
        daemon.privilegedStartService()
        self.assertNotIn("start", done)
        done.clear()
        daemon.startService()
        self.assertEqual(done, ["start", (writer.line_writer.stop, 2)])
        (last,) = self.reactor.triggers["after"]["shutdown"]
        self.assertEqual(last, (writer.line_writer.stop, (2,), {}))
        writer.line_writer.lost_lines = 3
        self.assertIn(b"tawebeval_log_events_lost_total 3.0", self.request("GET /metrics").body)

    def test_start_fails_with_a_remedy_if_the_log_thread_cannot_start(self) -> None:
        writer = LogWriter(StringIO(), format_text, "info")

        def fail() -> None:
            raise RuntimeError("can't start new thread")

        self.patch(writer.line_writer, "start", fail)
        daemon = self.make(log_writer=writer)
        daemon.privilegedStartService()
        words = "tawebeval: threads: can't start new thread; raise TasksMax="
        self.assertIn(words, self.fail_to_start(daemon))

    def test_registry_cache_git_runner_and_resolvers_get_their_settings(self) -> None:
        registries, caches = (
            self.note_calls("EvaluationRegistry"),
            self.note_calls("RepositoryCache"),
        )
        issuers, runners = self.note_calls("IdentifierIssuer"), self.note_calls("GitRunner")
        resolvers = self.note_calls("SystemResolver")
        daemon = self.make(
            callers=CallerSettings(running=2, queued=7),
            evaluations=EvaluationSettings(running=3, queued=9),
            repositories=RepositoryFetchSettings(
                allow_hosts=("a.org",), fetches=3, memory=77_777_777
            ),
            service=ServiceSettings(name="a"),
        )
        self.assertEqual((registries[0][2], issuers[0][2]), ((3, 9, 2, 7), "a"))
        memory, sandbox = runners[0][3:5]
        self.assertEqual(memory, 77_777_777)
        self.assertIsInstance(sandbox, TrustedCommandSandbox)
        self.assertRaises(EvaluationFailure, caches[0][3].check_url, "https://example.org/x")
        fetches = self.evaluations(daemon).context.fetch_slots
        lookups = [slots for _, slots in resolvers]
        for slots, half in zip((fetches, *lookups), (2, 6, 4, 1), strict=True):
            places = [slots.acquire_slot(f"a{number}", "a") for number in range(half + 1)]
            self.assertEqual([place.called for place in places], [True] * half + [False])
            self.assertTrue(slots.acquire_slot("b1", "b").called)

    def test_default_number_of_run_slots_is_the_number_of_processors(self) -> None:
        for running, places in ((3, 3), (0, 5)):
            self.patch(os, "sched_getaffinity", lambda pid: range(5))
            daemon = self.make(evaluations=EvaluationSettings(running=running, queued=0))
            queue = self.evaluations(daemon).registry.run_queue
            for number in range(places):
                self.assertFalse(queue.is_full())
                queue.acquire_slot(str(number))
            self.assertTrue(queue.is_full())

    def test_daemon_without_tokens_serves_this_machine_only_unless_open(self) -> None:
        tokens = self.write_token()
        for callers in (CallerSettings(open=True), CallerSettings(tokens=tokens)):
            self.make(listen=("tcp:80",), callers=callers)
        self.assertIn("'tcp:80'", self.fail_to_make(listen=("unix:/x", "tcp:80")))
        for callers, word in (
            (CallerSettings(tokens=tokens, open=True), tokens),
            (CallerSettings(tokens=f"{tokens}.missing"), f"{tokens}.missing"),
        ):
            self.assertIn(word, self.fail_to_make(callers=callers))

    def test_tokens_are_read_from_the_credentials_directory_of_systemd(self) -> None:
        folder = Path(self.mktemp()).absolute()
        folder.mkdir()
        (folder / "tokens").write_text(generate_token("alice", straw())[1])
        self.patch(os, "environ", {"CREDENTIALS_DIRECTORY": str(folder)})
        self.start(listen=("tcp:80",))
        self.assertEqual(self.request("GET /evaluation/x").status, 401)

    def test_sighup_reloads_the_tokens_until_the_service_stops(self) -> None:
        calls = self.note_calls_from_thread()
        before = signal.getsignal(signal.SIGHUP)
        notifier = self.find_notifier()
        tokens = self.write_token()
        daemon = self.start(callers=CallerSettings(tokens=tokens))
        signal.raise_signal(signal.SIGHUP)
        (reload,) = calls
        token, line = generate_token("bob", straw(1))
        Path(tokens).write_text(line)
        reload()
        self.assertEqual([one.split("=")[0] for one in notifier.sent], ["RELOADING", "READY"])
        self.assertEqual(self.request("GET /evaluation/x", token).status, 404)
        reloader = self.find_reloader(daemon)
        reloader.stopService()
        self.assertIs(signal.getsignal(signal.SIGHUP), before)
        reloader.startService()

    def test_readiness_and_metrics_can_be_requested(self) -> None:
        self.start(evaluations=EvaluationSettings(running=7))
        self.assertIn(b'"ready"', self.request("GET /health/ready").body)
        self.reactor.advance(0.5)
        figures = self.request("GET /metrics").body
        for figure in (
            b"tawebeval_places 7.0",
            b"tawebeval_ready 1.0",
            b'tawebeval_requests_total{method="GET",route="/health/ready"',
            b"tawebeval_reactor_lag_seconds_count 1.0",
        ):
            self.assertIn(figure, figures)

    def test_daemon_needs_the_configured_free_disk_to_be_ready(self) -> None:
        self.start(limits=LimitSettings(free_disk=2**50))
        problem = self.request("GET /health/ready")
        self.assertEqual((problem.status, len(problem.json()["reasons"])), (503, 2))
        self.assertIn(b"tawebeval_ready 0.0", self.request("GET /metrics").body)

    def begin_with(self, text: str) -> tuple[Path, Daemon]:
        path = self.file_with(text)
        return path, self.start(file=ConfigurationFile(path, (), read_configuration(path)))

    def reload(self, daemon: Daemon) -> tuple[list[str], list[str]]:
        return self.find_reloader(daemon).reload_files()

    def find_reloader(self, daemon: Daemon) -> ReloadService:
        (reloader,) = (one for one in daemon if isinstance(one, ReloadService))
        return reloader

    def test_reload_changes_the_configuration_and_the_log_level(self) -> None:
        path, daemon = self.begin_with("")
        log_writer = daemon.log_writer = LogWriter(StringIO(), format_text, "info")
        path.write_text("log.level = 'error'\nlisten = ['tcp:1']")
        notes = ["listen: changed; takes effect after a restart"]
        self.assertEqual(self.reload(daemon), ([], notes))
        configuration = self.context().configuration
        self.assertEqual((configuration.log.level, log_writer.level), ("error", "error"))
        self.assertEqual(configuration.listen, Configuration().listen)
        self.assertIs(self.evaluations(daemon).context.configuration, configuration)

    def find_notifier(self) -> FakeNotifier:
        """Have daemons started by systemd from now on; return what it is told by."""
        notifier = FakeNotifier("/notify")
        self.patch(module, "find_notifier", lambda _: notifier)
        return notifier

    def test_daemon_reports_readiness_queue_lengths_and_stop_timeout_to_systemd(self) -> None:
        notifier = self.find_notifier()
        daemon = self.start(evaluations=EvaluationSettings(running=3))
        for number in range(11):
            self.evaluations(daemon).registry.run_queue.acquire_slot(str(number))
        self.assertIs(list(daemon)[-1], daemon.getServiceNamed("watchdog"))
        for call, args, kwargs in self.reactor.whenRunningHooks:
            call(*args, **kwargs)
        self.assertEqual(notifier.sent, ["READY=1", "STATUS=3 running, 8 queued"])
        for call, args, kwargs in self.reactor.triggers["before"]["shutdown"]:
            call(*args, **kwargs)
        (said,) = (one for one in notifier.sent if one.startswith("STOPPING"))
        microseconds = compute_stop_timeout(Configuration()) * 1e6
        self.assertIn(f"EXTEND_TIMEOUT_USEC={microseconds:.0f}", said)

    def test_root_privileges_are_dropped_after_ports_are_opened(self) -> None:
        seen: list[int] = []
        daemon = self.make()
        listen_tcp = self.reactor.listenTCP

        def listen(*args: Any, **kwargs: Any) -> Any:
            seen.append(self.dropped)
            return listen_tcp(*args, **kwargs)

        self.reactor.listenTCP = listen
        daemon.privilegedStartService()
        self.assertEqual((seen, self.dropped), ([0], 1))

    def test_reload_reads_all_files_that_settings_name(self) -> None:
        tokens, password = self.write_token(), self.file_with("old")
        secrets = self.file_with(f"* {format_secret(OLD)}")
        entry = CredentialSettings("example.org", "judge", password_file=str(password))
        path, daemon = self.begin_with(
            f"callers.tokens = '{tokens}'\nmetrics.tokens = '{tokens}'\n"
            f"callbacks.secrets = '{secrets}'\n[[repositories.credentials]]\n"
            f"host = '{entry.host}'\nusername = 'judge'\npassword_file = '{password}'\n"
        )
        self.assertEqual(
            {each.name: each.paths for each in self.find_reloader(daemon).reloadables},
            {
                "the configuration": (path,),
                "callbacks.secrets": (secrets,),
                "callers.tokens": (Path(tokens),),
                "metrics.tokens": (Path(tokens),),
                "repositories.credentials": (password,),
            },
        )
        for file in (Path(tokens), secrets):
            content = file.read_text()
            file.write_text("nonsense")
            self.assertTrue(self.reload(daemon)[0])
            file.write_text(content)
        self.assertEqual(self.reload(daemon), ([], []))

    def test_occupied_port_stops_the_start_and_is_named(self) -> None:
        def fail(port: int, *args: object, **kwargs: object) -> None:
            raise CannotListenError("127.0.0.1", port, OSError(98, "in use"))

        daemon = self.make()
        self.reactor.listenTCP = fail
        error = self.assertRaises(SystemExit, daemon.privilegedStartService)
        self.assertIn("8080", str(error.code))
        self.assertTrue(str(error.code).startswith("tawebeval: "))


class TimerTests(SynchronousTestCase):
    def test_failing_call_is_logged_and_all_calls_are_repeated(self) -> None:
        clock, done = Clock(), []

        def first() -> None:
            done.append("first")
            raise ZeroDivisionError

        def second() -> None:
            done.append("second")

        service = make_periodic_timer((first, second), clock)
        service.startService()
        for _ in range(2):
            clock.advance(1)
        self.assertEqual(done, ["first", "second"] * 3)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 3)
        service.stopService()
        clock.advance(5)
        self.assertEqual(len(done), 6)
        self.assertEqual(clock.getDelayedCalls(), [])
