"""An archive without a disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tawebeval.archive.archive import EndedEvaluation
from tawebeval.core.evaluations import ArchiveRecord
from tests.fakes.gates import Gate


class FakeArchive:
    """An archive that takes what has ended, once `gate` is open."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.ended: list[EndedEvaluation] = []
        self.asked: list[tuple[str, str]] = []
        self.on_removal: Callable[[str], bool] = lambda identifier: False

    async def find_events(self, identifier: str, caller: str) -> None:
        self.asked.append((identifier, caller))

    async def store_evaluation(
        self, ended: EndedEvaluation, save_row: Callable[[ArchiveRecord], Awaitable[None]]
    ) -> bool:
        await self.gate.wait()
        self.ended.append(ended)
        await save_row(ArchiveRecord(100, 2))
        return True
