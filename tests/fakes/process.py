"""A process whose rights are only written down, and which keeps the kernel's rules of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tawebeval.linux.privileges import CAP_NET_BIND_SERVICE, CurrentProcess

PORTS = 1 << CAP_NET_BIND_SERVICE
EVERYTHING = 0x1FF_FFFF_FFFF


class FakeProcess(CurrentProcess):
    """A process of the user and group `uid`; `calls` are the names of what was changed.

    Methods whose names are in `refused` raise PermissionError, those in `ignored` do nothing.
    """

    def __init__(self, uid: int = 1000, capabilities: int | None = None) -> None:
        self.users = self.gids = (uid, uid, uid)
        self.supplementary = frozenset({uid})
        if capabilities is None:
            capabilities = 0 if uid else EVERYTHING
        self.permitted = capabilities
        self.bounding = EVERYTHING
        self.kept = self.hidden = self.gains_nothing = False
        self.variables: dict[str, str] = {}
        self.running_threads = 1
        self.calls: list[str] = []
        self.refused: set[str] = set()
        self.ignored: set[str] = set()

    def _call(self, name: str) -> bool:
        self.calls.append(name)
        if name in self.refused:
            raise PermissionError(1, "Operation not permitted")
        return name not in self.ignored

    def get_user_ids(self) -> tuple[int, int, int]:
        return self.users

    def get_group_ids(self) -> tuple[int, int, int]:
        return self.gids

    def get_supplementary_groups(self) -> frozenset[int]:
        return self.supplementary

    def count_threads(self) -> int:
        return self.running_threads

    def get_capabilities(self) -> int:
        return self.permitted

    def is_tracing_forbidden(self) -> bool:
        return self.hidden

    def allow_change(self, now: tuple[int, ...], then: Iterable[int]) -> None:
        if self.users[1] and not set(then) <= {*now, -1}:
            raise PermissionError(1, "Operation not permitted")

    def set_supplementary_groups(self, groups: Iterable[int]) -> None:
        if self._call("groups"):
            if self.users[1]:
                raise PermissionError(1, "Operation not permitted")
            self.supplementary = frozenset(groups)

    def set_group_ids(self, real: int, effective: int, saved: int) -> None:
        if self._call("gid"):
            self.allow_change(self.gids, (real, effective, saved))
            self.gids = _changed(self.gids, (real, effective, saved))

    def set_user_ids(self, real: int, effective: int, saved: int) -> None:
        if self._call("uid"):
            self.allow_change(self.users, (real, effective, saved))
            self.users = _changed(self.users, (real, effective, saved))
            self.hidden = False
            if not self.kept and 0 not in self.users:
                self.permitted = 0

    def set_environment(self, variables: Mapping[str, str]) -> None:
        self.variables.update(variables)

    def set_capabilities(self, capabilities: int) -> None:
        if self._call("capabilities"):
            if capabilities & ~self.permitted:
                raise PermissionError(1, "Operation not permitted")
            self.permitted = capabilities

    def keep_capabilities(self) -> None:
        self.kept = self._call("keep")

    def empty_bounding_set(self) -> None:
        if self._call("bounding"):
            self.bounding = 0

    def set_no_new_privileges(self) -> None:
        self.gains_nothing = self._call("no new")

    def forbid_tracing(self) -> None:
        self.hidden = self._call("hide")


def _changed(now: tuple[int, int, int], then: Iterable[int]) -> tuple[int, int, int]:
    real, effective, saved = (old if new == -1 else new for old, new in zip(now, then, strict=True))
    return real, effective, saved
