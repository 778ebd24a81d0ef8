"""`tawebeval doctor`: one table of checks of the daemon's start, and of its protection.

The checks are defined beside the code that they check, or here. No check changes anything: an
unnamed temporary file shows whether a directory is writable. A finding is BROKEN if the daemon
would refuse to start or if other users can read a secret, and WEAKER if the daemon runs with less
protection.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, get_args

import attrs
from twisted.internet.endpoints import serverFromString

from tawebeval.config import Configuration
from tawebeval.core.hosts import FORWARDED_FOR_HEADER, TrustedProxies
from tawebeval.daemon.configuration import (
    check_sandbox_paths,
    locate_directories,
    read_configuration,
)
from tawebeval.daemon.endpoints import explain_wrong_endpoint, find_exposed_endpoints
from tawebeval.daemon.metrics import probe_disk_write
from tawebeval.daemon.startup import (
    CACHE_DIRECTORY_ENTRIES,
    STARTER_SOCKET_VARIABLE,
    STATE_DIRECTORY_ENTRIES,
    check_mac_key_file,
    describe_limits_on_starter,
    find_existing_ancestor,
    open_starter,
)
from tawebeval.errors import ConfigurationError, SetupProblem, format_size
from tawebeval.git.command import check_git_version
from tawebeval.git.remotes import GitKeyring
from tawebeval.linux import daemon_limits
from tawebeval.linux.cgroups import (
    CgroupManager,
    Resource,
    describe_resource_limit,
    find_cgroup_remedy,
    open_cgroups,
)
from tawebeval.linux.filetree import DISK_FULL_REMEDY, is_disk_full_error, remove_tree
from tawebeval.linux.privileges import (
    build_directory_install_command,
    check_owner,
    check_user_and_locale,
    find_readable_by_others_problem,
    find_secret_file,
    get_user_name,
)
from tawebeval.sandbox.bubblewrap import BubblewrapSandbox, write_sandbox_files
from tawebeval.sandbox.probe import (
    ProbeDirectories,
    check_sandbox,
    find_sandbox_problems,
    open_sandbox,
)
from tawebeval.sandbox.workspace import WorkspaceLauncher
from tawebeval.slurm.commands import check_cluster
from tawebeval.web.auth import find_metrics_token_file, find_token_file, read_token_file
from tawebeval.webhooks.signing import SECRETS_CREDENTIAL, read_signing_secrets

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_WRITABLE = "mount it for writing, or name another directory by STATE_DIRECTORY and CACHE_DIRECTORY"

_UNIT_REMEDY = "to check tawebeval.service, run the systemd-run command in docs/install.md"


@attrs.frozen
class ExaminedDaemon:
    """The daemon that a start with `configuration_file`, None without one, would make."""

    configuration: Configuration
    configuration_file: Path | None
    environment: Mapping[str, str]
    reactor: Any

    @property
    def state_directory(self) -> Path:
        """The state directory."""
        return locate_directories(self.environment)[0]

    @property
    def cache_directory(self) -> Path:
        """The cache directory."""
        return locate_directories(self.environment)[1]

    @property
    def user_name(self) -> str:
        """The name of the daemon's user."""
        return get_user_name(os.geteuid())


def make_probe_directories(daemon: ExaminedDaemon) -> tuple[Path, Path]:
    """Make directories for probe checkouts and workspaces, where the daemon's are or will be.

    They are among the temporary files if the present user cannot write there.
    """

    def make(path: Path) -> Path:
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="tawebeval-", dir=find_existing_ancestor(path)))
        return Path(tempfile.mkdtemp(prefix="tawebeval-"))

    return make(daemon.cache_directory), make(daemon.state_directory)


def check_not_world_writable(path: Path) -> None:
    """Raise ConfigurationError if every user may write to a path."""
    if path.stat().st_mode & stat.S_IWOTH:
        what = f"{path}: every user may write to it"
        raise ConfigurationError(what, f"chmod o-w {shlex.quote(str(path))}")


def _check_file(daemon: ExaminedDaemon) -> Iterator[str]:
    if daemon.configuration_file is not None:
        check_not_world_writable(daemon.configuration_file)
        yield str(daemon.configuration_file)


def _check_directory(name: str, entries: Sequence[str], daemon: ExaminedDaemon) -> Iterator[str]:
    """Check the state or cache directory and its `entries`. Raises: ConfigurationError, OSError."""
    path: Path = getattr(daemon, name)
    if os.statvfs(find_existing_ancestor(path)).f_flag & os.ST_RDONLY:
        raise ConfigurationError(f"{path}: its file system is mounted read-only", _WRITABLE)
    if not path.exists():
        _check_missing(path, daemon)
        yield f"{path}: does not exist; the daemon creates it"
        return
    check_owner(path, entries)
    check_not_world_writable(path)
    _check_writes(path, f"{path}: cannot write", _WRITABLE)
    yield str(path)


