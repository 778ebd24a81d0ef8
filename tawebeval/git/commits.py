"""What git tells of a commit: whether it is there, which tree it has, and how large that is."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tawebeval.core.checkout import Commit
from tawebeval.git.trees import TreeLimits, TreeMeter

_LONGEST = 1024  # bytes of what is kept of a command that says more than it should
_FOUND = re.compile(rb"([0-9a-f]{40}) ([0-9a-f]{40})\n")


def look_at(oid: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return the two commands of git from which `Look` learns of a commit."""
    return (
        ("log", "--no-walk", "--no-show-signature", "--format=%H %T", oid, "--"),
        ("ls-tree", "-r", "-t", "-l", "-z", oid),
    )


class Look:
    """Reads what the commands of `look_at` print, each after the one before has ended well.

    There is a NUL after each but the last one. `before` is how many others precede them, which
    have nothing to say.
    """

    def __init__(self, oid: str, limits: TreeLimits, *, before: int = 0) -> None:
        self._oid = oid
        self._before = before
        self._meter = TreeMeter(limits)
        self._said = [b""]

    def has_begun(self) -> bool:
        """Tell whether those before have ended well."""
        return len(self._said) > self._before

    def feed(self, chunk: bytes) -> None:
        """Take more. Raises EvaluationError as soon as the tree is too large."""
        while not self._is_listing():
            said, nul, chunk = chunk.partition(b"\0")
            self._said[-1] = (self._said[-1] + said)[-_LONGEST:]
            if not nul:
                return
            self._said.append(b"")
        self._meter.feed(chunk)

    def _is_listing(self) -> bool:
        return len(self._said) > self._before + 1

    @property
    def commit(self) -> Commit | None:
        """The commit, if that is what was found, with as much of its tree as was listed."""
        found = _FOUND.fullmatch(self._said[self._before]) if self._is_listing() else None
        # git takes the OID of a tag, too, for the commit that it names.
        if found is None or found[1].decode() != self._oid:
            return None
        return Commit(self._oid, found[2].decode(), self._meter.files, self._meter.size)
