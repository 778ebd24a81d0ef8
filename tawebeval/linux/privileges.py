"""Whom the daemon runs as: never root, and with no more rights than it needs.

1. `find_privileges` decides, before anything is done, whom the daemon becomes.
2. Whatever concerns the user's own files is done as that user already (`acting`).
3. `step_down`: root becomes the user, for good. Only ports below 1024 may still be bound, so
   that a UNIX socket is made as the user, too: root, working in a folder of the user's, could
   be led to another file by a symbolic link.
4. `renounce`: what is left goes. From here on programs may be run.
5. `check`: whoever has called the above, or not, or twistd's `--uid`: root runs nothing.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
from collections.abc import Iterator, Mapping

import attrs
from twisted.logger import Logger

from tawebeval.errors import ConfigurationError
from tawebeval.linux.kernel import CAP_NET_BIND_SERVICE, Process

_UNCHANGED = -1

log = Logger()


@attrs.frozen
class User:
    """An unprivileged user; `groups` are the supplementary ones."""

    name: str
    uid: int
    gid: int
    groups: frozenset[int]
    home: str


@attrs.frozen
class Privileges:
    """What `process` has to give up; `user` is whom it becomes, None if it stays who it is."""

    process: Process
    user: User | None = None

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return an environment as the user would have it."""
        if self.user is None:
            return dict(given)
        return {**given, **_variables(self.user)}

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Work with the user's rights for a while: its files do not lead root astray."""
        if self.user is None:
            yield
            return
        process, user = self.process, self.user
        groups = process.groups()
        gid, uid = process.group_ids()[1], process.user_ids()[1]
        process.set_groups(sorted(user.groups))
        process.set_group_ids(_UNCHANGED, user.gid, _UNCHANGED)
        process.set_user_ids(_UNCHANGED, user.uid, _UNCHANGED)
        try:
            yield
        finally:
            process.set_user_ids(_UNCHANGED, uid, _UNCHANGED)
            process.set_group_ids(_UNCHANGED, gid, _UNCHANGED)
            process.set_groups(sorted(groups))

    def step_down(self) -> None:
        """Become the user for good, with nothing of root's but ports below 1024.

        Raises SystemExit where that is impossible. The groups are set to those that were
        looked up and judged, instead of by initgroups(3), which would look again; they are
        not left out, since the user shall have the same rights as if it had started the daemon.
        """
        if self.user is None:
            return
        process, user = self.process, self.user
        try:
            if process.threads() != 1:
                raise SystemExit("tawebeval: service.user: another thread would stay root")
            port = process.capabilities() & 1 << CAP_NET_BIND_SERVICE
            with contextlib.suppress(PermissionError):  # the bounding set is not needed below
                process.empty_bounding_set()
            process.keep_capabilities()
            process.set_groups(sorted(user.groups))
            process.set_group_ids(user.gid, user.gid, user.gid)
            process.set_user_ids(user.uid, user.uid, user.uid)
            process.set_capabilities(port)
            process.hide()
        except OSError as error:
            raise SystemExit(
                f"tawebeval: service.user: cannot become {user.name}: {error.strerror}"
            ) from None
        process.set_environment(_variables(user))
        log.info("root became {user}", user=user.name)

    def renounce(self) -> None:
        """Give up every right that is not needed to run, root or not. Raises SystemExit.

        Programs that are executed gain nothing by being setuid either. A sandbox that works by
        user namespaces does not need that.
        """
        process = self.process
        try:
            process.set_capabilities(0)
            process.gain_nothing()
            process.hide()
        except OSError as error:
            raise SystemExit(f"tawebeval: cannot give up rights: {error.strerror}") from None
        self.check()

    def check(self) -> None:
        """Make sure that nothing of root is left or can be had again. Raises SystemExit."""
        process, user = self.process, self.user
        if 0 in process.user_ids():
            raise SystemExit("tawebeval: " + _ROOT)
        if process.capabilities() or not process.is_hidden():
            raise SystemExit("tawebeval: the daemon still has rights that it should have given up")
        if user is None:
            return
        for is_now, shall_be in (
            (process.user_ids(), (user.uid,) * 3),
            (process.group_ids(), (user.gid,) * 3),
            # The kernel may count the primary group among them.
            (process.groups() | {user.gid}, user.groups | {user.gid}),
        ):
            if is_now != shall_be:
                raise SystemExit(f"tawebeval: service.user: root has not become {user.name}")
        for regain in (process.set_user_ids, process.set_group_ids):
            with contextlib.suppress(OSError):
                regain(0, 0, 0)
                raise SystemExit("tawebeval: service.user: the daemon can become root again")


_ROOT = (
    "service.user: is empty, and neither git nor evaluators are run as root; name a user that "
    "has nothing else, such as `adduser --system --group tawebeval` makes, or start the daemon "
    "as that user"
)


def find_privileges(name: str, process: Process) -> Privileges:
    """Return what to give up; `name` is the setting `service.user`. Raises ConfigurationError."""
    if 0 in process.user_ids():
        if not name:
            raise ConfigurationError(_ROOT)
        return Privileges(process, find_user(name))
    if name and find_user(name).uid != process.user_ids()[1]:
        raise ConfigurationError(
            f"service.user: only root can become {name!r}; start the daemon as root or as that "
            "user, or leave the setting out"
        )
    return Privileges(process)


def find_user(name: str) -> User:
    """Return the user of that name. Raises ConfigurationError for root, and for nobody at all."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise ConfigurationError(
            f"service.user: this machine has no user {name!r}; make one by "
            f"`adduser --system --group {name}`"
        ) from None
    groups = frozenset(os.getgrouplist(name, entry.pw_gid))
    if entry.pw_uid == 0:
        raise ConfigurationError(f"service.user: {name!r} is root itself; name another user")
    if 0 in {entry.pw_gid, *groups}:
        raise ConfigurationError(
            f"service.user: {name!r} is in the group {_group_name(0)}, whose files are root's; "
            "name a user that is not"
        )
    return User(name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _variables(user: User) -> dict[str, str]:
    return {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}
