"""The settings that all clients share, and their defaults."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import attrs

from tawebeval.core.backoff import Backoff

REQUEST_BACKOFF = Backoff(
    max_attempts=7, first_delay_seconds=0.5, max_delay_seconds=10, max_retry_after_seconds=120
)
"""Attempts of a request: about 10 seconds in all, unless the server asks for more."""
FOLLOW_BACKOFF = Backoff(
    max_attempts=40, first_delay_seconds=0.5, max_delay_seconds=30, max_retry_after_seconds=600
)
"""Attempts of a request for events: about 10 minutes in all, as an evaluation waits as long."""


def normalize_server_url(server: str) -> str:
    """Return the URL of a server without trailing slashes. Raises ValueError."""
    try:
        parts = urlsplit(server)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment or "@" in parts.netloc:
        example = "https://judge.example.org"
        if re.fullmatch(r"[A-Za-z0-9.-]+(:[0-9]+)?", server):
            example = f"http://{server}"
        shown = re.sub("(?s)^(https?://)?.*@", r"\1***@", server)  # without a password
        raise ValueError(f"{shown!r} is not the URL of a server, such as {example}")
    return server.rstrip("/")


def _check_token(client: ClientSettings, _: object, token: str | None) -> None:
    if token and not re.fullmatch(r"[!-~]+", token):
        raise ValueError("a token is one word of ASCII characters without spaces")


@attrs.define(eq=False, slots=False)
class ClientSettings:
    """The server that a client sends its requests to, and how the client repeats them.

    - `server`: its URL, http or https. Raises ValueError for any other.
    - `token`: the bearer token; None or empty sends none. Raises ValueError for spaces in it.
    - `request_backoff`, `events_backoff`: the back-off of requests, and of those for events. A
      request is repeated when no response comes, a broken one, or one that says "later" (429, 5xx),
      never before its `Retry-After`.
    - `on_retry(why, seconds)`: called before each pause.
    - `on_recovery()`: called when a response comes after a pause.
    - `on_upload(sent, total)`: called for each piece of a form that is sent, in bytes.
    - `draw_random()`: returns a number from 0 to 1, for the jitter of pauses.
    - `get_time()`: returns seconds since the epoch.

    A refused request raises `Refused` at once. `Unavailable` says that the attempts are used up,
    that the server asks for a longer pause than `max_retry_after_seconds`, that no tawebeval
    answers, or that nothing listens at a loopback address from which no response has come before.
    Requests for events are repeated also then. No redirect is followed: the token reaches no other
    server.
    """

    server: str = attrs.field(converter=normalize_server_url)
    token: str | None = attrs.field(default=None, repr=False, validator=_check_token)
    request_backoff: Backoff = attrs.field(default=REQUEST_BACKOFF, kw_only=True, repr=False)
    events_backoff: Backoff = attrs.field(default=FOLLOW_BACKOFF, kw_only=True, repr=False)
    on_retry: Callable[[str, float], object] = attrs.field(
        default=lambda why, seconds: None, kw_only=True, repr=False
    )
    on_recovery: Callable[[], object] = attrs.field(default=lambda: None, kw_only=True, repr=False)
    on_upload: Callable[[int, int], object] = attrs.field(
        default=lambda sent, total: None, kw_only=True, repr=False
    )
    draw_random: Callable[[], float] = attrs.field(default=random.random, kw_only=True, repr=False)
    get_time: Callable[[], float] = attrs.field(default=time.time, kw_only=True, repr=False)
    server_has_answered: bool = attrs.field(default=False, init=False, repr=False)
    """Whether the server has sent any response."""
