"""Callbacks that are sent nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

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
        document: Callable[[], bytes],
        on_end: Callable[[], object] = lambda: None,
        wait_until_stored: Callable[[], object] = lambda: None,
    ) -> None:
        callback.state = CallbackState.PENDING
        self.sent.append((evaluation, json.loads(document())))
