"""A callback as the store keeps it. Without treq, whose import `tawebeval try` would pay for."""

from __future__ import annotations

from enum import Enum

import attrs

from tawebeval.core.hosts import ServerAddress, parse_server_address


class CallbackState(Enum):
    """State of a callback, as the status document shows it (docs/api.md)."""

    WAITING = "waiting"  # the evaluation has not ended
    PENDING = "pending"
    DELIVERED = "delivered"
    REFUSED = "refused"
    GIVEN_UP = "given_up"

    @property
    def is_final(self) -> bool:
        """Whether no attempt will follow."""
        return self not in (CallbackState.WAITING, CallbackState.PENDING)


@attrs.define(eq=False)
class CallbackRecord:
    """A callback and its progress.

    `caller` is the name by which its secret is found. `webhook_id` is its Webhook-Id, `document`
    its body: the same for each attempt, also in another process of the daemon, and empty before the
    first one. `document` is dropped at the end. `last_error` describes the last failed attempt for
    people; None before one has failed. `traceparent` is its header of that name, "" for none.
    """

    url: str
    caller: str
    state: CallbackState = CallbackState.WAITING
    attempt_count: int = 0
    last_error: str | None = None
    webhook_id: str = ""
    document: bytes = attrs.field(default=b"", repr=False)
    traceparent: str = ""

    @property
    def url_without_query(self) -> str:
        """The URL for the status document, without the query, which may be a secret."""
        return self.url.partition("?")[0]

    @property
    def url_origin(self) -> str:
        """The URL for the log: scheme, host and port. The path may be a secret, too."""
        target = parse_callback_url(self.url)
        return f"{target.protocol}://{target.url_host}:{target.port}"


def parse_callback_url(url: str) -> ServerAddress:
    """Parse a URL that the form has accepted for callbacks."""
    target = parse_server_address(url)
    assert target is not None, "only paths have no host"
    return target
