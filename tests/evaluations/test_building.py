"""`evaluations.building`: trees that builds leave, and where they are kept."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, EvaluationSettings, SandboxSettings
from tawebeval.core.evaluations import Checkout, Commit, TreeCopier
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.building import plan_build
from tawebeval.evaluations.context import FixedCheckoutSource
from tawebeval.git.fetch_limits import TreeLimits
from tests.fakes.world import OID, TREE, make_request

KEY = "b" * 40


class PlanTests(SynchronousTestCase):
    def test_key_of_a_build_differs_if_command_checkout_or_settings_differ(self) -> None:
        keys = set()
        variables = EvaluationSettings(environment={"A": "b"})
        for request, configuration in (
            (make_request(build_command="make"), Configuration()),
            (make_request(build_command="make all"), Configuration()),
            (make_request(build_command="make", directory="a"), Configuration()),
            (make_request(build_command="make"), Configuration(evaluations=variables)),
            (make_request(build_command="make"), Configuration(sandbox=SandboxSettings("none"))),
            (
                make_request(build_command="make"),
                Configuration(sandbox=SandboxSettings(readable=("/a",))),
            ),
        ):
            context = Mock(configuration=configuration)
            evaluation = Mock(context=context, details=Mock(environment=None, request=request))
            for name in ("one", "two"):
                checkout = Checkout(Commit(OID, TREE), Path(name), lambda: None)
                keys.add(plan_build(evaluation, checkout).key)
        self.assertEqual(len(keys), 12)


class FixedCheckoutTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.built = self.root / "built"
        self.built.mkdir(parents=True)
        self.checkout = Checkout(Commit(OID, TREE), self.root / "checkout", lambda: None)
        self.source = FixedCheckoutSource(self.checkout, TreeLimits(2, 100).check_tree)

    def store(self) -> Deferred[Checkout]:
        async def build(take_tree: TreeCopier) -> tuple[int, int]:
            return take_tree(self.built)

        return Deferred.fromCoroutine(self.source.store_build(self.checkout, KEY, build))

    def test_build_replaces_the_leftovers_of_a_failed_copy(self) -> None:
        (self.built / "file").write_bytes(b"x" * 9)
        left = self.root / f"checkout-{KEY}"
        left.mkdir()
        (left / "half").touch()
        stored = self.successResultOf(self.store())
        self.assertEqual(stored.commit, Commit(OID, TREE, 1, 9))
        self.assertEqual([path.name for path in stored.path.iterdir()], ["file"])
        self.assertEqual(self.source.find_build(self.checkout, KEY), stored)

    def test_build_with_more_files_than_a_tree_may_have_is_refused(self) -> None:
        for name in "abc":
            (self.built / name).touch()
        self.failureResultOf(self.store(), EvaluationFailure)
        self.assertIsNone(self.source.find_build(self.checkout, KEY))
