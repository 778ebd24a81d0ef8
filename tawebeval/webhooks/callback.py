"""One callback: to which URL the end of an evaluation is to be told, and what has become of it."""

from __future__ import annotations

from enum import Enum

import attrs

from tawebeval.core.hosts import Target, bracketed, target_of


class Stage(Enum):
    """How far a callback is."""

    WAITING = "waiting"  # the evaluation has not ended
    PENDING = "pending"
    DELIVERED = "delivered"
    REFUSED = "refused"
    GIVEN_UP = "given_up"


@attrs.define(eq=False)
class Callback:
    """What becomes of one callback; `last_error`, for people, is that of the last bad attempt."""

    url: str
    caller: str
    stage: Stage = Stage.WAITING
    attempts: int = 0
    last_error: str | None = None

    @property
    def shown_url(self) -> str:
        """The URL for the status: others than who chose it may see that, so without a query."""
        return self.url.partition("?")[0]

    @property
    def origin(self) -> str:
        """The URL for the log: a path may be a secret, too."""
        target = web_target(self.url)
        host = bracketed(target.address) if target.address else target.host
        return f"{target.protocol}://{host}:{target.port}"


def web_target(url: str) -> Target:
    """Return where a URL leads that a form's `callback_url` may be."""
    target = target_of(url)
    assert target is not None, "only paths have no host"
    return target
