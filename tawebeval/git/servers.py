"""Questions to git servers, which need no repository of the cache, and why fetches fail."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

from tawebeval.core.form import Repository
from tawebeval.core.hosts import ResolvedGitRemote
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import EvaluationFailure
from tawebeval.git.command import GitResult, GitRunner
from tawebeval.git.credentials import Credential, Login
from tawebeval.git.fetch_limits import FetchLimits
from tawebeval.git.remotes import RemoteResolver
from tawebeval.git.stderr_patterns import explain_fetch_failure, explain_redirect, is_redirect
from tawebeval.resolver import LOOKUP_TIMEOUT
from tawebeval.sandbox.helper_sandbox import SandboxAccess

# An operator who allows `file` means repositories of other users, too. git-upload-pack(1) is safe
# for these: it runs nothing that their configuration names. Only that command gets the option.
_SERVE_OTHER_USERS = "--upload-pack=git -c safe.directory='*' upload-pack"


@attrs.frozen
class GitServers:
    """The git servers that the operator permits."""

    _git: GitRunner
    _threads: WorkerThreads
    _remotes: RemoteResolver
    _limits: FetchLimits

    async def resolve_branch(
        self, repository: Repository, credential: Credential | None = None
    ) -> str:
        """Return the OID of the newest commit of the repository's branch.

        The same limits hold as for a fetch. Raises: EvaluationError.
        """
        branch = repository.branch
        words = f"the question for the branch {branch!r} of the repository"
        found = await self._limits.finish_in_time(self.find_branch(repository, credential), words)
        if found is None:
            raise EvaluationFailure(
                "repository",
                f"the repository has no branch {branch!r}; push it, or name another branch",
            )
        return found

    async def find_branch(
        self, repository: Repository, credential: Credential | None
    ) -> str | None:
        """Return the OID of the branch, None without one. Raises: EvaluationError."""
        ref = f"refs/heads/{repository.branch}"
        printed = await self.list_refs(repository.url, credential, "--heads", ref)
        # git also lists other refs that end in this name.
        found = re.search(rf"^([0-9a-f]{{40}})\t{re.escape(ref)}$", printed, re.MULTILINE)
        return found and found[1]

    async def list_refs(self, url: str, credential: Credential | None, *which: str) -> str:
        """Return the output of `git ls-remote`; `which` is an option and a name, or nothing.

        Raises: EvaluationError.
        """
        route, login = await self.find_route(url, credential)
        result = await self._run_ls_remote(route, login, which)
        if result.status:
            raise await self.explain_failure(route, login, result)
        return result.stdout

    async def _run_ls_remote(
        self,
        route: ResolvedGitRemote,
        login: Login | None,
        which: Sequence[str] = (),
        **environment: str,
    ) -> GitResult:
        # Without a repository, which might be fetched into, evicted or removed meanwhile.
        return await self._git.run_command(
            None,
            *("ls-remote", *which[:1], *get_serve_arguments(route)),
            *("--end-of-options", route.url, *which[1:]),
            environment={**route.environment, **environment},
            login=login,
            source=route.local_path,
            reach=SandboxAccess(
                readable_paths=route.readable_paths, has_network=route.local_path is None
            ),
        )

    async def explain_failure(
        self, route: ResolvedGitRemote, login: Login | None, result: GitResult
    ) -> EvaluationFailure:
        """Return the error of a fetch. Where a redirect leads git says only if it is asked to."""
        if not is_redirect(result.stderr):
            return make_git_failure(explain_fetch_failure(result.stderr), result)
        traced = await self._run_ls_remote(route, login, GIT_CURL_VERBOSE="1")
        return make_git_failure(explain_redirect(route.url, traced.stderr), result)

    async def find_route(
        self, url: str, credential: Credential | None
    ) -> tuple[ResolvedGitRemote, Login | None]:
        """Return the route to the repository, and the login. Raises: EvaluationError."""
        # Before the timeout of the fetch: a silent name server is not the repository's fault.
        lookup = min(LOOKUP_TIMEOUT, self._limits.timeout / 2)
        route, login = await self._remotes.resolve_remote(url, credential, lookup)
        if route.local_path is not None:
            await self._threads.run_in_thread(
                self._remotes.check_local_repository, route.local_path
            )
        return route, login


def get_serve_arguments(route: ResolvedGitRemote) -> tuple[str, ...]:
    """Return the option for a repository of this machine, which git serves to itself."""
    return () if route.local_path is None else (_SERVE_OTHER_USERS,)


def make_git_failure(message: str, result: GitResult) -> EvaluationFailure:
    """Return the error about a git command, with its stderr."""
    return EvaluationFailure("repository", message, {"stderr": result.stderr})
