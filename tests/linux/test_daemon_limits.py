"""`linux.daemon_limits`: no setting asks for more than the daemon itself may have."""

from __future__ import annotations

import resource
from pathlib import Path

import msgspec
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import (
    Configuration,
    EvaluationSettings,
    HttpSettings,
    LimitSettings,
    MaximumLimitSettings,
    RepositoryFetchSettings,
)
from tawebeval.errors import ConfigurationError
from tawebeval.linux import daemon_limits
from tawebeval.linux.daemon_limits import (
    MIN_HTTP_CONNECTIONS,
    assess_process_limit,
    cap_configured_connections,
    check_hard_limits,
    count_allowed_descriptors,
    count_allowed_processes,
    count_needed_descriptors,
    count_needed_processes,
    raise_descriptor_limit,
)
from tests.fakes.cgroups import FakeMachine

USUAL = Configuration(
    evaluations=EvaluationSettings(running=10),
    http=HttpSettings(connections=500),
    limits=LimitSettings(processes=100),
)


class CeilingsTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.hard: dict[int, int] = {}
        self.patch(resource, "getrlimit", lambda which: (0, self.hard.get(which, -1)))


class LimitTests(CeilingsTestCase):
    def test_setting_above_the_hard_limit_is_named_with_the_remedy(self) -> None:
        limits = LimitSettings(open_files=256, processes=128, cpu=300, file_size=1000, memory=2000)
        for number, setting, value, directive in (
            (resource.RLIMIT_NOFILE, "open_files", 256, "LimitNOFILE"),
            (resource.RLIMIT_NPROC, "processes", 129, "LimitNPROC"),
            (resource.RLIMIT_CPU, "cpu", 301, "LimitCPU"),
            (resource.RLIMIT_FSIZE, "file_size", 1000, "LimitFSIZE"),
            (resource.RLIMIT_DATA, "memory", 2000, "LimitDATA"),
        ):
            self.hard = {number: value}
            check_hard_limits(limits)
            self.hard = {number: value - 1}
            said = str(self.assertRaises(ConfigurationError, check_hard_limits, limits))
            self.assertTrue(said.startswith(f"limits.{setting}: "), said)
            self.assertIn(f"hard limit, {value - 1}", said)
            self.assertIn(f"; set {directive}={value} in the unit", said)
            chosen = msgspec.structs.replace(
                limits,
                **{setting: 16},
                maximum=MaximumLimitSettings(**{setting: getattr(limits, setting)}),
            )
            said = str(self.assertRaises(ConfigurationError, check_hard_limits, chosen))
            self.assertTrue(said.startswith(f"limits.maximum.{setting}: "), said)


class ProcessesTests(CeilingsTestCase):
    def test_needed_processes_are_those_of_all_evaluators_and_the_daemon(self) -> None:
        more = Configuration(
            evaluations=EvaluationSettings(running=11), limits=LimitSettings(processes=100)
        )
        self.assertEqual(count_needed_processes(more) - count_needed_processes(USUAL), 100)
        self.assertGreater(count_needed_processes(USUAL), 1000)
        more = msgspec.structs.replace(USUAL, repositories=RepositoryFetchSettings(fetches=5))
        self.assertEqual(count_needed_processes(more) - count_needed_processes(USUAL), 16)

    def test_allowed_processes_are_the_lowest_limit_of_the_user_and_the_cgroups(self) -> None:
        machine = FakeMachine(Path(self.mktemp()).absolute())
        own = machine.own
        self.patch(daemon_limits, "find_own_cgroup", lambda: str(own))
        around = own.parent / "pids.max"
        self.assertIsNone(count_allowed_processes())
        around.write_text("500\n")
        self.assertEqual(count_allowed_processes(), 500)
        (own / "pids.max").write_text("700\n")
        self.assertEqual(count_allowed_processes(), 500)
        around.write_text("max\n")
        self.assertEqual(count_allowed_processes(), 700)
        self.hard = {resource.RLIMIT_NPROC: 300}
        self.assertEqual(count_allowed_processes(), 300)

    def test_allowed_processes_are_unlimited_without_cgroups(self) -> None:
        self.patch(daemon_limits, "find_own_cgroup", lambda: None)
        self.assertIsNone(count_allowed_processes())

    def test_one_process_too_few_is_a_problem_with_a_remedy(self) -> None:
        wanted = count_needed_processes(USUAL)
        for there in (None, wanted, wanted - 1):
            self.patch(daemon_limits, "count_allowed_processes", lambda there=there: there)
            self.assertEqual(len(assess_process_limit(USUAL).problems), there == wanted - 1, there)
        (problem,) = assess_process_limit(USUAL).problems
        said = f"{wanted - 1} allowed, and up to {wanted} may be needed; raise TasksMax="
        self.assertTrue(str(problem).startswith(said), problem)


class DescriptorsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.limits = (1024, 4096)
        self.patch(resource, "getrlimit", lambda which: self.limits)
        self.patch(resource, "setrlimit", self.set_limit)

    def set_limit(self, which: int, limits: tuple[int, int]) -> None:
        self.assertEqual(which, resource.RLIMIT_NOFILE)
        self.limits = limits

    def test_soft_limit_is_raised_to_the_hard_one(self) -> None:
        self.assertEqual(count_allowed_descriptors(), 4096)
        raise_descriptor_limit()
        self.assertEqual(self.limits, (4096, 4096))

    def test_unlimited_descriptors_suffice(self) -> None:
        self.limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        self.assertGreater(count_allowed_descriptors(), count_needed_descriptors(USUAL))

    def test_needed_descriptors_are_those_of_connections_and_evaluations(self) -> None:
        before = count_needed_descriptors(USUAL)
        for settings, more in (
            ({"http": HttpSettings(connections=507)}, 7),
            ({"evaluations": EvaluationSettings(running=12)}, 20),
            ({"repositories": RepositoryFetchSettings(fetches=5)}, 6),
        ):
            kept = {"evaluations": USUAL.evaluations, "http": USUAL.http}
            changed = Configuration(**{**kept, **settings})
            self.assertEqual(count_needed_descriptors(changed), before + more)

    def test_enough_descriptors_change_nothing(self) -> None:
        self.limits = (0, count_needed_descriptors(USUAL))
        with capturedLogs() as events:
            self.assertIs(cap_configured_connections(USUAL), USUAL)
        self.assertEqual(list(events), [])

    def test_one_descriptor_too_few_lowers_the_connection_limit_by_one(self) -> None:
        self.limits = (0, count_needed_descriptors(USUAL) - 1)
        with capturedLogs() as events:
            fitted = cap_configured_connections(USUAL)
        self.assertEqual(fitted.http.connections, 499)
        self.assertEqual(count_needed_descriptors(fitted), count_allowed_descriptors())
        (event,) = events
        self.assertEqual(event["log_level"].name, "warn")
        said = formatEvent(event)
        there = count_allowed_descriptors()
        for word in (f"{there} allowed", "limited to 499", "500 (http.connections)"):
            self.assertIn(word, said)
        self.assertIn(f"LimitNOFILE={count_needed_descriptors(USUAL)} in the unit", said)

    def test_far_too_few_descriptors_are_an_error(self) -> None:
        fewest = count_needed_descriptors(USUAL) - 500 + MIN_HTTP_CONNECTIONS
        self.limits = (0, fewest)
        self.assertEqual(cap_configured_connections(USUAL).http.connections, MIN_HTTP_CONNECTIONS)
        self.limits = (0, fewest - 1)
        said = str(self.assertRaises(ConfigurationError, cap_configured_connections, USUAL))
        self.assertIn(f"{fewest - 1} allowed, and at least {fewest} are needed", said)
        self.assertIn(f"LimitNOFILE={count_needed_descriptors(USUAL)} in the unit", said)
        self.assertTrue(said.endswith("lower evaluations.running"), said)
