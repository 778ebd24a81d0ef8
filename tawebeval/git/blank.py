"""A bare repository with nothing in it: what `git init` would make, without a process for it.

What that is stands in gitrepository-layout(5). Git itself makes most of the directories when it
needs them, but not everywhere: a fetch from a plain web server relies on `objects/pack`.
"""

from __future__ import annotations

from pathlib import Path

_DIRECTORIES = ("objects", "objects/info", "objects/pack", "refs", "refs/heads", "refs/tags")
_HEAD = "ref: refs/heads/main\n"
_CONFIG = """\
[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = true
"""
# What is checked out is what was committed, whatever the tree's own .gitattributes say.
_AS_COMMITTED = "* -text -ident -filter !working-tree-encoding\n"


def make(path: Path) -> None:
    """Make a blank repository, in a directory that is new. Blocks. Raises OSError."""
    path.mkdir()
    for directory in (*_DIRECTORIES, "info"):
        (path / directory).mkdir()
    (path / "HEAD").write_text(_HEAD)
    (path / "config").write_text(_CONFIG)
    (path / "info" / "attributes").write_text(_AS_COMMITTED)
