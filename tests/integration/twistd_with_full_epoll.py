"""twistd for whose user epoll may watch no more than four descriptors."""

from __future__ import annotations

import select
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fakes.epoll import LimitedEpoll

_MOST = 4  # what a reactor watches before anything else


class _Epoll(LimitedEpoll):
    true = select.epoll

    def __init__(self, _: int) -> None:
        select.epoll = self.true  # type: ignore[misc]
        try:
            super().__init__(_MOST)
        finally:
            select.epoll = _Epoll  # type: ignore[misc, assignment]


if __name__ == "__main__":
    select.epoll = _Epoll  # type: ignore[misc, assignment]
    # Imported late: from now on this is what everybody finds.
    from twisted.scripts.twistd import run

    run()
