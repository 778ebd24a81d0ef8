"""Hooks of MkDocs (`make docs`): what is outside of `docs/` joins the site.

A link in a document is a path in the repository. Each linked file outside `docs/` is a page, or a
file, of the site below `repository/`, and links to and from such files are changed accordingly. The
API reference that the daemon serves at `/docs` is in `reference/`.

The site links to the repository that `REPOSITORY_URL` names, or that the checkout was cloned from.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation, Section

from tawebeval.web.routes import OPENAPI_PATH, STATIC_RESOURCES

ROOT = Path(__file__).resolve().parent.parent
REFERENCE_FILES = re.compile(r"/static/(docs\.|icon\.|vendor-(swagger-ui|licences)\.)")
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


def on_config(config: Any) -> None:
    """Name the repository, unless nothing tells where people find it."""
    command = ("git", "-C", str(ROOT), "config", "remote.origin.url")
    origin = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    url = os.environ.get("REPOSITORY_URL", origin)
    if url.startswith("https://"):
        config.repo_url = url.removesuffix(".git")


def on_nav(nav: Navigation, **_: Any) -> None:
    """Add the API reference, which is no page of MkDocs, behind the page on the API."""
    for section in nav.items:
        titles = [item.title for item in section.children or ()]
        if isinstance(section, Section) and "API" in titles:
            link = Link("API reference", "reference/index.html")
            section.children.insert(titles.index("API") + 1, link)


def on_post_build(config: Any) -> None:
    """Write the API reference, from which a reader of the site sends no requests."""
    folder = Path(config.site_dir, "reference")
    (folder / "static").mkdir(parents=True)
    page = STATIC_RESOURCES["/docs"].content
    shown = page.replace(b'<div id="reference">', b'<div id="reference" data-static>')
    assert shown != page
    (folder / "index.html").write_bytes(shown)
    for path, resource in STATIC_RESOURCES.items():
        if path == OPENAPI_PATH or REFERENCE_FILES.match(path):
            Path(f"{folder}{path}").write_bytes(resource.content)


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
