"""Stub."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from tawebeval.config import Limits


@attrs.frozen
class Used:
    cpu_seconds: float | None = None
    peak_memory: int | None = None


class Group:
    def entry(self) -> Sequence[str]:
        return ()

    def usage(self) -> Used:
        return Used()

    def exceeded(self) -> Collection[str]:
        return ()

    def kill(self) -> None: ...

    def remove(self) -> None: ...


class Cgroups:
    enforced: frozenset[str] = frozenset()
    problems: Sequence[str] = ()

    def make(self, identifier: str, limits: Limits) -> Group:
        return Group()

    def close(self) -> None: ...
