"""Callbacks of evaluations that have ended, also over a restart of the daemon."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import attrs
import orjson
from twisted.logger import Logger

from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.evaluations.run_keeper import RunKeeper
from tawebeval.evaluations.snapshot import UndeliveredCallback
from tawebeval.evaluations.status import build_status
from tawebeval.webhooks.callback import CallbackRecord
from tawebeval.webhooks.deliveries import CallbackQueue

log = Logger()


@attrs.define(eq=False)
class EvaluationCallbacks:
    """Deliverer of the status documents of ended evaluations to the URLs in their forms.

    With a keeper, documents that are not delivered yet outlive the daemon.
    """

    callback_queue: CallbackQueue
    _keeper: RunKeeper | None
    # Those of an earlier process whose evaluations are still to be restored, by their names.
    _undelivered: dict[str, UndeliveredCallback] = attrs.field(factory=dict)

    def start_delivery(self, evaluation: Evaluation) -> None:
        """Send the callback of an evaluation that has ended, if its form asks for one."""
        callback, name = evaluation.details.callback, evaluation.details.log_name
        if callback is None:
            return
        kept = self._undelivered.pop(name, None)
        if callback.state.is_final:
            self._drop(name)
            return

        def make_document() -> bytes:
            if kept is not None:
                return kept.document
            document = orjson.dumps(build_status(evaluation, None))
            self._keep(callback, name, document)
            return document

        def on_end() -> None:
            evaluation.save_snapshot()
            self._drop(name)

        if kept is not None:
            callback.webhook_id = kept.webhook_id
        self.callback_queue.start_delivery(callback, name, make_document, on_end)

    def resume_deliveries(
        self, undelivered: Mapping[str, UndeliveredCallback], known_names: Collection[str]
    ) -> None:
        """Go on with callbacks of an earlier process, by the names of their evaluations.

        Those of the evaluations in `known_names` wait for `start_delivery`; the others are of
        forgotten evaluations, and are delivered again at once.
        """
        for name, kept in undelivered.items():
            if name in known_names:
                self._undelivered[name] = kept
            else:
                self.callback_queue.start_delivery(
                    CallbackRecord(kept.url, kept.caller, webhook_id=kept.webhook_id),
                    name,
                    partial(bytes, kept.document),
                    partial(self._drop, name),
                )

    def _keep(self, callback: CallbackRecord, name: str, document: bytes) -> None:
        """Keep a callback and its document for another process of the daemon."""
        if self._keeper is not None:
            kept = UndeliveredCallback(callback.url, callback.caller, callback.webhook_id, document)
            try:
                self._keeper.keep_callback(name, kept.pack())
            except OSError as error:
                words = "{evaluation}: the callback does not outlive the daemon: {error}"
                log.error(words, evaluation=name, error=error)  # noqa: TRY400

    def _drop(self, name: str) -> None:
        if self._keeper is not None:
            self._keeper.drop_callback(name)
