"""The ends of evaluations, told to who wants to know of them, where there are callbacks."""

from __future__ import annotations

import attrs
import orjson

from tawebeval.callback import Callback
from tawebeval.callbacks import Callbacks
from tawebeval.errors import InvalidField
from tawebeval.evaluation import Evaluation
from tawebeval.status import status


@attrs.frozen
class Telling:
    """Tells by `callbacks`, which are None where the operator has not enabled them."""

    _callbacks: Callbacks | None = None

    def expect(self, url: str | None, caller: str) -> Callback | None:
        """Return the callback that a form asks for, if it does. Raises InvalidField."""
        if url is None:
            return None
        if self._callbacks is None:
            raise InvalidField("callback_url", "there are no callbacks here ([callbacks] enabled)")
        return self._callbacks.expect(url, caller)

    def tell(self, evaluation: Evaluation) -> None:
        """Tell, if it was asked for, that nothing is left of an evaluation but its events."""
        callback = evaluation.callback
        if self._callbacks is not None and callback is not None:
            self._callbacks.send(
                callback, evaluation.name, lambda: orjson.dumps(status(evaluation, None))
            )
