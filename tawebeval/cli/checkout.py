"""What of the git checkout that somebody works in a server would have to fetch. Blocks."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import attrs

_USER = re.compile(r"(?i)(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<user>[^/?#]*)@")


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


def look(folder: Path, repository: str | None = None, commit: str | None = None) -> Checkout:
    """Return what the checkout around `folder` would be evaluated from. Raises NoCheckout.

    A repository or a commit that is given takes the place of the checkout's own.
    """
    try:
        inside, directory = _git(
            folder, "rev-parse", "--is-inside-work-tree", "--show-prefix"
        ).split("\n", 1)
    except (OSError, ValueError, subprocess.CalledProcessError):
        inside, directory = "", ""
    if inside != "true":
        raise NoCheckout("this is no git checkout: give --repository and --commit, or go into one")
    own_repository, own_commit = repository is None, commit is None
    if commit is None:
        try:
            commit = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        except subprocess.CalledProcessError:
            raise NoCheckout("nothing is committed in this checkout yet") from None
    if repository is None:
        try:
            repository = _git(folder, "remote", "get-url", "origin")
        except subprocess.CalledProcessError:
            raise NoCheckout("this checkout has no remote `origin`: give --repository") from None
        if _names_secret(repository):
            raise NoCheckout(
                "the URL of `origin` contains a password or a token, which is not sent to anybody: "
                "give --repository without it"
            )
    warnings = []
    if own_repository and _is_unpushed(folder, commit):
        name = "HEAD" if own_commit else "the commit"
        warnings.append(f"{name} is not pushed to origin, as far as is known here: git push")
    if own_commit and _is_changed(folder):
        warnings.append("what is changed here and not committed is not evaluated")
    return Checkout(repository, commit, directory.rstrip("/"), tuple(warnings))


def without_user(url: str) -> str:
    """Return a URL without whoever is named in it, so that it can be shown."""
    return _USER.sub(r"\g<scheme>://", url, count=1)


def _names_secret(url: str) -> bool:
    """Tell whether a URL may have a secret in it. Over http a user's name alone is a token."""
    found = _USER.match(url)
    return found is not None and (
        found["scheme"].lower() in ("http", "https") or ":" in found["user"]
    )


def _is_unpushed(folder: Path, commit: str) -> bool:
    """Tell whether origin, as far as it is known here, lacks a commit that is here."""
    known = "for-each-ref", "--count=1", f"--contains={commit}", "refs/remotes/origin"
    try:
        return not _git(folder, *known)
    except subprocess.CalledProcessError:  # there is no such commit here
        return False


def _is_changed(folder: Path) -> bool:
    try:
        return bool(_git(folder, "status", "--porcelain"))
    except subprocess.CalledProcessError:  # what is staged cannot be read: git itself will say so
        return True


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
