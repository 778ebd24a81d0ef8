"""What has to be done at last, such as removing directories, and cannot be done just now.

The machine may lack something for a while: descriptors, or a disk that answers. What is left then
would stay until the next start. So it is tried again, one at a time, until it succeeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from tawebeval.signals import Threads

log = Logger()


@attrs.frozen
class _Call:
    """It blocks, and may be made again; `made` is called after it has succeeded."""

    what: str
    make: Callable[..., object]
    arguments: Sequence[Any]
    made: Callable[[], object]


@attrs.define(eq=False)
class Arrears:
    """Makes calls in threads; those that raise OSError are kept, in the order of their turns."""

    _threads: Threads
    _kept: deque[_Call] = attrs.field(factory=deque)
    _busy: bool = False

    def __len__(self) -> int:
        return len(self._kept)

    async def attempt(
        self,
        what: str,
        make: Callable[..., object],
        *arguments: Any,
        made: Callable[[], object] = lambda: None,
    ) -> None:
        """Make a call; keep it where it raises OSError, which is logged, with `what` it is for."""
        try:
            await self._threads.run(make, *arguments)
        except OSError as error:
            words = "{what} is not done yet, and tried again: {error}"
            log.error(words, what=what, error=error)  # noqa: TRY400  (no defect: no traceback)
            self._kept.append(_Call(what, make, arguments, made))
        else:
            made()

    def settle(self) -> None:
        """Begin to make the call that has waited longest, unless one is being made again."""
        if self._kept and not self._busy:
            self._busy = True
            again = Deferred.fromCoroutine(self._again(self._kept.popleft()))
            again.addErrback(lambda failure: log.failure("what was left to be done", failure))

    async def _again(self, call: _Call) -> None:
        try:
            await self._threads.run(call.make, *call.arguments)
        except OSError:
            self._kept.append(call)
        else:
            log.info("{what} is done now", what=call.what)
            call.made()
        finally:
            self._busy = False
