"""Where documents lead: to one another, and to what is shipped with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_LINK = re.compile(r"\]\(([^()\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z]+:|#")


def links(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each document below a folder with each path that it links to."""
    for document in sorted(folder.rglob("*.md")):
        for link in _LINK.findall(document.read_text("utf-8")):
            if not _ELSEWHERE.match(link):
                yield document, link.partition("#")[0]


def leading_nowhere(folder: Path) -> list[str]:
    """Return the links of the documents below a folder to what is not in there."""
    top = folder.resolve()
    found = []
    for document, link in links(folder):
        target = (document.parent / link).resolve()
        if not (target.is_relative_to(top) and target.exists()):
            found.append(f"{document.relative_to(folder)}: {link}")
    return found
