"""`tawebeval doctor`: looks at a machine and a configuration as the daemon would.

Nothing is changed by it. What the daemon would refuse to start with is broken; what protects
less than it could is weaker.
"""

from __future__ import annotations

import os
import resource
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path

import attrs

from tawebeval.access import find_tokens, read_tokens
from tawebeval.cgroups import Cgroups, open_cgroups
from tawebeval.config import Configuration
from tawebeval.directories import locate
from tawebeval.errors import ConfigurationError
from tawebeval.exposure import check_endpoints
from tawebeval.gitversion import check_git
from tawebeval.kernel import Process
from tawebeval.keyring import Keyring
from tawebeval.orphans import Orphans
from tawebeval.privileges import Privileges, find_privileges
from tawebeval.process import Spawner
from tawebeval.sandboxes import open_bubblewrap, try_out
from tawebeval.tap import read_configuration
from tawebeval.workspace import remove

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_DESCRIPTORS = 8  # of an evaluation: pipes, pidfd, files of its sandbox; and git's beside them
_SPARE = 128  # descriptors of the daemon's own, and connections that are just being refused


class Health(IntEnum):
    """How a part of it is, the worst last: also the command's exit status."""

    OK = 0
    WEAKER = 1
    BROKEN = 2


@attrs.frozen
class Finding:
    """What was found out about one part, and what can be done where it is not ok."""

    part: str
    health: Health
    what: str
    remedy: str = ""


