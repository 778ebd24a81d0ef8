"""URLs of the submodules of a commit.

A submodule is a commit of another repository, which `.gitmodules` names (gitmodules(5)). Both come
from the author of the commit, a stranger.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

import attrs

from tawebeval.core.checkout import Commit
from tawebeval.core.hosts import parse_server_address
from tawebeval.errors import EvaluationFailure, format_size

_MAX_BYTES = 60 * 1024  # of the list of .gitmodules; the end of 64 KiB is kept of stdout
_KEY = re.compile(r"submodule\.(.*)\.(path|url)", re.DOTALL)
_PREFIX = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^/]*/|[^/]*:|/?)(.*)", re.DOTALL)


def build_submodule_list_command(oid: str) -> Sequence[str]:
    """Return the git command whose stdout `add_submodule_urls` reads."""
    return "config", f"--blob={oid}:.gitmodules", "--no-includes", "--null", "--list"


def add_submodule_urls(commit: Commit, printed: str) -> Commit:
    """Return the commit, with the URLs of its submodules in the settings of `.gitmodules`.

    `printed` has U+FFFD for bytes that are not UTF-8. Raises: EvaluationError, also if the list is
    over 60 KiB.
    """
    if len(printed.encode()) > _MAX_BYTES:
        raise EvaluationFailure(
            "repository", f"the commit's .gitmodules is over {format_size(_MAX_BYTES)}"
        )
    modules: dict[str, dict[str, str]] = {}
    for setting in printed.split("\0"):
        key, _, value = setting.partition("\n")
        if found := _KEY.fullmatch(key):
            modules.setdefault(found[1], {})[found[2]] = value
    urls = {
        module["path"].rstrip("/"): module["url"]
        for module in modules.values()
        if {"path", "url"} <= module.keys()
    }
    found_all = []
    for submodule in commit.submodules:
        printed_path = submodule.path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if printed_path not in urls:
            raise EvaluationFailure(
                "repository",
                f"the submodule at {submodule.path!r} has no URL in .gitmodules; add it there, or"
                " remove the submodule from the commit",
                {"path": submodule.path},
            )
        found_all.append(attrs.evolve(submodule, url=urls[printed_path]))
    return attrs.evolve(commit, submodules=tuple(found_all))


def resolve_submodule_url(url: str, parent: str) -> str:
    """Return the URL of a submodule of the repository at `parent`.

    A relative one begins with `./` or `../` (gitmodules(5)). Raises: ValueError, with a message
    for people.
    """
    if url.startswith(("./", "../")):
        found = _PREFIX.fullmatch(parent)
        assert found is not None, "it matches any text"
        start, path = found.groups()
        joined = posixpath.normpath(posixpath.join(path.rstrip("/"), url))
        if joined.startswith(".."):
            raise ValueError("leads out of its server")
        return start + joined
    # As git does by itself: a network must not choose files of this machine.
    if parse_server_address(url) is None and parse_server_address(parent) is not None:
        raise ValueError("is a path; a repository on a network cannot have one")
    return url
