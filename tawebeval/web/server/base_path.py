"""The path prefix of the API behind a proxy."""

from __future__ import annotations

import re

import attrs

from tawebeval.errors import ResourceMoved

_SLASHES = re.compile(rb"/+")


def collapse_slashes(path: bytes) -> bytes:
    """Return a path with one slash in place of several: clients join paths carelessly."""
    return _SLASHES.sub(b"/", path) if b"//" in path else path


def _compile(base_path: BasePath) -> re.Pattern[bytes] | None:
    if not base_path.prefix:
        return None
    parts = (re.escape(part.encode()) for part in base_path.prefix[1:].split("/"))
    return re.compile(rb"/+%b(?=[/?]|\Z)" % rb"/+".join(parts))  # clients join paths carelessly


@attrs.frozen
class BasePath:
    """The prefix of all paths, without a slash at its end; empty = the root of the host.

    Requests may have the prefix or not, since some proxies remove it.
    """

    prefix: str
    _pattern: re.Pattern[bytes] | None = attrs.field(
        init=False, repr=False, default=attrs.Factory(_compile, takes_self=True)
    )

    def strip_prefix(self, target: bytes) -> bytes:
        """Return a request target without the prefix; unchanged if it is only the prefix."""
        rest = self._rest(target)
        return rest if rest is not None and rest.startswith(b"/") else target

    def require_trailing_slash(self, target: bytes) -> None:
        """Raise ResourceMoved if the target is only the prefix, without a slash.

        Relative links of a page there would lead out of the prefix.
        """
        rest = self._rest(target)
        if rest is not None and not rest.startswith(b"/"):
            raise ResourceMoved(f"{self.prefix}/")

    def _rest(self, target: bytes) -> bytes | None:
        """Return the part of a target behind the prefix; None if it has none."""
        found = None if self._pattern is None else self._pattern.match(target)
        return None if found is None else target[found.end() :]
