"""What of the git checkout that somebody works in a server would have to fetch. Blocks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import attrs


class NoCheckout(Exception):
    """There is nothing here to be fetched; `str()` says why, and what to do."""


@attrs.frozen
class Checkout:
    """`repository` is the URL of `origin`, `commit` that of HEAD, `directory` where we are in it.

    `warnings` are sentences about what a server would not see.
    """

    repository: str
    commit: str
    directory: str
    warnings: tuple[str, ...]


def look(folder: Path) -> Checkout:
    """Return what the checkout around `folder` would be evaluated from. Raises NoCheckout."""
    try:
        directory = _git(folder, "rev-parse", "--show-prefix")
    except (OSError, subprocess.CalledProcessError):
        raise NoCheckout(
            "this is no git checkout: give --repository and --commit, or go into one"
        ) from None
    try:
        commit = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    except subprocess.CalledProcessError:
        raise NoCheckout("nothing is committed in this checkout yet") from None
    try:
        repository = _git(folder, "remote", "get-url", "origin")
    except subprocess.CalledProcessError:
        raise NoCheckout("this checkout has no remote `origin`: give --repository") from None
    if "://" in repository and urlsplit(repository).password is not None:
        raise NoCheckout(
            "the URL of `origin` contains a password, which is not sent to anybody: give "
            "--repository without it"
        )
    return Checkout(repository, commit, directory.rstrip("/"), tuple(_warnings(folder, commit)))


def _warnings(folder: Path, commit: str) -> list[str]:
    found = []
    known = "for-each-ref", "--count=1", f"--contains={commit}", "refs/remotes/origin"
    if not _git(folder, *known):
        found.append("HEAD is not pushed to origin, as far as is known here: git push")
    if _git(folder, "status", "--porcelain"):
        found.append("what is changed here and not committed is not evaluated")
    return found


def _git(folder: Path, *arguments: str) -> str:
    """Return what git prints. Raises CalledProcessError, and OSError without a git."""
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env={**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        errors="surrogateescape",
        check=True,
    ).stdout.removesuffix("\n")
