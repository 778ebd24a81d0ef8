"""Retry queue for calls that must succeed in the end, such as the removal of directories.

A machine may lack descriptors, or its disk may not answer, for a while. Failed calls are tried
again until they succeed, not only at the next start: a few of them now and then, and all of them
once one has succeeded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.deferreds import Threads, in_background

_BATCH = 100  # calls that a thread makes one after the other
_LONGEST = 60  # seconds between two trials

log = Logger()


@attrs.frozen
class _Call:
    """Blocking call that may be repeated; `made` is called after its success."""

    what: str
    make: Callable[..., object]
    arguments: Sequence[Any]
    made: Callable[[], object]


@attrs.define(eq=False)
class Arrears:
    """Makes calls in threads and keeps those that raise OSError, in order."""

    _threads: Threads
    _kept: deque[_Call] = attrs.field(factory=deque)
    _busy: bool = False
    _delay: int = 1  # seconds between the last trial and the next
    _rest: int = 0  # of these are still to come

    def __len__(self) -> int:
        return len(self._kept)

    async def attempt(
        self,
        what: str,
        make: Callable[..., object],
        *arguments: Any,
        made: Callable[[], object] = lambda: None,
    ) -> None:
        """Make a call; on OSError, log it with its purpose `what` and keep the call."""
        try:
            await self._threads.run(make, *arguments)
        except OSError as error:
            words = "{what} is not done yet, and tried again: {error}"
            log.error(words, what=what, error=error)  # noqa: TRY400  (no defect: no traceback)
            self._kept.append(_Call(what, make, arguments, made))
        else:
            made()

    def settle(self) -> None:
        """Retry kept calls unless a retry runs or the back-off lasts; call it once a second.

        The back-off doubles after each retry in which no call succeeds.
        """
        if not self._kept or self._busy:
            return
        if self._rest:
            self._rest -= 1
            return
        self._busy = True
        in_background(self._again(), log, "what was left to be done")

    async def _again(self) -> None:
        try:
            left, progress = len(self._kept), False
            while left:
                batch = [self._kept.popleft() for _ in range(min(left, _BATCH))]
                left -= len(batch)
                if not self._judge(batch, await self._threads.run(_make_all, batch)):
                    break  # what lacks for all of these lacks for the others, too
                progress = True
            self._delay = 1 if progress else min(2 * self._delay, _LONGEST)
            self._rest = self._delay - 1
        finally:
            self._busy = False

    def _judge(self, batch: Sequence[_Call], errors: Sequence[Exception | None]) -> bool:
        """Keep the calls that failed; return whether any succeeded."""
        outcomes = list(zip(batch, errors, strict=True))
        self._kept += (call for call, error in outcomes if isinstance(error, OSError))
        for call, error in outcomes:
            if error is None:
                log.info("{what} is done now", what=call.what)
                call.made()
            elif not isinstance(error, OSError):
                log.failure("{what} cannot be done", Failure(error), what=call.what)
        return None in errors


def _make_all(calls: Sequence[_Call]) -> Sequence[Exception | None]:
    """Make calls and return the error of each. Blocks."""
    return [_error_of(call) for call in calls]


def _error_of(call: _Call) -> Exception | None:
    try:
        call.make(*call.arguments)
    except Exception as error:  # noqa: BLE001  (the others are made all the same)
        return error
    return None
