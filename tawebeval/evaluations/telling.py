"""The ends of evaluations, told to who wants to know of them."""

from __future__ import annotations

import attrs
import orjson

from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.evaluations.status import status
from tawebeval.webhooks.callback import Callback
from tawebeval.webhooks.deliveries import Callbacks


@attrs.frozen
class Telling:
    """Tells by callbacks."""

    _callbacks: Callbacks

    def expect(self, url: str | None, caller: str) -> Callback | None:
        """Return the callback that a form asks for, if it does. Raises InvalidField."""
        return None if url is None else self._callbacks.expect(url, caller)

    def tell(self, evaluation: Evaluation) -> None:
        """Tell, if it was asked for, that nothing is left of an evaluation but its events."""
        callback = evaluation.callback
        if callback is not None:
            self._callbacks.send(
                callback, evaluation.name, lambda: orjson.dumps(status(evaluation, None))
            )
