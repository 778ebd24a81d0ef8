"""Where on its host the API is: at the root, or below a path that a proxy gives it."""

from __future__ import annotations

import re

import attrs

from tawebeval.errors import MovedTo

_SLASHES = re.compile(rb"/+")


def single_slashes(path: bytes) -> bytes:
    """Return a path with one slash for several in a row: clients join paths carelessly."""
    return _SLASHES.sub(b"/", path)


def _pattern(mount: BasePath) -> re.Pattern[bytes] | None:
    if not mount.path:
        return None
    parts = (re.escape(part.encode()) for part in mount.path[1:].split("/"))
    return re.compile(rb"/+%b(?=[/?]|\Z)" % rb"/+".join(parts))  # clients join paths carelessly


@attrs.frozen
class BasePath:
    """The path below which clients find the API, without a slash at its end; empty for the root.

    Requests may have it or not, for some proxies take it away.
    """

    path: str
    _found: re.Pattern[bytes] | None = attrs.field(
        init=False, repr=False, default=attrs.Factory(_pattern, takes_self=True)
    )

    def inside(self, target: bytes) -> bytes:
        """Return the target of a request as it is without the path; the path alone stays."""
        rest = self._rest(target)
        return rest if rest is not None and rest.startswith(b"/") else target

    def check(self, target: bytes) -> None:
        """Raise Elsewhere for the path alone: what is relative to that is not below it."""
        rest = self._rest(target)
        if rest is not None and not rest.startswith(b"/"):
            raise MovedTo(f"{self.path}/")

    def _rest(self, target: bytes) -> bytes | None:
        """Return what follows the path, None if the target is not below it."""
        found = None if self._found is None else self._found.match(target)
        return None if found is None else target[found.end() :]
