"""Whether evaluations outlive the daemon: the setting, the keeper and what the doctor says."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import msgspec
from twisted.internet.task import Clock
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import (
    CallbackSettings,
    Configuration,
    EvaluationSettings,
    LimitSettings,
    SandboxSettings,
    ServiceSettings,
)
from tawebeval.daemon.keeper_connection import (
    KEEPER_SOCKET_VARIABLE,
    describe_keeper_limits,
    open_keeper_client,
    open_run_keeper,
)
from tawebeval.errors import ConfigurationError
from tawebeval.linux.keeper_client import KeeperClient
from tests.cases.doctor_case import WEAKER, DoctorTestCase
from tests.cases.keepers import KeeperProcess


def configured(lasting: Any, kind: Any = "bubblewrap") -> Configuration:
    """Return a configuration."""
    return Configuration(
        service=ServiceSettings(evaluations_outlive_daemon=lasting), sandbox=SandboxSettings(kind)
    )


SMALL = Configuration(
    evaluations=EvaluationSettings(max_running=10, max_queued=20, max_retained=300),
    limits=LimitSettings(processes=100),
)


class SettingTests(SynchronousTestCase):
    """`service.lasting`."""

    def keeper(self) -> dict[str, str]:
        """Return the environment of a daemon with a keeper."""
        keeper = KeeperProcess()
        self.addCleanup(keeper.stop)
        return {KEEPER_SOCKET_VARIABLE: keeper.path}

    def test_answers(self) -> None:
        """Evaluations last with a keeper that answers, unless the operator does not want it."""
        environment = self.keeper()
        for lasting in ("auto", True):
            client = open_keeper_client(configured(lasting), environment)
            assert client is not None
            self.assertEqual(client.path, environment[KEEPER_SOCKET_VARIABLE])
            client.close()
        self.assertIsNone(open_keeper_client(configured(False), environment))
        self.assertIsNone(open_keeper_client(configured("auto", "none"), environment))

    def test_no_keeper(self) -> None:
        """Without a keeper they end with the daemon, or the start is refused."""
        self.assertIsNone(open_keeper_client(configured("auto"), {}))
        for environment, kind, words in (
            ({}, "bubblewrap", "service.lasting: no keeper is named"),
            (self.keeper(), "none", "service.lasting: evaluations last in a sandbox only"),
            ({KEEPER_SOCKET_VARIABLE: "/nowhere"}, "bubblewrap", "No such file or directory"),
        ):
            with self.assertRaises(ConfigurationError) as caught:
                open_run_keeper(configured(True, kind), environment, Clock())
            self.assertIn(words, str(caught.exception))

    def test_hard_limits(self) -> None:
        """A hard limit of the keeper that is too low for evaluators refuses the start."""
        environment = self.keeper()
        client = open_keeper_client(configured("auto"), environment)
        assert client is not None
        self.addCleanup(client.close)
        resource.prlimit(client.pid, resource.RLIMIT_NOFILE, (200, 200))
        with self.assertRaises(ConfigurationError) as caught:
            open_run_keeper(configured("auto"), environment, Clock())
        self.assertEqual(
            str(caught.exception),
            "limits.open_files: 256 is over the keeper's hard limit, 200; set LimitNOFILE=256 in"
            " tawebeval-keeper.service (or ulimit -H), or lower limits.open_files",
        )

    def describe(self, environment: dict[str, str], **sections: Any) -> list[str]:
        """Return what is said of the keeper's allowances."""
        client = open_keeper_client(configured("auto"), environment)
        assert client is not None
        self.addCleanup(client.close)
        client.cgroups = self.cgroups
        settings = msgspec.structs.replace(SMALL, **sections)
        return list(map(str, describe_keeper_limits(settings, environment, client)))

    def test_descriptors(self) -> None:
        """The keeper needs some for each running evaluation, and one for each unread one."""
        environment = self.keeper()
        self.cgroups = ""
        process = KeeperClient.connect(environment[KEEPER_SOCKET_VARIABLE])
        self.addCleanup(process.close)
        wanted = 10 * 14 + 10 + 20 + 300 + 131
        for there in (wanted, wanted - 1):
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (there, there))
            (said,) = self.describe(environment)
            self.assertIn(f"descriptors: {there} allowed, and up to {wanted} may be needed", said)
            self.assertEqual("; set LimitNOFILE=601 in tawebeval-keeper" in said, there < wanted)
        # Callbacks that wait are kept, too.
        (said,) = self.describe(
            environment, callbacks=CallbackSettings(True, max_pending_bytes=3 * 4096)
        )
        self.assertIn("up to 604 may be needed; set LimitNOFILE=604", said)

    def test_processes(self) -> None:
        """The cgroups around the keeper's evaluations have to allow all processes."""
        environment = self.keeper()
        unit = Path(self.mktemp()).absolute()
        parent = unit / "parent"
        parent.mkdir(parents=True)
        (parent / "pids.max").write_text("max\n")
        self.cgroups = json.dumps({"parents": {"processes": [2, str(parent)]}, "missing": {}})
        for there in (1064, 1063):
            (unit / "pids.max").write_text(f"{there}\n")
            _, said = self.describe(environment)
            self.assertIn(f"processes: {there} allowed, and up to 1064 may be needed", said)
            self.assertEqual("; set TasksMax=1064 in tawebeval-keeper" in said, there < 1064)

    def test_warnings(self) -> None:
        """A start says what the keeper may have too few of."""
        environment = self.keeper()
        client = KeeperClient.connect(environment[KEEPER_SOCKET_VARIABLE])
        self.addCleanup(client.close)
        resource.prlimit(client.pid, resource.RLIMIT_NOFILE, (600, 600))
        with capturedLogs() as logged:
            keeper = open_run_keeper(SMALL, environment, Clock())
        assert keeper is not None
        self.addCleanup(keeper.client.close)
        (said,) = (formatEvent(event) for event in logged if event["log_level"] is LogLevel.warn)
        self.assertIn("the keeper's descriptors: 600 allowed, and up to 601 may be", said)
        self.assertIn("tawebeval-keeper.service", said)

    def test_silent_keeper(self) -> None:
        """A keeper that is named and does not answer is a warning."""
        with capturedLogs() as logged:
            found = open_run_keeper(
                configured("auto"), {KEEPER_SOCKET_VARIABLE: "/nowhere"}, Clock()
            )
        self.assertIsNone(found)
        self.assertEqual(logged[0]["log_level"], LogLevel.warn)
        self.assertIn("the keeper does not answer", logged[0]["what"])


class DoctorTests(DoctorTestCase):
    """What the doctor says of the keeper."""

    def test_descriptors(self) -> None:
        """Too few descriptors of the keeper are weaker, with its unit."""
        keeper = KeeperProcess()
        self.addCleanup(keeper.stop)
        self.environment[KEEPER_SOCKET_VARIABLE] = keeper.path
        settings = "[evaluations]\nrunning = 10\nqueued = 20\nkept = 300"
        said = [
            str(each.description) for each in self.check_ok(settings) if each.component == "keeper"
        ]
        self.assertIn("evaluations outlive the daemon", said)
        resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (600, 600))
        words = "descriptors: 600 allowed", "-> set LimitNOFILE=601 in tawebeval-keeper.service"
        self.check("keeper", WEAKER, *words, settings=settings)
