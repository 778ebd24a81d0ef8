"""The wire with evaluators on a cluster: the same tests as on this machine."""

from __future__ import annotations

from tests.integration.attacks.strays import StrayTests
from tests.integration.slurm_case import RUNNER, SlurmTestCase
from tests.integration.wire import blocks, evaluators, floods, reasons, streams


class SlurmBlockTests(SlurmTestCase, blocks.BlockCase):
    """Data and files, and what becomes of broken blocks."""


class SlurmEvaluatorTests(SlurmTestCase, evaluators.EvaluatorCase):
    """Odd output, stray processes, and what evaluators find around them."""


class SlurmReasonTests(SlurmTestCase, reasons.ReasonCase):
    """Bad ends, with time enough for last words."""

    template = reasons.ReasonCase.configuration + RUNNER


class SlurmTimeoutTests(SlurmTestCase, reasons.TimeoutCase):
    """Bad ends without time enough."""

    template = reasons.TimeoutCase.configuration + RUNNER


class SlurmStreamTests(SlurmTestCase, streams.TransportCase):
    """Readers on every transport."""

    template = streams.TransportCase.configuration + RUNNER


class SlurmOutputAttacks(SlurmTestCase, floods.OutputCase):
    """More output than anybody wants to read."""

    template = floods.OutputCase.configuration + RUNNER


class SlurmStrayTests(SlurmTestCase, StrayTests):
    """Processes that run away."""

    template = SlurmTestCase.template + "[limits]\nprocesses = 2000\n"
