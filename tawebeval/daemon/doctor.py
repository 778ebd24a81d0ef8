"""`tawebeval doctor`: the checks of the daemon's start, and of its protection.

The checks are defined beside the code that they check; this module and `doctor_storage` list them.
No check changes anything. A finding is BROKEN if the daemon would refuse to start or if other
users can read a secret, and WEAKER if the daemon runs with less protection.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args

import attrs
from twisted.internet.endpoints import serverFromString

from tawebeval.config import Configuration
from tawebeval.core.forwarded_headers import TrustedProxies
from tawebeval.daemon.directories import locate_directories
from tawebeval.daemon.doctor_storage import StorageChecks
from tawebeval.daemon.findings import Finding, Severity, report_problems, run_checks
from tawebeval.daemon.process_setup import find_unreadable_import_directories
from tawebeval.daemon.reload import read_configuration
from tawebeval.daemon.services import explain_wrong_endpoint
from tawebeval.daemon.starter_connection import (
    STARTER_SOCKET_VARIABLE,
    describe_starter_limits,
    open_starter,
)
from tawebeval.daemon.startup import (
    check_environments,
    check_sandbox_readable_paths,
    find_exposed_endpoints,
)
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.git.command import check_git_version
from tawebeval.linux import rlimits
from tawebeval.linux.cgroups import CgroupManager, Resource, open_cgroups
from tawebeval.linux.child import Spawner
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.ownership import get_user_name
from tawebeval.linux.privileges import CurrentProcess, Privileges, find_privileges
from tawebeval.linux.reaper import OrphanReaper
from tawebeval.sandbox.bubblewrap import BubblewrapSandbox, write_sandbox_files
from tawebeval.sandbox.overlay import WritableTrees
from tawebeval.sandbox.probe import (
    ProbeDirectories,
    check_sandbox,
    close_sandbox,
    find_sandbox_problems,
    open_sandbox,
)
from tawebeval.slurm.checks import check_cluster
from tawebeval.web.auth import find_token_file

_UNIT_REMEDY = "run the systemd-run command in docs/install.md"
UNIT_FILE_PATHS = tuple(
    Path(directory, "tawebeval.service")
    for directory in (
        "/etc/systemd/system",
        "/usr/local/lib/systemd/system",
        "/usr/lib/systemd/system",
    )
)
"""The paths where a unit of the daemon may be installed."""
_SUBSTITUTE = "nobody"  # for service.user, where root has set none
# The directories of docs/install.md: the home of that user does not exist.
_SUBSTITUTE_DIRECTORIES = {
    "STATE_DIRECTORY": "/var/lib/tawebeval",
    "CACHE_DIRECTORY": "/var/cache/tawebeval",
}


@attrs.frozen
class SystemChecks:
    """All checks. `environment` is that of the daemon, as far as it is known."""

    configuration: Configuration
    environment: Mapping[str, str]
    privileges: Privileges
    storage: StorageChecks
    reactor: Any

    def run_checks(self) -> Iterator[Finding]:
        """Run all checks and yield the findings. Blocks, for about a second."""
        yield from run_checks(
            ("user", self._check_user),
            ("python", self._check_python),
            ("sandbox", self._check_sandbox),
            ("environments", self._check_environments),
            ("cluster", self._check_cluster),
            ("starter", self._check_starter),
            ("git", lambda: [check_git_version()]),
            *(
                ("listen", partial(self._check_endpoint, endpoint))
                for endpoint in dict.fromkeys(self.configuration.listen)
            ),
            ("callers", self._check_callers),
            ("proxies", self._check_proxies),
        )
        yield from self.storage.run_checks()
        yield from run_checks(
            ("limits", self._check_limits),
            ("limits", rlimits.find_lowered_hard_limits),
            ("descriptors", self._check_descriptors),
            ("processes", lambda: _compare(rlimits.assess_process_limit(self.configuration))),
        )

    def _check_user(self) -> Iterator[str]:
        user = self.privileges.user
        if user and not self.configuration.service.user:
            directories = ", ".join(
                f"{name}={self.environment[name]}" for name in _SUBSTITUTE_DIRECTORIES
            )
            yield (
                f"the other checks are those of a daemon with service.user = {user.name},"
                f" {directories}"
            )
            return
        name = f"{user.name} (service.user)" if user else get_user_name(os.geteuid())
        yield f"the daemon runs as {name}"

    def _check_python(self) -> Sequence[SetupProblem]:
        with self.privileges.act_as_user():
            return list(find_unreadable_import_directories())

    def _check_sandbox(self) -> Iterator[Finding]:
        cgroups = open_cgroups(f"doctor-{os.getpid()}")
        try:
            yield from run_checks(
                ("sandbox", partial(self._try_sandbox, cgroups)),
                ("limits", partial(self._check_cgroups, cgroups)),
            )
        finally:
            cgroups.remove_all_cgroups()

    def _try_sandbox(self, cgroups: CgroupManager) -> Iterator[str | SetupProblem | Finding]:
        checkouts, workspaces = self.storage.make_probe_directories()
        try:
            check_sandbox_readable_paths(
                self.configuration, self.storage.configuration_file, self.environment
            )
            # As in the state directory, which programs in the sandbox's mount namespace see whole.
            accounts = workspaces / "accounts"
            with self.privileges.act_as_user():
                accounts.mkdir()
                write_sandbox_files(accounts)
            orphans = OrphanReaper(self.reactor, Spawner(self.reactor))
            trees = WritableTrees(workspaces / "starter" / "socket")
            sandbox = open_sandbox(self.configuration, accounts, cgroups, orphans, trees)
            try:
                check_sandbox(sandbox, self.privileges, ProbeDirectories(checkouts, workspaces))
            finally:
                close_sandbox(sandbox)
                if isinstance(sandbox, BubblewrapSandbox):
                    for descriptor in sandbox.filter_descriptors:
                        os.close(descriptor)
        finally:
            with self.privileges.act_as_user():
                for place in (checkouts, workspaces):
                    remove_tree(place)
        if not isinstance(sandbox, BubblewrapSandbox):
            yield from find_sandbox_problems(sandbox)
            return
        yield f"{sandbox.bwrap_path} works"
        overlays = report_problems(
            find_sandbox_problems(sandbox), "overlays work: trees of commits are not copied"
        )
        yield from run_checks(("trees", lambda: overlays))
        if sandbox.has_network:
            what = "sandbox.network is true: evaluators reach the network and this machine's ports"
            yield SetupProblem(what, "remove sandbox.network if evaluators need no network")
        elif self.configuration.sandbox.loopback:
            what = (
                "sandbox.loopback is true: unaccepted TCP connections use memory outside all limits"
            )
            yield SetupProblem(what, "remove sandbox.loopback if evaluators need no 127.0.0.1")

    def _check_starter(self) -> Iterator[str | SetupProblem]:
        trees, is_lasting = open_starter(self.configuration, self.environment, Path())
        if not is_lasting:
            yield f"evaluations end with the daemon (service.lasting, {STARTER_SOCKET_VARIABLE})"
            return
        yield "evaluations outlive the daemon"
        try:
            yield from describe_starter_limits(self.configuration, trees.starter)
        finally:
            trees.close()

    def _check_environments(self) -> Iterator[str]:
        if not self.configuration.environments:
            return
        with self.privileges.act_as_user():
            check_environments(
                self.configuration, self.storage.configuration_file, self.environment
            )
        yield f"evaluators can run in {', '.join(self.configuration.environments)}"

    def _check_cluster(self) -> Iterator[str | SetupProblem]:
        if self.configuration.runner.kind == "slurm":
            yield from check_cluster(
                self.configuration,
                locate_directories(self.environment),
                self.privileges.user,
                self.privileges.act_as_user,
                self.environment,
            )

    def _check_cgroups(self, cgroups: CgroupManager) -> Iterator[str | SetupProblem | Finding]:
        remedy = cgroups.unenforced_resources_remedy
        for what in get_args(Resource):
            said = cgroups.describe_enforcement(what)
            yield said if what in cgroups.enforced_resources else SetupProblem(said, remedy)
        policy = cgroups.query_oom_policy()
        if policy in ("stop", "kill"):
            ends = f"OOMPolicy={policy} ends the daemon when an evaluation reaches limits.memory"
            yield SetupProblem(ends, "set OOMPolicy=continue in the unit")
        if (
            "memory" in cgroups.enforced_resources
        ):  # without the limit no number of watches is enough
            yield from run_checks(
                (
                    "watches",
                    lambda: _compare(rlimits.assess_epoll_watch_limit(self.configuration)),
                )
            )

    def _check_endpoint(self, endpoint: str) -> Iterator[str]:
        # The sockets of these two exist only in a daemon that systemd or a similar program starts.
        if not endpoint.startswith(("systemd:", "fd:")):
            try:
                serverFromString(self.reactor, endpoint)
            except (ValueError, TypeError, LookupError, OSError) as error:
                raise ConfigurationError(explain_wrong_endpoint(endpoint, error)) from None
        yield endpoint

    def _check_callers(self) -> Iterator[str | SetupProblem]:
        if find_token_file(self.configuration.callers, self.environment) is not None:
            yield "callers need a token"
            return
        ok = "no tokens (callers.tokens): every program of this machine may submit"
        yield from report_problems(find_exposed_endpoints(self.configuration), ok)

    def _check_proxies(self) -> Iterator[str | SetupProblem]:
        http = self.configuration.http
        if http.trusted_proxies:
            proxies = TrustedProxies.parse(http.trusted_proxies, http.client_header)
            names = ", ".join(http.trusted_proxies)
            ok = f"{names}: clients' addresses are taken from {http.client_header}"
            yield from report_problems(self._find_proxy_problems(proxies), ok)

    def _find_proxy_problems(self, proxies: TrustedProxies) -> Iterator[SetupProblem]:
        for network in proxies.find_public_networks():
            what = f"{network}: every host in this network can claim any client address"
            yield SetupProblem(what, "list only the proxies' addresses in http.trusted_proxies")
        if proxies.trusts_unix_sockets and not any(map(_can_be_unix, self.configuration.listen)):
            what = "http.trusted_proxies has unix, without a UNIX socket in listen"
            remedy = 'set listen = ["unix:/run/tawebeval/socket:mode=660"], or another proxy'
            yield SetupProblem(what, remedy)
        callers = self.configuration.callers
        with suppress(ConfigurationError):  # the part "callers" reports it
            if find_token_file(callers, self.environment) is None and not callers.open:
                what = "no tokens (callers.tokens): all clients of the proxy may run programs"
                yield SetupProblem(what, "run `tawebeval token new NAME`, and set callers.tokens")

    def _check_descriptors(self) -> Sequence[SetupProblem | str]:
        return _compare(rlimits.assess_descriptor_limit(self.configuration))

    def _check_limits(self) -> Sequence[str]:
        rlimits.check_hard_limits(self.configuration.limits)
        return ()


def _compare(assessment: rlimits.LimitAssessment) -> Sequence[SetupProblem | str]:
    return report_problems(assessment.problems, str(assessment))


def _can_be_unix(endpoint: str) -> bool:
    return endpoint.startswith(("unix:", "systemd:", "fd:"))


def examine_system(
    file: Path | None,
    environment: Mapping[str, str],
    process: CurrentProcess | None = None,
    reactor: Any = None,
) -> Iterator[Finding]:
    """Yield all findings of a configuration file; stop after a broken configuration or user.

    Root without service.user gets the other findings as for the user nobody, unless a unit is
    installed. `environment` is that of the caller, `process` the process whose privileges count.
    Blocks.
    """
    process = process or CurrentProcess()
    if reactor is None:
        from twisted.internet import reactor
    try:
        configuration = read_configuration(file)
    except ConfigurationError as error:
        yield Finding("configuration", Severity.BROKEN, *error.problem)
        return
    yield Finding("configuration", Severity.OK, str(file or "no file: defaults apply"))
    try:
        privileges = find_privileges(configuration.service.user, process)
    except ConfigurationError as error:
        what, remedy = error.problem
        if configuration.service.user:
            yield Finding("user", Severity.BROKEN, what, remedy)
            return
        if any(path.exists() for path in UNIT_FILE_PATHS):
            # Remedies for another user than the unit's would harm the service.
            remedy = f"to check tawebeval.service, {_UNIT_REMEDY}; without the unit {remedy}"
            yield Finding("user", Severity.BROKEN, what, remedy)
            return
        remedy = f"{remedy}; to check a service with a user of its own, {_UNIT_REMEDY}"
        yield Finding("user", Severity.BROKEN, what, remedy)
        try:
            privileges = find_privileges(_SUBSTITUTE, process)
        except ConfigurationError:
            return
        environment = {**_SUBSTITUTE_DIRECTORIES, **environment}
    environment = privileges.build_user_environment(environment)
    storage = StorageChecks(configuration, file, environment, privileges)
    yield from SystemChecks(configuration, environment, privileges, storage, reactor).run_checks()
