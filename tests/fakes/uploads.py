"""What stands in for the request that a form comes from."""

from __future__ import annotations

import attrs


@attrs.define
class FakeSource:
    """Notes whether its body is read, and by what it was refused."""

    paused: bool = False
    refused: list[Exception] = attrs.field(factory=list)

    def pause_body(self) -> None:
        self.paused = True

    def resume_body(self) -> None:
        self.paused = False

    def refuse_request(self, error: Exception) -> None:
        self.refused.append(error)
