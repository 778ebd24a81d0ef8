"""Evaluations of all kinds, whose daemon is restarted again and again: nothing is lost.

Kills, by which nothing is lost either, are those of `test_archive`.
"""

from __future__ import annotations

import signal

from tests.integration.rounds_case import EVALUATIONS, ROUNDS, RoundsCase


class RestartTests(RoundsCase):
    async def test_random_restarts_lose_and_repeat_nothing(self) -> None:
        await self.run_rounds(EVALUATIONS // 2, ROUNDS // 2, signal.SIGTERM)
