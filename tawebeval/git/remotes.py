"""Routes from URLs to the addresses that git may connect to: looked up once, checked, pinned."""

from __future__ import annotations

import os
from collections.abc import Sequence
from os.path import abspath, realpath
from pathlib import Path

import attrs
from twisted.logger import Logger

from tawebeval.core.form import check_repository_url
from tawebeval.core.hosts import (
    IPAddress,
    ResolvedGitRemote,
    ServerAddress,
    parse_local_path,
    parse_server_address,
    resolve_git_remote,
)
from tawebeval.errors import EvaluationFailure, ForbiddenHost
from tawebeval.git.credentials import Credential, Login
from tawebeval.git.submodules import resolve_submodule_url
from tawebeval.resolver import LOOKUP_TIMEOUT, CheckedResolver, LookupUnanswered, UnknownHost

log = Logger()

# These lead to files that a process of the daemon has open.
KERNEL_DIRECTORIES = tuple(map(Path, ("/proc", "/sys", "/dev")))


@attrs.frozen
class RemoteResolver:
    """The operator's rules for URLs, and the look-up of their hosts.

    `own`: directories of the daemon, from which nobody fetches; absolute, without symbolic links.
    `protocols`: those allowed, by git's names.
    """

    _addresses: CheckedResolver
    _own: Sequence[Path] = ()
    _protocols: Sequence[str] = ("https",)

    def check_url(self, url: str) -> bool:
        """Check a URL without a look-up; return whether it leads over a network.

        Raises: EvaluationError.
        """
        return self._target(url) is not None

    def resolve_submodule(self, url: str, parent: str) -> str:
        """Return the URL of a submodule of the repository at `parent`, for `check_url`.

        Raises: EvaluationError.
        """
        try:
            found = resolve_submodule_url(url, parent)
            check_repository_url(found, self._protocols)
        except ValueError as error:
            raise EvaluationFailure("repository", f"the URL {url!r:.200} {error}") from None
        return found

    def check_web_url(self, url: str) -> ServerAddress:
        """Return the server of a URL over http or https, as far as these are allowed.

        Raises: EvaluationError.
        """
        allowed = [each for each in self._protocols if each in ("https", "http")]
        try:
            check_repository_url(url, allowed)
        except ValueError as error:
            shown = url.partition("?")[0]  # a signature may follow
            raise EvaluationFailure("repository", f"the URL {shown!r:.200} {error}") from None
        target = self._target(url)
        assert target is not None, "of a URL with a host"
        return target

    async def find_addresses(
        self, target: ServerAddress, timeout: float = LOOKUP_TIMEOUT
    ) -> Sequence[IPAddress]:
        """Return the permitted addresses of a server. Raises: EvaluationError."""
        try:
            return await self._addresses.find_addresses(target, timeout)
        except (ForbiddenHost, UnknownHost) as error:
            raise EvaluationFailure("repository", str(error)) from None
        except LookupUnanswered as error:
            raise EvaluationFailure("lost", str(error), is_daemon_fault=False) from None

    async def resolve_remote(
        self, url: str, credential: Credential | None = None, timeout: float = LOOKUP_TIMEOUT
    ) -> tuple[ResolvedGitRemote, Login | None]:
        """Return the route to a repository, and the login for its server, None without one.

        `timeout`: seconds for the look-up of the host. Raises: EvaluationError.
        """
        target = self._target(url)
        if target is None:
            path = parse_local_path(url)
            # git also finds `x.git` by the name `x`.
            return ResolvedGitRemote(
                url, local_path=path, readable_paths=(path, f"{path}.git")
            ), None
        addresses = await self.find_addresses(target, timeout)
        if credential is None:
            return resolve_git_remote(url, target, addresses), None
        login = credential.make_login(target, addresses)
        found = resolve_git_remote(url, target, addresses, credential.ssh_options)
        return attrs.evolve(found, readable_paths=credential.ssh_files), login

    def check_local_repository(self, path: str) -> None:
        """Check the path of a repository of this machine. Blocks.

        Raises: EvaluationError for the daemon's own directories, what is in them or contains them,
        and for an unreadable path, with which git's sandbox would not start.
        """
        names = (path, f"{path}.git")
        for name in names:
            try:
                os.stat(name)
            except (FileNotFoundError, NotADirectoryError):
                pass  # git reports it
            except OSError as error:
                message = f"cannot read the repository {path}: {error.strerror}"
                raise EvaluationFailure("repository", message) from None
        places = [Path(find(name)) for name in names for find in (abspath, realpath)]
        refused = (*self._own, *KERNEL_DIRECTORIES)
        if any(one.is_relative_to(own) for own in refused for one in places):
            raise EvaluationFailure(
                "repository",
                f"{path} is in a directory of the daemon or the kernel; move the repository",
            )
        for own in refused:
            if any(own.is_relative_to(one) for one in places):
                # Only the operator may learn where the daemon has its directories.
                log.info("refused the repository {path}: it contains {own}", path=path, own=own)
                raise EvaluationFailure(
                    "repository",
                    f"{path} contains a directory of the daemon, which the log names; start the"
                    " daemon with STATE_DIRECTORY and CACHE_DIRECTORY outside of the repository",
                )

    def _target(self, url: str) -> ServerAddress | None:
        try:
            target = parse_server_address(url)
        except ValueError as error:
            raise EvaluationFailure("repository", f"the repository's URL {error}") from None
        try:
            if target is not None:
                self._addresses.check_host(target)
        except ForbiddenHost as error:
            raise EvaluationFailure("repository", str(error)) from None
        return target
