"""Who is let in: callers, and those who read the metrics; or whoever can reach the daemon."""

from __future__ import annotations

import os
from typing import Any

from twisted.logger import Logger

from tawebeval.config import Configuration
from tawebeval.web.auth import Access, Rate, find_metrics_tokens, find_tokens
from tawebeval.web.exposure import check_endpoints

log = Logger()


def open_access(configuration: Configuration, clock: Any) -> Access:
    """Return who may call. Raises ConfigurationError for tokens that cannot be read."""
    callers = configuration.callers
    source = find_tokens(callers, os.environ)
    return Access(Rate(callers.requests_per_minute, clock.seconds), source)


def open_readers(configuration: Configuration, clock: Any) -> Access | None:
    """Return who may read the metrics by a token, None where that does not go by tokens.

    Raises ConfigurationError for tokens that cannot be read.
    """
    source = find_metrics_tokens(configuration.metrics, os.environ)
    return None if source is None else Access(Rate(0, clock.seconds), source, "metrics.tokens")


def check_exposure(configuration: Configuration) -> None:
    """Look at who can reach a daemon without tokens. Raises ConfigurationError if it is many."""
    if configuration.callers.open:
        log.warn("there are no tokens, and callers.open is true: anybody may run programs here")
        return
    for endpoint in check_endpoints(configuration.listen):
        log.warn(
            "there are no tokens: whoever can reach the socket of {endpoint} may run programs here",
            endpoint=endpoint,
        )
