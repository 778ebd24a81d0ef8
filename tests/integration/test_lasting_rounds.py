"""Evaluations of all kinds, whose daemon is killed and started again and again: nothing is lost."""

from __future__ import annotations

import signal

from tests.integration.rounds_case import EVALUATIONS, ROUNDS, RoundsCase


class RoundsTests(RoundsCase):
    """Kills at random moments."""

    async def test_killed(self) -> None:
        """No event is lost and none comes twice, each status is right, and nothing is left."""
        await self.run_rounds(EVALUATIONS, ROUNDS, signal.SIGKILL)


class RestartTests(RoundsCase):
    """Orderly restarts."""

    async def test_restarted(self) -> None:
        """An orderly restart loses nothing either."""
        await self.run_rounds(EVALUATIONS // 2, ROUNDS // 2, signal.SIGTERM)
