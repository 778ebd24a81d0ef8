"""Callbacks that are sent nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from tawebeval.deferreds import run_in_background
from tawebeval.errors import InvalidField
from tawebeval.webhooks.records import CallbackRecord, CallbackState


class FakeCallbacks:
    """Notes what is to be sent, and lets callers have callbacks or not."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.expected: list[tuple[str, str]] = []
        self.refuse = False

    def create_callback(self, url: str, caller: str) -> CallbackRecord:
        if self.refuse:
            raise InvalidField("callback_url", "the host is forbidden")
        self.expected.append((url, caller))
        return CallbackRecord(url, caller)

    def start_delivery(
        self,
        callback: CallbackRecord,
        evaluation: str,
        on_end: Callable[[], object],
        store: Callable[[], Coroutine[Deferred[Any], Any, object]],
    ) -> None:
        callback.state = CallbackState.PENDING
        self.sent.append((evaluation, json.loads(callback.document)))
        run_in_background(store(), Logger(), "the callback is not stored")
