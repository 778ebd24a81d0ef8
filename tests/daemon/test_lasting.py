"""Whether evaluations outlive the daemon: the setting, the keeper and what the doctor says."""

from __future__ import annotations

import resource
from typing import Any

from twisted.internet.task import Clock
from twisted.logger import LogLevel, capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, SandboxSettings, ServiceSettings
from tawebeval.daemon.lasting import KEEPER_VARIABLE, open_keeper_client, open_run_keeper
from tawebeval.errors import ConfigurationError
from tests.cases.keepers import KeeperProcess


def configured(lasting: Any, kind: Any = "bubblewrap") -> Configuration:
    """Return a configuration."""
    return Configuration(service=ServiceSettings(lasting=lasting), sandbox=SandboxSettings(kind))


class SettingTests(SynchronousTestCase):
    """`service.lasting`."""

    def keeper(self) -> dict[str, str]:
        """Return the environment of a daemon with a keeper."""
        keeper = KeeperProcess()
        self.addCleanup(keeper.stop)
        return {KEEPER_VARIABLE: keeper.path}

    def test_answers(self) -> None:
        """Evaluations last with a keeper that answers, unless the operator does not want it."""
        environment = self.keeper()
        for lasting in ("auto", True):
            client = open_keeper_client(configured(lasting), environment)
            assert client is not None
            self.assertEqual(client.path, environment[KEEPER_VARIABLE])
            client.close()
        self.assertIsNone(open_keeper_client(configured(False), environment))
        self.assertIsNone(open_keeper_client(configured("auto", "none"), environment))

    def test_no_keeper(self) -> None:
        """Without a keeper they end with the daemon, or the start is refused."""
        self.assertIsNone(open_keeper_client(configured("auto"), {}))
        for environment, kind, words in (
            ({}, "bubblewrap", "service.lasting: no keeper is named"),
            (self.keeper(), "none", "service.lasting: evaluations last in a sandbox only"),
            ({KEEPER_VARIABLE: "/nowhere"}, "bubblewrap", "No such file or directory"),
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

    def test_silent_keeper(self) -> None:
        """A keeper that is named and does not answer is a warning."""
        with capturedLogs() as logged:
            found = open_run_keeper(configured("auto"), {KEEPER_VARIABLE: "/nowhere"}, Clock())
        self.assertIsNone(found)
        self.assertEqual(logged[0]["log_level"], LogLevel.warn)
        self.assertIn("the keeper does not answer", logged[0]["what"])
