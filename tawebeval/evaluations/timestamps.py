"""Times as clients see them."""

from __future__ import annotations

from datetime import UTC, datetime


def format_rfc3339_time(timestamp: float) -> str:
    """Format a time, in seconds since the epoch, as in RFC 3339."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds")
