"""Slips in the URLs of repositories: a web page, `git clone URL`, a missing scheme, quotes."""

from __future__ import annotations

import re
from collections.abc import Sequence

_AROUND = " \t\r\n'\"`<>,;"
_MAX_LENGTH = 2048  # characters, as `repository[url]` may have
# Clients choose the text: no pattern may take more than linear time.
# With one slash, with backslashes, or twice.
_WEB_SCHEME = re.compile(r"(?:(https?)\s*:?[/\\]+)+", re.IGNORECASE)
_SSH = re.compile(r"(?:ssh://)?git@([\w.-]++)(?::[0-9]++)?[:/]++(\S++)")
_PLACE = re.compile(r"(?:[^/@\s]*@)?((?:[\w-]+\.)+[A-Za-z][\w-]*(?::[0-9]{1,5})?)/([^\s?#]+).*")
_PAGES = frozenset(
    (
        *("actions", "activity", "blame", "blob", "branches", "commit", "commits", "edit", "forks"),
        *("graphs", "issues", "merge_requests", "network", "projects", "pull", "pulls"),
        *("raw", "releases", "security", "settings", "src", "tags", "tree", "wiki"),
    )
)
_RAW_HOST, _RAW_OF = "raw.githubusercontent.com", "github.com"
_OWNER_AND_NAME = 2  # parts of a path


def guess_repository_url(text: str, protocols: Sequence[str]) -> str | None:
    """Return the URL that was probably meant by `text`, over http or https as `protocols` allow.

    None if `text` is such a URL itself, or nothing can be guessed. No credentials are returned. A
    repository at the URL is not looked for: on some servers, a repository has the URL that others
    give to a web page.
    """
    url = text.strip(_AROUND)
    if len(text) > _MAX_LENGTH or not url.isprintable():
        return None
    url = _find_cloned_url(url)
    scheme = _WEB_SCHEME.match(url)
    protocol, rest = (scheme[1].lower(), url[scheme.end() :]) if scheme else ("https", url)
    if ssh := _SSH.fullmatch(rest):
        rest = f"{ssh[1]}/{ssh[2]}"
    place = _PLACE.fullmatch(rest)
    if place is None:
        return None
    host, path = place[1].lower(), place[2].partition("/-/")[0]
    parts = [part for part in path.split("/") if part]
    if host == _RAW_HOST:
        host, parts = _RAW_OF, parts[:_OWNER_AND_NAME]
    elif _PAGES.intersection(parts[_OWNER_AND_NAME : _OWNER_AND_NAME + 1]):
        parts = parts[:_OWNER_AND_NAME]
    found = f"{protocol}://{host}/{'/'.join(parts)}"
    return found if protocol in protocols and parts and found != text.rstrip("/") else None


def _find_cloned_url(text: str) -> str:
    """Return the URL in a command `git clone URL`, or any other text as it is."""
    words = text.removeprefix("$").split()
    if words[:2] == ["git", "clone"]:
        for word in words[2:]:
            if "://" in word or "@" in word:
                return word.strip(_AROUND)
    return text
