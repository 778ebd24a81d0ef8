"""`tawebeval doctor`: looks at a machine and a configuration as the daemon would.

Nothing is changed by it. What the daemon would refuse to start with is broken, and so is a
secret that lies open; what protects less than it could is weaker.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
from twisted.internet.endpoints import serverFromString

from tawebeval.admission import count_places
from tawebeval.config import Configuration
from tawebeval.core.forwarded import Proxies
from tawebeval.daemon.allowances import (
    judge_descriptors,
    judge_limits,
    judge_processes,
    judge_watches,
)
from tawebeval.daemon.belongings import check_readable
from tawebeval.daemon.doctor_storage import Premises
from tawebeval.daemon.findings import Finding, Health, broken, judged
from tawebeval.daemon.preload import unreadable
from tawebeval.daemon.reconfiguring import read_configuration
from tawebeval.errors import ConfigurationError
from tawebeval.git.gitversion import check_git
from tawebeval.linux.cgroups.group import Cgroups, open_cgroups
from tawebeval.linux.cgroups.groups import What
from tawebeval.linux.child import Spawner
from tawebeval.linux.filetree import remove
from tawebeval.linux.kernel import Process
from tawebeval.linux.launcher_client import Launching
from tawebeval.linux.ownership import name_of
from tawebeval.linux.privileges import Privileges, find_privileges
from tawebeval.linux.reaper import Orphans
from tawebeval.sandbox.bubblewrap import write_accounts
from tawebeval.sandbox.probe import A_PYTHON, COPIED, open_bubblewrap, try_with_overlays
from tawebeval.web.auth import find_tokens
from tawebeval.web.exposure import check_endpoints

# Where root looks at a service of systemd, the daemon's user is there only while it runs.
_AS_THE_UNIT = (
    "; where a systemd unit starts it as a user of its own, have systemd-run look as that user:"
    " docs/operations.md, Is it well?"
)
# What holds where there is no cgroup for it: in the sandbox, and without one.
_INSTEAD: Mapping[What, Mapping[Literal["sandbox", "none"], str]] = {
    "memory": dict.fromkeys(
        ("sandbox", "none"),
        "limited for each process alone (RLIMIT_DATA), without what they share, and not reported",
    ),
    "processes": {
        "sandbox": "limited for the sandbox (RLIMIT_NPROC), but not reported when it is met",
        "none": "not limited",
    },
    "cpu": dict.fromkeys(
        ("sandbox", "none"), "limited for each process alone (RLIMIT_CPU), and not reported"
    ),
    "weight": dict.fromkeys(
        ("sandbox", "none"),
        "processor time is shared by processes: an evaluation with many of them slows down the"
        " others, and less so the daemon (nice 10)",
    ),
}
_OVERLAYS = (
    "Linux 5.11 or newer, a python3 that every user can execute, and a state directory on a file"
    " system with attributes of users, such as ext4, xfs or btrfs"
)
_WHOLE: Mapping[What, str] = {
    "memory": "limited, for all processes of an evaluation together",
    "processes": "limited, for all of an evaluation together",
    "cpu": "measured and limited, for all processes of an evaluation together",
    "weight": "each evaluation has the same share of the processors, the daemon a larger one",
}


@attrs.frozen
class Examination:
    """Looks at everything; `environment` is the daemon's own, as far as it is known."""

    configuration: Configuration
    environment: Mapping[str, str]
    privileges: Privileges
    premises: Premises
    reactor: Any

    def findings(self) -> Iterator[Finding]:
        """Yield what is found, part by part. Blocks, for about a second."""
        for part, look in (
            ("user", self._user),
            ("python", self._python),
            ("sandbox", self._sandbox),
            ("git", lambda: [judged("git", check_git)]),
            ("listen", self._listen),
            ("callers", self._callers),
            ("proxies", self._proxies),
            ("secrets", self.premises.secrets),
            ("permissions", self.premises.permissions),
            ("disk", lambda: self.premises.room(self._running)),
            ("quotas", self.premises.quotas),
            ("limits", lambda: judge_limits(self.configuration)),
            ("descriptors", lambda: judge_descriptors(self.configuration)),
            ("processes", lambda: judge_processes(self.configuration)),
        ):
            try:
                yield from look()
            except OSError as error:
                yield Finding(part, Health.BROKEN, f"cannot be looked at: {error}")

    @property
    def _running(self) -> int:
        return count_places(self.configuration.evaluations.running)

    def _user(self) -> Iterator[Finding]:
        user = self.privileges.user
        name = f"{user.name}, of root's choice" if user else name_of(os.geteuid())
        yield Finding("user", Health.OK, f"the daemon runs as {name}")

    def _python(self) -> Iterator[Finding]:
        with self.privileges.acting():
            hidden = list(unreadable())
        for path in hidden:
            what = f"the daemon's user cannot read {path}"
            remedy = "install Python and tawebeval where every user can read"
            yield Finding("python", Health.WEAKER, what, remedy)

    def _sandbox(self) -> Iterator[Finding]:
        user = self.privileges.user
        cgroups = open_cgroups(f"doctor-{os.getpid()}", (user.uid, user.gid) if user else None)
        try:
            if self.configuration.sandbox.kind == "none":
                yield Finding(
                    "sandbox",
                    Health.WEAKER,
                    "there is none: evaluators may do all that the daemon's user may",
                    'apt-get install bubblewrap, and leave out sandbox.kind = "none"',
                )
                yield from self._launcher()
            else:
                yield from self._bubblewrap(cgroups)
            yield from self._limits(cgroups)
        finally:
            cgroups.close()

    def _bubblewrap(self, cgroups: Cgroups) -> Iterator[Finding]:
        with self.privileges.acting():
            accounts = Path(tempfile.mkdtemp(prefix="tawebeval-"))
        try:
            check_readable(self.configuration, self.premises.file, self.environment)
            with self.privileges.acting():
                write_accounts(accounts)
            orphans = Orphans(self.reactor, Spawner(self.reactor))
            sandbox = open_bubblewrap(self.configuration, accounts, cgroups, orphans)
            problem = try_with_overlays(sandbox, self.privileges, self.premises.places())
            sandbox.trees.close()
            os.close(sandbox.filter)
        except ConfigurationError as error:
            yield broken("sandbox", error)
            return
        finally:
            with self.privileges.acting():
                remove(accounts)
        if problem is not None:
            what, remedy = problem
            yield Finding("sandbox", Health.BROKEN, f"bubblewrap does not work: {what}", remedy)
            return
        yield Finding("sandbox", Health.OK, f"{sandbox.program} works")
        if sandbox.trees.problem is None:
            yield Finding("trees", Health.OK, "overlays work: none is copied")
        else:
            what = f"{COPIED} ({sandbox.trees.problem})"
            yield Finding("trees", Health.WEAKER, what, _OVERLAYS)
        if sandbox.network:
            what = "evaluators reach the network, and whatever listens on this machine"
            remedy = "leave out sandbox.network, if they need none"
            yield Finding("sandbox", Health.WEAKER, what, remedy)
        elif self.configuration.sandbox.loopback:
            what = "TCP connections that no evaluator accepts take memory that no limit counts"
            remedy = "leave out sandbox.loopback, if evaluators need no 127.0.0.1"
            yield Finding("sandbox", Health.WEAKER, what, remedy)

    def _launcher(self) -> Iterator[Finding]:
        launching = Launching(user=self.privileges.user)
        try:
            launching.open()
        except OSError as error:
            what = f"no evaluator can be started: {error.strerror}"
            yield Finding("sandbox", Health.BROKEN, what, A_PYTHON)
        finally:
            launching.close()

    def _limits(self, cgroups: Cgroups) -> Iterator[Finding]:
        kind = self.configuration.sandbox.kind
        remedy = str(cgroups.remedy.tried()) if cgroups.missing else ""
        for what, whole in _WHOLE.items():
            if what in cgroups.enforced:
                yield Finding("limits", Health.OK, f"{what}: {whole}")
            else:
                instead = _INSTEAD[what]["none" if kind == "none" else "sandbox"]
                why = f"{what}: {instead} ({cgroups.missing[what]})"
                yield Finding("limits", Health.WEAKER, why, remedy)
        policy = cgroups.oom_policy()
        if policy in ("stop", "kill"):
            ends = f"OOMPolicy={policy} ends the daemon when an evaluation meets limits.memory"
            yield Finding("limits", Health.WEAKER, ends, "OOMPolicy=continue in the unit")
        if "memory" in cgroups.enforced:  # else nothing bounds what more watches would take
            yield from judge_watches(self.configuration)

    def _listen(self) -> Iterator[Finding]:
        for endpoint in dict.fromkeys(self.configuration.listen):
            yield judged("listen", partial(self._parse, endpoint), endpoint)

    def _parse(self, endpoint: str) -> None:
        # The sockets of these two are there only where systemd, or who it is, starts the daemon.
        if not endpoint.startswith(("systemd:", "fd:")):
            try:
                serverFromString(self.reactor, endpoint)
            except (ValueError, TypeError, LookupError, OSError) as error:
                raise ConfigurationError(f"{endpoint!r} is no endpoint: {error}") from None

    def _callers(self) -> Iterator[Finding]:
        callers = self.configuration.callers
        try:
            if find_tokens(callers, self.environment) is not None:
                yield Finding("callers", Health.OK, "those who have a token")
                return
            if callers.open:
                what = "anybody who can connect may run programs: there are no tokens"
                remedy = "tawebeval token new NAME, and leave out callers.open"
                yield Finding("callers", Health.WEAKER, what, remedy)
                return
            unknown = check_endpoints(self.configuration.listen)
        except ConfigurationError as error:
            yield broken("callers", error)
            return
        if unknown:
            what = f"there are no tokens: whoever can reach {', '.join(unknown)} may run programs"
            yield Finding("callers", Health.WEAKER, what, "tawebeval token new NAME")
        else:
            what = "there are no tokens: every program of this machine may call"
            yield Finding("callers", Health.OK, what)

    def _proxies(self) -> Iterator[Finding]:
        http = self.configuration.http
        if not http.trusted_proxies:
            return
        found = list(self._doubts(Proxies.of(http.trusted_proxies, http.client_header)))
        what = f"{', '.join(http.trusted_proxies)} tell by {http.client_header} for whom they ask"
        yield from found or [Finding("proxies", Health.OK, what)]

    def _doubts(self, proxies: Proxies) -> Iterator[Finding]:
        for network in proxies.too_wide():
            what = f"{network}: whoever connects from there can claim any address"
            remedy = "name the addresses of the proxies in http.trusted_proxies"
            yield Finding("proxies", Health.WEAKER, what, remedy)
        if proxies.unix and not any(map(_may_be_unix, self.configuration.listen)):
            what = "unix: the daemon listens on no UNIX socket"
            remedy = 'listen = ["unix:/run/tawebeval/socket:mode=660"], or another trusted proxy'
            yield Finding("proxies", Health.WEAKER, what, remedy)
        callers = self.configuration.callers
        with suppress(ConfigurationError):  # which is said of the callers
            if find_tokens(callers, self.environment) is None and not callers.open:
                what = "there are no tokens: whoever reaches a proxy may run programs"
                yield Finding("proxies", Health.WEAKER, what, "tawebeval token new NAME")


def _may_be_unix(endpoint: str) -> bool:
    return endpoint.startswith(("unix:", "systemd:", "fd:"))


def examine(
    file: Path | None,
    environment: Mapping[str, str],
    process: Process | None = None,
    reactor: Any = None,
) -> Iterator[Finding]:
    """Yield all findings; where it is not even clear who the daemon would be, only why."""
    if reactor is None:
        from twisted.internet import reactor
    try:
        configuration = read_configuration(file)
    except ConfigurationError as error:
        yield broken("configuration", error)
        return
    yield Finding("configuration", Health.OK, str(file or "none: the defaults hold"))
    try:
        privileges = find_privileges(configuration.service.user, process or Process())
    except ConfigurationError as error:
        finding = broken("user", error)
        if not configuration.service.user:
            finding = attrs.evolve(finding, remedy=finding.remedy + _AS_THE_UNIT)
        yield finding
        return
    environment = privileges.environment(environment)
    premises = Premises(configuration, file, environment, privileges)
    yield from Examination(configuration, environment, privileges, premises, reactor).findings()
