"""From a URL to the one address that git may connect to: looked up once, checked, kept to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from os.path import abspath, realpath
from pathlib import Path
from typing import Any

import attrs

from tawebeval.core.hosts import HostPolicy, Route, Target, path_of, route, target_of
from tawebeval.errors import EvaluationError, ForbiddenHost
from tawebeval.git.credentials import Credential, Login
from tawebeval.resolver import LOOKUP, Addresses, LookupFailed, Resolver, UnknownHost

# Through these a process could be asked for what it has open.
KERNEL = tuple(map(Path, ("/proc", "/sys", "/dev")))


@attrs.define
class Remotes:
    """Holds URLs against the operator's rules.

    `own` are directories of the daemon, absolute and without symbolic links.
    """

    policy: HostPolicy
    _resolver: Resolver
    _clock: Any
    _own: Sequence[Path] = ()

    @property
    def _addresses(self) -> Addresses:
        """By the rules as they are now; a look-up keeps to those that it began with."""
        return Addresses(self.policy, self._resolver, self._clock)

    def check(self, url: str) -> bool:
        """Check what the URL itself tells; return whether it leads over a network.

        Raises EvaluationError.
        """
        return self._target(url) is not None

    async def route(
        self, url: str, credential: Credential | None = None, within: float = LOOKUP
    ) -> tuple[Route, Login | None]:
        """Return how git is to reach the repository, and what it says there when it is asked.

        Its host is looked up `within` so many seconds. Raises EvaluationError.
        """
        target = self._target(url)
        if target is None:
            path = path_of(url)
            # As git looks for it, which takes `x.git` for `x`, too.
            return Route(url, source=path, readable=(path, f"{path}.git")), None
        try:
            address = await self._addresses.find(target, within)
        except (ForbiddenHost, UnknownHost) as error:
            raise EvaluationError("repository", str(error)) from None
        except LookupFailed as error:
            raise EvaluationError("lost", str(error), is_alarming=False) from None
        if credential is None:
            return route(url, target, address), None
        login = credential.login(target, address)
        found = route(url, target, address, credential.ssh_options)
        return attrs.evolve(found, readable=credential.files), login

    def check_source(self, path: str) -> None:
        """Look whether a repository of this machine is one to serve. Blocks.

        Raises EvaluationError for the daemon's own directories, for what has them in it, and for
        what cannot be looked at, with which git's sandbox would not start.
        """
        names = (path, f"{path}.git")
        for name in names:
            try:
                os.stat(name)
            except (FileNotFoundError, NotADirectoryError):
                pass  # git says what it looks for
            except OSError as error:
                message = f"the repository {path} cannot be read: {error.strerror}"
                raise EvaluationError("repository", message) from None
        places = [Path(find(name)) for name in names for find in (abspath, realpath)]
        for own in (*self._own, *KERNEL):
            if any(one.is_relative_to(own) or own.is_relative_to(one) for one in places):
                raise EvaluationError(
                    "repository", f"{path} is no place from which repositories are fetched"
                )

    def _target(self, url: str) -> Target | None:
        try:
            target = target_of(url)
        except ValueError as error:
            raise EvaluationError("repository", f"the repository's URL {error}") from None
        try:
            if target is not None:
                self._addresses.check(target)
        except ForbiddenHost as error:
            raise EvaluationError("repository", str(error)) from None
        return target
