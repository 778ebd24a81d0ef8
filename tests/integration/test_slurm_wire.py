"""The wire with evaluators on a cluster: the same tests as on this machine."""

from __future__ import annotations

from tests.integration.attacks.strays import StrayTests
from tests.integration.slurm_case import RUNNER, SlurmTestCase
from tests.integration.wire import evaluators, floods


class SlurmEvaluatorTests(SlurmTestCase, StrayTests, evaluators.EvaluatorCase):
    """What evaluators find, print and leave behind."""

    configuration = SlurmTestCase.configuration + "[limits]\nprocesses = 2000\n"


class SlurmOutputAttacks(SlurmTestCase, floods.OutputCase):
    """More output than anybody wants to read."""

    configuration = floods.OutputCase.configuration + RUNNER
