"""What the daemon finds on the disk, examined for `tawebeval doctor`.

That are its directories, and the files of its secrets: whose they are, who can get at them, and
how much room there is. Nothing is changed; a file without a name shows whether anything could be.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from tawebeval.config import Configuration
from tawebeval.core.identifiers import KEY_BYTES
from tawebeval.daemon.findings import Finding, Health, broken, judged
from tawebeval.daemon.health import write_and_read
from tawebeval.daemon.room import judge_room
from tawebeval.daemon.state import OF_CACHE, OF_STATE, existing, locate
from tawebeval.errors import ConfigurationError
from tawebeval.git.keyring import Keyring
from tawebeval.linux.diskfaults import MAKE_ROOM, is_full
from tawebeval.linux.ownership import check_owner, name_of
from tawebeval.linux.privileges import Privileges
from tawebeval.linux.secretfiles import STRANGERS
from tawebeval.sandbox.probe import Places
from tawebeval.sandbox.project_quotas import check_quotas, find_quota_directories, quota_of
from tawebeval.web.auth import find_metrics_tokens, find_tokens, read_tokens
from tawebeval.webhooks.signing import find_secrets, read_signing

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_WRITABLE = "mount it for writing; STATE_DIRECTORY and CACHE_DIRECTORY may name another place"
_RIGHTS = {"r": os.R_OK, "w": os.W_OK, "x": os.X_OK}
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@attrs.frozen
class Premises:
    """Looks at them with the rights of `privileges`; `environment` is the daemon's own."""

    configuration: Configuration
    file: Path | None
    environment: Mapping[str, str]
    privileges: Privileges

    def secrets(self) -> Iterator[Finding]:
        """Yield what is found out about the files of tokens and credentials."""
        try:
            source = find_tokens(self.configuration.callers, self.environment)
        except ConfigurationError:
            source = None  # which is said of the callers
        if source is not None:
            yield from self._tokens("tokens", source)
        try:
            readers = find_metrics_tokens(self.configuration.metrics, self.environment)
        except ConfigurationError as error:
            yield broken("metrics", error)
        else:
            if readers is not None:
                yield from self._tokens("metrics", readers)
        yield from self._credentials()
        if self.configuration.callbacks.enabled:
            yield from self._callbacks()

    def _tokens(self, part: str, source: Path) -> Iterator[Finding]:
        finding = judged(part, lambda: read_tokens(source), str(source))
        if finding.health is Health.OK:
            finding = self._writable(part, source) or finding
        yield finding
        if finding.health is Health.OK and not self._may(source, os.R_OK):
            what = f"{source}: {self._user} cannot read it, so a reload (SIGHUP) is refused"
            remedy = f"chgrp {self._group} {source}; chmod 640 {source}"
            yield Finding(part, Health.WEAKER, what, remedy)

    def _callbacks(self) -> Iterator[Finding]:
        try:
            source = find_secrets(self.configuration.callbacks.secrets, self.environment)
        except ConfigurationError as error:
            yield broken("callbacks", error)
            return
        what = f"are signed, with secrets of callers in {source}"
        finding = judged("callbacks", lambda: read_signing(source), what)
        yield finding
        if finding.health is not Health.OK:
            return
        yield from self._strangers("callbacks", source)
        if not self._may(source, os.R_OK):
            what = f"{source}: {self._user} cannot read it, so a reload (SIGHUP) is refused"
            yield Finding(
                "callbacks", Health.WEAKER, what, f"chown {self._user}: {shlex.quote(str(source))}"
            )

    def _credentials(self) -> Iterator[Finding]:
        settings = self.configuration.repositories.credentials
        if not settings:
            return
        directory = self.environment.get("CREDENTIALS_DIRECTORY", "")
        what = f"{len(settings)} for private repositories"
        finding = judged("credentials", lambda: Keyring(settings, directory, b""), what)
        yield finding
        if finding.health is not Health.OK:
            return
        for entry in settings:
            path = Path(directory, entry.password_file or entry.key_file)
            quoted = shlex.quote(str(path))
            yield from self._strangers("credentials", path)
            if not self._may(path, os.R_OK):
                # A password the daemon reads while it is root; a key is read by ssh, each time.
                health = Health.BROKEN if entry.key_file else Health.WEAKER
                why = "ssh can use it" if entry.key_file else "SIGHUP reads a new one"
                what = f"{path}: {self._user} has to be able to read it before {why}"
                yield Finding("credentials", health, what, f"chown {self._user}: {quoted}")

    def permissions(self) -> Iterator[Finding]:
        """Yield whose the directories are, and who may write there."""
        if self.file is not None:
            finding = self._writable("permissions", self.file)
            yield finding or Finding("permissions", Health.OK, str(self.file))
        state, cache = locate(self.environment)
        yield self._directory(state, OF_STATE)
        yield self._directory(cache, OF_CACHE)
        finding = self._key(state / "key")
        if finding is not None:
            yield finding

    def _directory(self, path: Path, parts: tuple[str, ...]) -> Finding:
        if os.statvfs(existing(path)).f_flag & os.ST_RDONLY:
            what = f"{path}: its file system is mounted read-only"
            return Finding("permissions", Health.BROKEN, what, _WRITABLE)
        if not path.exists():
            return self._missing(path)
        status = path.stat()
        if status.st_uid == 0 and self.privileges.user and not os.listdir(path):
            return Finding("permissions", Health.OK, f"{path}: empty; root gives it away")
        if status.st_uid == self._uid and (closed := self._closed(path)):
            return closed
        try:
            with self.privileges.acting():
                check_owner(path, parts)
        except ConfigurationError as error:
            return broken("permissions", error)
        within = (self._closed(path / part) for part in parts)
        found = (*within, self._writable("permissions", path))
        return next(filter(None, found), None) or self._written(path)

    def _written(self, path: Path) -> Finding:
        """Tell whether what the daemon writes there can be read again."""
        try:
            with self.privileges.acting():
                write_and_read(path)
        except OSError as error:
            what = f"{path}: cannot be written to: {error.strerror}"
            remedy = MAKE_ROOM if is_full(error) else _WRITABLE
            return Finding("permissions", Health.BROKEN, what, remedy)
        return Finding("permissions", Health.OK, str(path))

    def _closed(self, path: Path) -> Finding | None:
        """Tell whether the daemon's user cannot use what is its own as the daemon has to."""
        if not path.exists():
            return None
        letters = "rwx" if path.is_dir() else "r" if path.name == "key" else "w"
        if self._may(path, sum(_RIGHTS[letter] for letter in letters)):
            return None
        what = f"{path}: {self._user} has no right ({letters}) to use it as the daemon does"
        remedy = f"chmod u+{letters} {shlex.quote(str(path))}"
        return Finding("permissions", Health.BROKEN, what, remedy)

    def _missing(self, path: Path) -> Finding:
        """Tell whether a directory that is not there can be made."""
        above = existing(path)
        root_makes_it = (
            self.privileges.user is not None
            and above == path.absolute().parent
            and not any(map(_is_anybodys, (above, *above.parents)))
        )
        if root_makes_it or self._may(above, os.W_OK | os.X_OK):
            return Finding("permissions", Health.OK, f"{path}: not there yet; the daemon makes it")
        made = shlex.join(["install", "-d", "-m", "700", "-o", self._user, str(path)])
        what = f"{path}: not there, and {self._user} cannot make it in {above}"
        return Finding("permissions", Health.BROKEN, what, f"as root: {made}")

    def _key(self, path: Path) -> Finding | None:
        try:
            if not path.exists():
                return None
        except PermissionError:
            return None  # that the directory is closed has a finding of its own
        status = path.stat()
        if stat.S_IMODE(status.st_mode) & _OTHERS:
            what = f"{path}: others can get at it, and with it make identifiers"
            return Finding("permissions", Health.BROKEN, what, f"chmod 600 {path}")
        if status.st_size != KEY_BYTES:
            what = f"{path}: has {status.st_size} bytes in place of {KEY_BYTES}"
            remedy = "remove it; identifiers issued so far are no longer recognised then"
            return Finding("permissions", Health.BROKEN, what, remedy)
        return Finding("permissions", Health.OK, str(path))

    def places(self) -> Places:
        """Return where overlays can be tried: where they will be, if that is there already."""
        state, cache = locate(self.environment)
        return Places(*(self._probed(path) for path in (cache, state)))

    def _probed(self, path: Path) -> Path | None:
        return path if path.is_dir() and self._may(path, os.W_OK | os.X_OK) else None

    def room(self, running: int) -> Iterator[Finding]:
        """Yield whether there is room for so many evaluations at once."""
        with self.privileges.acting():
            found = list(judge_room(self.configuration, running, *locate(self.environment)))
        yield from found

    def quotas(self) -> Iterator[Finding]:
        """Yield whether the file system holds evaluations to project quotas."""
        state, _ = locate(self.environment)
        with self.privileges.acting():
            found = find_quota_directories(state)
            held = quota_of(self.configuration)
            what = "none: what evaluations have on the disk is counted, four times a second"
            if found:
                what = f"{state}/quotas: {len(found)} evaluations, each held to {held.size} bytes"
            finding = judged("quotas", lambda: check_quotas(found, self.configuration), what)
        yield finding

    @property
    def _user(self) -> str:
        user = self.privileges.user
        return user.name if user else name_of(os.geteuid())

    @property
    def _uid(self) -> int:
        user = self.privileges.user
        return user.uid if user else os.geteuid()

    @property
    def _group(self) -> int:
        user = self.privileges.user
        return user.gid if user else os.getegid()

    def _may(self, path: Path, mode: int) -> bool:
        with self.privileges.acting():
            return os.access(path, mode, effective_ids=True)

    def _strangers(self, part: str, path: Path) -> Iterator[Finding]:
        if path.stat().st_mode & STRANGERS:
            what = f"{path}: every user of this machine can get at it"
            yield Finding(part, Health.BROKEN, what, f"chmod o= {shlex.quote(str(path))}")

    def _writable(self, part: str, path: Path) -> Finding | None:
        if not path.stat().st_mode & _OTHERS_MAY_WRITE:
            return None
        what = f"{path}: others may write to it"
        return Finding(part, Health.BROKEN, what, f"chmod go-w {shlex.quote(str(path))}")


def _is_anybodys(path: Path) -> bool:
    """Tell whether others than root may make what is not there, as `ownership` sees it."""
    status = path.stat()
    loose = status.st_mode & _OTHERS_MAY_WRITE and not status.st_mode & stat.S_ISVTX
    return status.st_uid != 0 or bool(loose)
