"""Evaluations of all kinds, whose daemon is restarted again and again: nothing is lost.

Kills, by which nothing is lost either, are those of `test_archive`.
"""

from __future__ import annotations

import signal

from tests.integration.rounds_case import EVALUATIONS, ROUNDS, RoundsCase


class RestartTests(RoundsCase):
    """Orderly restarts."""

    async def test_restarted(self) -> None:
        """No event is lost and none comes twice, each status is right, and nothing is left."""
        await self.run_rounds(EVALUATIONS // 2, ROUNDS // 2, signal.SIGTERM)
