"""Callbacks of evaluations that have ended, also over a restart of the daemon."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial

import attrs
import orjson

from tawebeval.errors import StoreError
from tawebeval.evaluations.database import PendingCallback
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.status import build_status
from tawebeval.evaluations.store import EvaluationStore
from tawebeval.webhooks.callback import CallbackRecord
from tawebeval.webhooks.deliveries import CallbackQueue


@attrs.define(eq=False)
class EvaluationCallbacks:
    """Deliverer of the status documents of ended evaluations to the URLs in their forms.

    Documents that are not delivered yet are in the store, and outlive the daemon.
    """

    callback_queue: CallbackQueue
    _store: EvaluationStore | None
    # Those of an earlier process whose evaluations are still to be restored, by their names.
    _undelivered: dict[str, PendingCallback] = attrs.field(factory=dict)

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
            evaluation.save()
            self._drop(name)

        if kept is not None:
            callback.webhook_id = kept.webhook_id
        self.callback_queue.start_delivery(
            callback, name, make_document, on_end, self._wait_for_commit
        )

    async def _wait_for_commit(self) -> None:
        """Return once the document is stored: another process would send another one."""
        if self._store is not None:
            with suppress(StoreError):  # the disk is full; the receiver need not wait for it
                await self._store.flush()

    def resume_deliveries(
        self, undelivered: Mapping[str, PendingCallback], known_names: Collection[str]
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
        if self._store is not None:
            pending = PendingCallback(callback.url, callback.caller, callback.webhook_id, document)
            self._store.save_callback(name, pending)

    def _drop(self, name: str) -> None:
        if self._store is not None:
            self._store.delete_callback(name)
