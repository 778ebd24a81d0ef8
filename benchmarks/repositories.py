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
    marks = path / "marks"
    for command, given in (
        (["init", "--quiet", "--bare"], ""),
        (["config", "uploadpack.allowAnySHA1InWant", "true"], ""),
        (["fast-import", "--quiet", f"--export-marks={marks}"], "".join(_stream(commits))),
    ):
        subprocess.run(["git", *command], cwd=path, input=given.encode(), check=True)
    by_mark = dict(line.split() for line in marks.read_text().splitlines())
    marks.unlink()
    return [by_mark[f":{number}"] for number in range(1, len(by_mark) + 1)]


def _stream(commits: Iterable[Files]) -> Iterator[str]:
    """Yield the input of `git fast-import`. What it contains is ASCII."""
    for number, files in enumerate(commits, 1):
        yield f"commit refs/heads/main\nmark :{number}\n"
        yield f"committer A <a@localhost> {1_500_000_000 + number} +0000\n"
        yield "data 6\nA step\n"
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