@attrs.frozen
class Examination:
    """Looks at everything; `environment` is the daemon's own, as far as it is known."""

    configuration: Configuration
    file: Path | None
    environment: Mapping[str, str]
    privileges: Privileges

    def findings(self) -> Iterator[Finding]:
        """Yield what is found, part by part. Blocks, for about a second."""
        yield from self._user()
        cgroups = self._cgroups()
        try:
            yield from self._sandbox(cgroups)
            yield from self._limits(cgroups)
        finally:
            cgroups.close()
        yield from _judged("git", check_git, "")
        yield from self._callers()
        yield from self._credentials()
        yield from self._permissions()
        yield from self._disk()
        yield from self._descriptors()

    def _user(self) -> Iterator[Finding]:
        user = self.privileges.user
        name = f"{user.name}, of root's choice" if user else f"uid {os.geteuid()}, who runs this"
        yield Finding("user", Health.OK, f"the daemon runs as {name}")

    def _cgroups(self) -> Cgroups:
        user = self.privileges.user
        return open_cgroups(f"doctor-{os.getpid()}", (user.uid, user.gid) if user else None)

    def _sandbox(self, cgroups: Cgroups) -> Iterator[Finding]:
        if self.configuration.sandbox.kind == "none":
            yield Finding(
                "sandbox",
                Health.WEAKER,
                "there is none: evaluators may do all that the daemon's user may",
                'apt-get install bubblewrap, and leave out sandbox.kind = "none"',
            )
            return
        with self.privileges.acting():
            accounts = Path(tempfile.mkdtemp(prefix="tawebeval-"))
        try:
            sandbox = open_bubblewrap(self.configuration, accounts, cgroups, _nobody())
            problem = try_out(sandbox, self.privileges)
        except ConfigurationError as error:
            yield Finding("sandbox", Health.BROKEN, *_split(error))
            return
        finally:
            with self.privileges.acting():
                remove(accounts)
        if problem is not None:
            yield Finding("sandbox", Health.BROKEN, f"bubblewrap does not work: {problem}")
            return
        network = "with the network" if sandbox.network else "without a network"
        yield Finding("sandbox", Health.OK, f"{sandbox.program} works, {network}")

    def _limits(self, cgroups: Cgroups) -> Iterator[Finding]:
        for what, single in (
            ("memory", "of each process alone (RLIMIT_DATA), not what they share"),
            ("processes", "of the sandbox by RLIMIT_NPROC, without saying so"),
            ("cpu", "of each process alone (RLIMIT_CPU)"),
        ):
            if what in cgroups.enforced:
                yield Finding("limits", Health.OK, f"{what}: of all processes together")
            else:
                yield Finding("limits", Health.WEAKER, f"{what}: {single}")
        for problem in cgroups.problems:
            yield Finding("limits", Health.WEAKER, problem)

    def _callers(self) -> Iterator[Finding]:
        callers = self.configuration.callers
        source = find_tokens(callers.tokens, self.environment)
        if source is not None:
            yield from _judged("callers", lambda: read_tokens(source), f"tokens from {source}")
        elif callers.open:
            yield Finding(
                "callers",
                Health.WEAKER,
                "anybody who can connect may run programs: there are no tokens, and callers.open",
                "tawebeval token new NAME, and leave out callers.open",
            )
        else:
            what = "no tokens: whoever can connect on this machine may call"
            endpoints = self.configuration.listen
            yield from _judged("callers", lambda: check_endpoints(endpoints), what)

    def _credentials(self) -> Iterator[Finding]:
        settings = self.configuration.repositories.credentials
        if settings:
            directory = self.environment.get("CREDENTIALS_DIRECTORY", "")
            what = f"{len(settings)} for private repositories"
            yield from _judged("credentials", lambda: Keyring(settings, directory, b""), what)

    def _permissions(self) -> Iterator[Finding]:
        state, cache = locate(self.environment)
        user = self.privileges.user
        uid = user.uid if user else os.geteuid()
        for path in filter(None, (self.file, state, cache, state / "key")):
            try:
                status = path.stat()
            except FileNotFoundError:
                yield Finding("permissions", Health.OK, f"{path} is not there yet")
                continue
            except OSError as error:
                yield Finding("permissions", Health.BROKEN, f"{path}: {error.strerror}")
                continue
            mode = stat.S_IMODE(status.st_mode)
            secret = path.name == "key"
            if mode & (0o077 if secret else _OTHERS_MAY_WRITE):
                what = f"{path} is open to others (mode {mode:o})"
                remedy = f"chmod {'600' if secret else 'go-w'} {path}"
                yield Finding("permissions", Health.BROKEN, what, remedy)
            elif path != self.file and status.st_uid != uid:
                what = f"{path} belongs to uid {status.st_uid}, and the daemon is uid {uid}"
                yield Finding("permissions", Health.BROKEN, what, f"chown -R {uid}: {path.parent}")
            else:
                yield Finding("permissions", Health.OK, str(path))

    def _disk(self) -> Iterator[Finding]:
        state, cache = locate(self.environment)
        settings = self.configuration
        running = settings.evaluations.running or len(os.sched_getaffinity(0))
        each = (
            settings.limits.disk + settings.limits.request_body + settings.repositories.tree_bytes
        )
        for path, needed, why in (
            (state, running * each, f"{running} evaluations at once may take"),
            (cache, settings.repositories.cache, "repositories.cache is"),
        ):
            there = next(one for one in (path, *path.parents) if one.exists())
            free = shutil.disk_usage(there).free
            what = f"{path}: {_gigabytes(free)} are free, {why} {_gigabytes(needed)}"
            if free >= needed:
                yield Finding("disk", Health.OK, what)
            else:
                remedy = "a larger file system, or lower limits"
                yield Finding("disk", Health.WEAKER, what, remedy)

    def _descriptors(self) -> Iterator[Finding]:
        running = self.configuration.evaluations.running or len(os.sched_getaffinity(0))
        needed = self.configuration.http.connections + running * _DESCRIPTORS + _SPARE
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        what = f"{limit} are allowed here, and {needed} may be needed"
        if limit in (resource.RLIM_INFINITY,) or limit >= needed:
            yield Finding("descriptors", Health.OK, what)
        else:
            remedy = f"LimitNOFILE={needed} in the unit (or ulimit -n), or fewer http.connections"
            yield Finding("descriptors", Health.WEAKER, what, remedy)


def examine(file: Path | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield all findings; where the configuration is broken, that is the only one."""
    try:
        configuration = read_configuration(str(file) if file else None)
    except ConfigurationError as error:
        yield Finding("configuration", Health.BROKEN, str(error))
        return
    yield Finding("configuration", Health.OK, str(file or "none: the defaults"))
    try:
        privileges = find_privileges(configuration.service.user, Process())
    except ConfigurationError as error:
        yield Finding("user", Health.BROKEN, *_split(error))
        return
    environment = privileges.environment(environment)
    yield from Examination(configuration, file, environment, privileges).findings()


def _nobody() -> Orphans:
    """Return what finds orphans, for a sandbox that is only tried out and has none."""
    from twisted.internet import reactor

    return Orphans(reactor, Spawner(reactor))


def _judged(part: str, look: Callable[[], object], what: str) -> Iterator[Finding]:
    try:
        said = look()
    except ConfigurationError as error:
        yield Finding(part, Health.BROKEN, *_split(error))
    else:
        yield Finding(part, Health.OK, what or str(said))


def _split(error: ConfigurationError) -> tuple[str, str]:
    """Return the sentence, and its remedy, which such errors have after a semicolon."""
    what, _, remedy = str(error).partition("; ")
    return what, remedy


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
