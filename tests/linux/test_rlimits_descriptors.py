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
    RepositorySettings,
)
from tawebeval.errors import ConfigurationError
from tawebeval.linux.rlimits import (
    FEWEST_CONNECTIONS,
    descriptors_allowed,
    descriptors_needed,
    fit_connections,
    raise_descriptor_limit,
)

USUAL = Configuration(
    evaluations=EvaluationSettings(running=10), http=HttpSettings(connections=500)
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
        self.assertEqual(descriptors_allowed(), 4096)
        raise_descriptor_limit()
        self.assertEqual(self.limits, (4096, 4096))

    def test_unlimited(self) -> None:
        """Where there is no limit all settings do."""
        self.limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        self.assertGreater(descriptors_allowed(), descriptors_needed(USUAL))

    def test_needed(self) -> None:
        """Connections count once, evaluations besides, and callbacks, also before there are any."""
        before = descriptors_needed(USUAL)
        for settings, more in (
            ({"http": HttpSettings(connections=507)}, 7),
            ({"evaluations": EvaluationSettings(running=12)}, 26),
            ({"repositories": RepositorySettings(fetches=5)}, 6),
            ({"callbacks": CallbackSettings(enabled=True, at_once=15)}, 5),
            ({"callbacks": CallbackSettings(enabled=False, at_once=15)}, 5),
        ):
            kept = {"evaluations": USUAL.evaluations, "http": USUAL.http}
            changed = Configuration(**{**kept, **settings})
            self.assertEqual(descriptors_needed(changed), before + more)

    def test_enough(self) -> None:
        """Just enough leaves the settings as they are, and says nothing."""
        self.limits = (0, descriptors_needed(USUAL))
        with capturedLogs() as events:
            self.assertIs(fit_connections(USUAL), USUAL)
        self.assertEqual(list(events), [])

    def test_too_few(self) -> None:
        """One too few is one connection less; the log says what there is, and what helps."""
        self.limits = (0, descriptors_needed(USUAL) - 1)
        with capturedLogs() as events:
            fitted = fit_connections(USUAL)
        self.assertEqual(fitted.http.connections, 499)
        self.assertEqual(descriptors_needed(fitted), descriptors_allowed())
        (event,) = events
        self.assertEqual(event["log_level"].name, "warn")
        said = formatEvent(event)
        there = descriptors_allowed()
        for word in (f"{there} allowed", "limited to 499", "500 (http.connections)"):
            self.assertIn(word, said)
        self.assertIn(f"LimitNOFILE={descriptors_needed(USUAL)} in the unit", said)

    def test_far_too_few(self) -> None:
        """With less than a few connections, beside the evaluations, there is no start."""
        fewest = descriptors_needed(USUAL) - 500 + FEWEST_CONNECTIONS
        self.limits = (0, fewest)
        self.assertEqual(fit_connections(USUAL).http.connections, FEWEST_CONNECTIONS)
        self.limits = (0, fewest - 1)
        with self.assertRaises(ConfigurationError) as caught:
            fit_connections(USUAL)
        said = str(caught.exception)
        self.assertIn(f"{fewest - 1} allowed, and at least {fewest} are needed", said)
        self.assertIn(f"LimitNOFILE={descriptors_needed(USUAL)} in the unit", said)
        self.assertTrue(said.endswith("lower evaluations.running or callbacks.at_once"), said)
