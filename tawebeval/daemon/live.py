"""Which settings change while the daemon runs, and which only where it is started anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tawebeval.config import Configuration, Section

LIVE = frozenset(
    {
        *("callers.origins", "callers.running", "callers.queued", "callers.kept"),
        "callers.requests_per_minute",
        *("repositories.allow_hosts", "repositories.deny_hosts", "repositories.private_networks"),
        *("evaluations.queued", "evaluations.paused", "evaluations.abandon_after"),
        *("evaluations.retain", "evaluations.kept", "evaluations.environment"),
        *(f"limits.{name}" for name in Configuration().limits.__struct_fields__),
        "buffers.page",
        *("http.connections_per_address", "http.line", "http.headers", "http.header_bytes"),
        *("http.head_deadline", "http.window", "http.rate", "http.idle"),
        *("polls.wait", "polls.older", "streams.heartbeat"),
        *("log.level", "log.access", "health.free_disk"),
    }
)
"""The paths of those that count as soon as they are read again. All others have been built into
something: sockets, directories, what the sandbox shows, how memory and places were divided."""


def differences(one: Configuration, other: Configuration) -> Iterator[str]:
    """Yield the path of each setting of which the two have different values, in their order."""
    for path, before, after in _pairs(one, other):
        if before != after:
            yield path


def adopt(running: Configuration, wanted: Configuration) -> Configuration:
    """Return what is to hold: of what is live the `wanted` values, and the `running` others."""
    changed: dict[str, Any] = {}
    for name in running.__struct_fields__:
        section, new = getattr(running, name), getattr(wanted, name)
        if isinstance(section, Section):
            live = {
                key: getattr(new, key)
                for key in section.__struct_fields__
                if f"{name}.{key}" in LIVE
            }
            changed[name] = msgspec.structs.replace(section, **live)
    return msgspec.structs.replace(running, **changed)


def _pairs(one: Section, other: Section, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name in one.__struct_fields__:
        before, after = getattr(one, name), getattr(other, name)
        if isinstance(before, Section):
            yield from _pairs(before, after, f"{name}.")
        else:
            yield prefix + name, before, after