def _check_missing(path: Path, daemon: ExaminedDaemon) -> None:
    above = find_existing_ancestor(path)
    if not os.access(above, os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigurationError(
            f"{path}: does not exist, and {daemon.user_name} cannot create it in {above}",
            "name another directory by STATE_DIRECTORY or CACHE_DIRECTORY, or as root: "
            f"{build_directory_install_command(path, daemon.user_name)}",
        )


def _check_writes(path: Path, what: str, remedy: str) -> None:
    try:
        probe_disk_write(path)
    except OSError as error:
        remedy = DISK_FULL_REMEDY if is_disk_full_error(error) else remedy
        raise ConfigurationError(f"{what}: {error.strerror}", remedy) from None


def _check_key(daemon: ExaminedDaemon) -> Iterator[str]:
    path = daemon.state_directory / "key"
    try:
        mode = path.stat().st_mode
    except OSError:  # missing, or the check of the directory reports it
        return
    if mode & _OTHERS:
        what = f"{path}: other users can read the key and forge identifiers"
        raise ConfigurationError(what, f"chmod 600 {path}")
    check_mac_key_file(path)
    yield str(path)


def _check_free_space(daemon: ExaminedDaemon) -> Iterator[str | SetupProblem]:
    """Compare the free bytes of each file system with those that the daemon needs to be ready."""
    needed = daemon.configuration.limits.free_disk_for_readiness
    places = (
        find_existing_ancestor(path) for path in (daemon.cache_directory, daemon.state_directory)
    )
    for place in {place.stat().st_dev: place for place in places}.values():
        free = shutil.disk_usage(place).free
        what = f"{place}: {format_size(free)} is free"
        if free < needed:
            what += f"; the daemon needs {format_size(needed)} to be ready (twice limits.free_disk)"
            yield SetupProblem(what, "use a larger file system")
        else:
            yield what


class Severity(IntEnum):
    """Severity of a finding, in ascending order. The highest is the exit status of the command."""

    OK = 0
    WEAKER = 1
    BROKEN = 2


@attrs.frozen
class Finding:
    """State of one component of the daemon. `remedy` is empty if `severity` is OK."""

    component: str
    severity: Severity
    description: str
    remedy: str = ""


CheckResults = Iterable[str | SetupProblem | Finding]


@attrs.frozen
class Check:
    """A row of the table: a component, and the check that finds its problems with their remedies.

    `examine` yields strings (OK), `SetupProblem`s (WEAKER) and findings of other components. It
    raises ConfigurationError or OSError for a broken component.
    """

    component: str
    examine: Callable[[ExaminedDaemon], CheckResults]

    def run(self, daemon: ExaminedDaemon) -> Iterator[Finding]:
        """Run the check and yield its findings. Blocks."""
        try:
            for found in self.examine(daemon):
                if isinstance(found, Finding):
                    yield found
                elif isinstance(found, SetupProblem):
                    yield Finding(self.component, Severity.WEAKER, *found)
                else:
                    yield Finding(self.component, Severity.OK, found)
        except ConfigurationError as error:
            yield Finding(self.component, Severity.BROKEN, *error.problem)
        except OSError as error:
            yield Finding(self.component, Severity.BROKEN, f"cannot be checked: {error}")


def _check_sandbox(daemon: ExaminedDaemon) -> Iterator[Finding]:
    cgroups = open_cgroups(f"doctor-{os.getpid()}")
    try:
        yield from Check("sandbox", partial(_try_sandbox, cgroups)).run(daemon)
        yield from Check("limits", partial(_check_cgroups, cgroups)).run(daemon)
    finally:
        cgroups.remove_all_cgroups()


def _try_sandbox(cgroups: CgroupManager, daemon: ExaminedDaemon) -> CheckResults:
    configuration = daemon.configuration
    checkouts, workspaces = make_probe_directories(daemon)
    try:
        # As in the state directory, which programs in the sandbox's mount namespace see whole.
        accounts = workspaces / "accounts"
        accounts.mkdir()
        write_sandbox_files(accounts)
        launcher = WorkspaceLauncher(workspaces / "starter" / "socket")
        sandbox = open_sandbox(configuration, accounts, cgroups, launcher)
        try:
            check_sandbox(sandbox, ProbeDirectories(checkouts, workspaces))
        finally:
            sandbox.close()
    finally:
        for place in (checkouts, workspaces):
            remove_tree(place)
    problems = find_sandbox_problems(sandbox)
    if not isinstance(sandbox, BubblewrapSandbox):
        return list(problems)
    overlays = "overlays work: trees of commits are not copied"
    trees_check = Check("trees", lambda _: list(problems) or [overlays])
    return [f"{sandbox.bwrap_path} works", *trees_check.run(daemon)]


def _check_cgroups(cgroups: CgroupManager, daemon: ExaminedDaemon) -> CheckResults:
    remedy, enforced = find_cgroup_remedy(), cgroups.enforced_resources
    for what in get_args(Resource):
        said = describe_resource_limit(cgroups, what)
        yield said if what in enforced else SetupProblem(said, remedy)
    if "memory" in enforced:
        # Without a limit of memory no number of watches is enough.
        watches = partial(_compare, daemon_limits.assess_epoll_watch_limit)
        yield from Check("watches", watches).run(daemon)


def _find_network(daemon: ExaminedDaemon) -> Iterator[SetupProblem]:
    sandbox = daemon.configuration.sandbox
    if sandbox.kind == "none":
        return
    if sandbox.network:
        what = "sandbox.network is true: evaluators reach the network and this machine's ports"
        yield SetupProblem(what, "remove sandbox.network if evaluators need no network")
    elif sandbox.loopback:
        what = "sandbox.loopback is true: unaccepted TCP connections use memory outside all limits"
        yield SetupProblem(what, "remove sandbox.loopback if evaluators need no 127.0.0.1")


def _check_paths(daemon: ExaminedDaemon) -> Iterator[str]:
    check_sandbox_paths(daemon.configuration, daemon.configuration_file, daemon.environment)
    if names := daemon.configuration.environments:
        yield f"evaluators can run in {', '.join(names)}"


def _check_cluster(daemon: ExaminedDaemon) -> Iterator[str | SetupProblem]:
    if daemon.configuration.runner.kind == "slurm":
        yield from check_cluster(daemon.configuration, daemon.state_directory, daemon.environment)


def _check_starter(daemon: ExaminedDaemon) -> Iterator[str | SetupProblem]:
    launcher, is_lasting = open_starter(daemon.configuration, daemon.environment, Path())
    if not is_lasting:
        if daemon.configuration.runner.kind == "slurm":
            yield "evaluations outlive the daemon on their nodes"
        else:
            yield f"evaluations end with the daemon (no starter in {STARTER_SOCKET_VARIABLE})"
        return
    yield "evaluations outlive the daemon"
    try:
        yield from describe_limits_on_starter(daemon.configuration, launcher.starter)
    finally:
        launcher.close()


def _check_endpoints(daemon: ExaminedDaemon) -> Iterator[Finding]:
    for endpoint in dict.fromkeys(daemon.configuration.listen):
        yield from Check("listen", partial(_check_endpoint, endpoint)).run(daemon)


def _check_endpoint(endpoint: str, daemon: ExaminedDaemon) -> Iterator[str]:
    # The sockets of these two exist only in a daemon that systemd or a similar program starts.
    if not endpoint.startswith(("systemd:", "fd:")):
        try:
            serverFromString(daemon.reactor, endpoint)
        except (ValueError, TypeError, LookupError, OSError) as error:
            raise ConfigurationError(explain_wrong_endpoint(endpoint, error)) from None
    yield endpoint


def _check_callers(daemon: ExaminedDaemon) -> CheckResults:
    if find_token_file(daemon.configuration.callers, daemon.environment) is not None:
        yield "callers need a token"
    elif problems := list(find_exposed_endpoints(daemon.configuration)):
        yield from problems
    else:
        yield "no tokens (callers.tokens): every program of this machine may submit"


def _check_proxies(daemon: ExaminedDaemon) -> CheckResults:
    http = daemon.configuration.http
    if not http.trusted_proxies:
        return
    if problems := list(_find_proxy_problems(daemon)):
        yield from problems
    else:
        names = ", ".join(http.trusted_proxies)
        yield f"{names}: clients' addresses are taken from {FORWARDED_FOR_HEADER}"


def _find_proxy_problems(daemon: ExaminedDaemon) -> Iterator[SetupProblem]:
    http, callers = daemon.configuration.http, daemon.configuration.callers
    proxies = TrustedProxies.parse(http.trusted_proxies)
    for network in proxies.find_public_networks():
        what = f"{network}: every host in this network can claim any client address"
        yield SetupProblem(what, "list only the proxies' addresses in http.trusted_proxies")
    with suppress(ConfigurationError):  # the component "callers" reports it
        if find_token_file(callers, daemon.environment) is None and not callers.open:
            what = "no tokens (callers.tokens): all clients of the proxy may run programs"
            yield SetupProblem(what, "run `tawebeval token add NAME`, and set callers.tokens")


def _check_tokens(daemon: ExaminedDaemon) -> Iterator[str]:
    try:
        source = find_token_file(daemon.configuration.callers, daemon.environment)
    except ConfigurationError:  # the component "callers" reports it
        return
    if source is not None:
        yield _check_token_file(source)


def _check_metrics_tokens(daemon: ExaminedDaemon) -> Iterator[str]:
    if source := find_metrics_token_file(daemon.configuration.metrics, daemon.environment):
        yield _check_token_file(source)


def _check_token_file(source: Path) -> str:
    read_token_file(source)
    check_not_world_writable(source)
    return str(source)


def _check_callbacks(daemon: ExaminedDaemon) -> Iterator[str]:
    secrets = daemon.configuration.callbacks.secrets
    if source := find_secret_file(secrets, SECRETS_CREDENTIAL, daemon.environment):
        read_signing_secrets(source)
        _check_closed_to_others(source)
        yield f"signed with the callers' secrets in {source}"


def _check_credentials(daemon: ExaminedDaemon) -> Iterator[str]:
    settings = daemon.configuration.repositories.credentials
    directory = daemon.environment.get("CREDENTIALS_DIRECTORY", "")
    if settings:
        GitKeyring(settings, directory, b"")
        for entry in settings:
            _check_closed_to_others(Path(directory, entry.password_file or entry.key_file))
        yield f"{len(settings)} for private repositories"


def _check_closed_to_others(path: Path) -> None:
    problem = find_readable_by_others_problem(path, path.stat().st_mode)
    if problem is not None:
        raise ConfigurationError(*problem)


def _check_hard_limits(daemon: ExaminedDaemon) -> Sequence[str]:
    daemon_limits.check_hard_limits(daemon.configuration.limits)
    return ()


def _compare(
    assess: Callable[[Any], daemon_limits.LimitAssessment], daemon: ExaminedDaemon
) -> Sequence[SetupProblem | str]:
    assessment = assess(daemon.configuration)
    return assessment.problems or [str(assessment)]


CHECKS = (
    Check("user", lambda daemon: [f"the daemon runs as {daemon.user_name}"]),
    Check("sandbox", _check_sandbox),
    Check("sandbox", _find_network),
    Check("paths", _check_paths),
    Check("cluster", _check_cluster),
    Check("starter", _check_starter),
    Check("git", lambda _: [check_git_version()]),
    Check("listen", _check_endpoints),
    Check("callers", _check_callers),
    Check("proxies", _check_proxies),
    Check("tokens", _check_tokens),
    Check("metrics", _check_metrics_tokens),
    Check("credentials", _check_credentials),
    Check("callbacks", _check_callbacks),
    Check("permissions", _check_file),
    Check("permissions", partial(_check_directory, "state_directory", STATE_DIRECTORY_ENTRIES)),
    Check("permissions", partial(_check_directory, "cache_directory", CACHE_DIRECTORY_ENTRIES)),
    Check("permissions", _check_key),
    Check("disk", _check_free_space),
    Check("limits", _check_hard_limits),
    Check("descriptors", partial(_compare, daemon_limits.assess_descriptor_limit)),
    Check("processes", partial(_compare, daemon_limits.assess_process_limit)),
)
"""All checks, in the order of their findings."""


def examine_system(
    file: Path | None,
    environment: Mapping[str, str],
    reactor: Any = None,
) -> Iterator[Finding]:
    """Yield all findings of a configuration file; stop after a broken configuration or user.

    `environment` is that of the caller. Blocks, for about a second.
    """
    if reactor is None:
        from twisted.internet import reactor
    try:
        configuration = read_configuration(file)
    except ConfigurationError as error:
        yield Finding("configuration", Severity.BROKEN, *error.problem)
        return
    yield Finding("configuration", Severity.OK, str(file or "no file: defaults apply"))
    try:
        check_user_and_locale("tawebeval doctor")
    except ConfigurationError as error:
        what, remedy = error.problem
        yield Finding("user", Severity.BROKEN, what, f"{remedy}; {_UNIT_REMEDY}")
        return
    daemon = ExaminedDaemon(configuration, file, environment, reactor)
    for check in CHECKS:
        yield from check.run(daemon)
