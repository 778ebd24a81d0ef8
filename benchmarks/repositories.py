"""Repositories for evaluators: bare, and written by `git fast-import`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

Files = Iterable[tuple[str, str]]
"""Paths, and what is in them."""


def make(path: Path, commits: Iterable[Files]) -> Sequence[str]:
    """Make a bare repository of commits, each with these files besides those before it.

    Returns their OIDs. It hands out any commit by its OID.
    """
    path.mkdir()
    for command in (
        ["init", "--quiet", "--bare"],
        ["config", "uploadpack.allowAnySHA1InWant", "true"],
    ):
        subprocess.run(["git", *command], cwd=path, check=True)
    return add(path, commits)


def add(path: Path, commits: Iterable[Files], parent: str = "") -> Sequence[str]:
    """Add commits to a repository, in one pack, after the commit `parent`; return their OIDs."""
    marks = path / "marks"
    command = ["git", "-c", "fastimport.unpackLimit=1", "fast-import", "--quiet"]
    command.append(f"--export-marks={marks}")
    given = "".join(_stream(commits, parent)).encode()
    subprocess.run(command, cwd=path, input=given, check=True)
    by_mark = dict(line.split() for line in marks.read_text().splitlines())
    marks.unlink()
    return [by_mark[f":{number}"] for number in range(1, len(by_mark) + 1)]


def _stream(commits: Iterable[Files], parent: str) -> Iterator[str]:
    """Yield the input of `git fast-import`. What it contains is ASCII."""
    for number, files in enumerate(commits, 1):
        yield f"commit refs/heads/main\nmark :{number}\n"
        yield f"committer A <a@localhost> {1_500_000_000 + number} +0000\n"
        yield "data 6\nA step\n"
        if parent and number == 1:
            yield f"from {parent}\n"
        for path, content in files:
            yield f"M 100644 inline {path}\ndata {len(content)}\n{content}\n"


def tree(files: int) -> Files:
    """Return so many files, a few hundred bytes each, in directories of twenty."""
    for number in range(files):
        yield _path(number), f"This is file {number}.\n" * 20


def history(commits: int, files: int) -> Iterator[Files]:
    """Yield a tree of so many files, and then one of them, changed, for each commit."""
    yield tree(files)
    for number in range(1, commits):
        yield [(_path(number % files), f"Step {number}.\n" * 40)]


def _path(number: int) -> str:
    return f"part-{number // 20}/file-{number}.txt"
