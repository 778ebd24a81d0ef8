"""`linux.rlimits`: connections leave enough for evaluations."""

from __future__ import annotations

import resource

from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import (
    CallbackSettings,
    Configuration,
    EvaluationSettings,
    HttpSettings,
    RepositoryFetchSettings,
)
from tawebeval.errors import ConfigurationError
from tawebeval.linux.rlimits import (
    MIN_CONNECTIONS,
    count_allowed_descriptors,
    count_needed_descriptors,
    limit_connections,
    raise_descriptor_limit,
)

USUAL = Configuration(
    evaluations=EvaluationSettings(max_running=10), http=HttpSettings(connections=500)
)


class DescriptorsTests(SynchronousTestCase):
    """A process with limits that a test sets."""

    def setUp(self) -> None:
        self.limits = (1024, 4096)
        self.patch(resource, "getrlimit", lambda which: self.limits)
        self.patch(resource, "setrlimit", self.set_limit)

    def set_limit(self, which: int, limits: tuple[int, int]) -> None:
        """Take the limits, if they are of descriptors."""
        self.assertEqual(which, resource.RLIMIT_NOFILE)
        self.limits = limits

    def test_raised(self) -> None:
        """The soft limit becomes what the hard one allows, and that is what counts."""
        self.assertEqual(count_allowed_descriptors(), 4096)
        raise_descriptor_limit()
        self.assertEqual(self.limits, (4096, 4096))

    def test_unlimited(self) -> None:
        """Where there is no limit all settings do."""
        self.limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        self.assertGreater(count_allowed_descriptors(), count_needed_descriptors(USUAL))

    def test_needed(self) -> None:
        """Connections count once, evaluations besides, and callbacks, also before there are any."""
        before = count_needed_descriptors(USUAL)
        for settings, more in (
            ({"http": HttpSettings(connections=507)}, 7),
            ({"evaluations": EvaluationSettings(max_running=12)}, 32),
            ({"repositories": RepositoryFetchSettings(max_concurrent_fetches=5)}, 6),
            ({"callbacks": CallbackSettings(enabled=True, max_concurrent_attempts=15)}, 5),
            ({"callbacks": CallbackSettings(enabled=False, max_concurrent_attempts=15)}, 5),
        ):
            kept = {"evaluations": USUAL.evaluations, "http": USUAL.http}
            changed = Configuration(**{**kept, **settings})
            self.assertEqual(count_needed_descriptors(changed), before + more)

    def test_enough(self) -> None:
        """Just enough leaves the settings as they are, and says nothing."""
        self.limits = (0, count_needed_descriptors(USUAL))
        with capturedLogs() as events:
            self.assertIs(limit_connections(USUAL), USUAL)
        self.assertEqual(list(events), [])

    def test_too_few(self) -> None:
        """One too few is one connection less; the log says what there is, and what helps."""
        self.limits = (0, count_needed_descriptors(USUAL) - 1)
        with capturedLogs() as events:
            fitted = limit_connections(USUAL)
        self.assertEqual(fitted.http.connections, 499)
        self.assertEqual(count_needed_descriptors(fitted), count_allowed_descriptors())
        (event,) = events
        self.assertEqual(event["log_level"].name, "warn")
        said = formatEvent(event)
        there = count_allowed_descriptors()
        for word in (f"{there} allowed", "limited to 499", "500 (http.connections)"):
            self.assertIn(word, said)
        self.assertIn(f"LimitNOFILE={count_needed_descriptors(USUAL)} in the unit", said)

    def test_journals(self) -> None:
        """Journals leave fewer connections, but some."""
        self.limits = (0, count_needed_descriptors(USUAL) + 100)
        for journals, connections in ((100, 500), (101, 499), (10_000, MIN_CONNECTIONS)):
            fitted = limit_connections(USUAL, journals)
            self.assertEqual(fitted.http.connections, connections)

    def test_far_too_few(self) -> None:
        """With less than a few connections, beside the evaluations, there is no start."""
        fewest = count_needed_descriptors(USUAL) - 500 + MIN_CONNECTIONS
        self.limits = (0, fewest)
        self.assertEqual(limit_connections(USUAL).http.connections, MIN_CONNECTIONS)
        self.limits = (0, fewest - 1)
        with self.assertRaises(ConfigurationError) as caught:
            limit_connections(USUAL)
        said = str(caught.exception)
        self.assertIn(f"{fewest - 1} allowed, and at least {fewest} are needed", said)
        self.assertIn(f"LimitNOFILE={count_needed_descriptors(USUAL)} in the unit", said)
        self.assertTrue(said.endswith("lower evaluations.running or callbacks.at_once"), said)
