"""Hooks of MkDocs (`make docs`): documents outside `docs/` join the site.

A link in a document is a path in the repository. Each linked file outside `docs/` is a page, or a
file, of the site below `repository/`, and links to and from such files are changed accordingly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()[^()\s#:]+(?=[#)])")


def links(document: Path) -> Iterator[Path]:
    """Yield the files in the repository to which a document links."""
    for link in LINK.findall(document.read_text("utf-8")):
        target = (document.parent / link).resolve()
        if target.is_file() and target.is_relative_to(ROOT):
            yield target


def place(path: Path) -> str:
    """Return the path in the site of a path in the repository."""
    if path.is_relative_to(DOCS):
        return str(path.relative_to(DOCS))
    return f"repository/{os.path.relpath(path, ROOT)}"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files outside `docs/` to which documents link, directly or by one another."""
    documents = sorted(DOCS.rglob("*.md"))
    found = set(documents)
    for document in documents:
        for target in links(document):
            if target in found:
                continue
            found.add(target)
            if not target.is_relative_to(DOCS):
                files.append(File.generated(config, place(target), abs_src_path=str(target)))
            if target.suffix == ".md":
                documents.append(target)  # this loop comes to it
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Change the links of a page from paths in the repository to paths in the site."""
    folder = Path(page.file.abs_src_path).parent
    here = os.path.dirname(page.file.src_uri)
    return LINK.sub(
        lambda link: os.path.relpath(place((folder / link[0]).resolve()), here or "."), markdown
    )
