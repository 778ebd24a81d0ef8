"""The daemon's privileges: it never runs as root, and keeps no right that it does not need.

1. `find_privileges` decides, before anything is done, which user the daemon becomes.
2. The user's own files are handled with that user's rights already (`act_as_user`).
3. `become_user`: root becomes the user for good, and keeps only the right to bind ports below 1024.
   So UNIX sockets are made as the user, too: a symbolic link in a directory of the user's could
   lead root to another file.
4. `drop_privileges`: the rest goes. From here on programs may be run.
5. `check_no_root_rights`: nothing of root is left, also after twistd's `--uid`.

`CurrentProcess` is the kernel's view of the process: Python's `os` has neither prctl(2) nor
capset(2). The rights that these two take away are the calling thread's, so there must be no other
thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import grp
import os
import pwd
from collections.abc import Iterable, Iterator, Mapping

import attrs
from twisted.logger import Logger

from tawebeval.errors import ConfigurationError

CAP_NET_BIND_SERVICE = 10  # capabilities(7): ports below 1024

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_PR_SET_KEEPCAPS = 8
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

_VERSION_3 = 0x20080522  # of capset's arguments: two words of 32 bits for each set
_SETS = ("CapInh", "CapPrm", "CapEff", "CapAmb")


class CurrentProcess:
    """This process and its credentials (credentials(7)). Every method raises OSError."""

    def get_user_ids(self) -> tuple[int, int, int]:
        """Return the real, effective and saved user."""
        return os.getresuid()

    def get_group_ids(self) -> tuple[int, int, int]:
        """Return the real, effective and saved group."""
        return os.getresgid()

    def get_supplementary_groups(self) -> frozenset[int]:
        """Return the supplementary groups."""
        return frozenset(os.getgroups())

    def set_supplementary_groups(self, groups: Iterable[int]) -> None:
        """Set the supplementary groups."""
        os.setgroups(list(groups))

    def set_group_ids(self, real: int, effective: int, saved: int) -> None:
        """Set the group identifiers; -1 keeps one."""
        os.setresgid(real, effective, saved)

    def set_user_ids(self, real: int, effective: int, saved: int) -> None:
        """Set the user identifiers; -1 keeps one."""
        os.setresuid(real, effective, saved)

    def set_environment(self, variables: Mapping[str, str]) -> None:
        """Set environment variables."""
        os.environ.update(variables)

    def count_threads(self) -> int:
        """Return the number of threads."""
        return len(os.listdir("/proc/self/task"))

    def get_capabilities(self) -> int:
        """Return the capabilities in any set but the bounding one, as a bit mask."""
        found = 0
        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in _SETS:
                    found |= int(value, 16)
        return found

    def set_capabilities(self, capabilities: int) -> None:
        """Make `capabilities`, a bit mask, the permitted and effective ones; inherit none."""
        low, high = capabilities & 0xFFFF_FFFF, capabilities >> 32
        header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
        # Effective, permitted and inheritable: of the first 32 capabilities, and of the rest.
        data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
        raise_on_error(_libc.capset(header, data))
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)

    def keep_capabilities(self) -> None:
        """Keep the permitted capabilities at the next change from root to another user."""
        prctl(_PR_SET_KEEPCAPS, 1)

    def empty_bounding_set(self) -> None:
        """Empty the bounding set: no executed program gains a capability."""
        for capability in range(64):
            try:
                prctl(_PR_CAPBSET_READ, capability)
            except OSError as error:
                if error.errno == errno.EINVAL:  # beyond the last capability of this kernel
                    return
                raise
            prctl(_PR_CAPBSET_DROP, capability)

    def set_no_new_privileges(self) -> None:
        """Ignore setuid bits: no executed program has more rights than this process."""
        prctl(_PR_SET_NO_NEW_PRIVS, 1)

    def forbid_tracing(self) -> None:
        """Forbid other processes of the user to trace this one or to read its memory."""
        prctl(_PR_SET_DUMPABLE, 0)

    def is_tracing_forbidden(self) -> bool:
        """Tell whether `forbid_tracing` is in effect: a change of user may end it."""
        return prctl(_PR_GET_DUMPABLE) == 0


_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, argument: int = 0) -> int:
    """Set or get a property of this process (man 2 prctl). Raises: OSError."""
    zero = ctypes.c_ulong(0)
    return raise_on_error(_libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero))


def raise_on_error(result: int) -> int:
    """Return the result of a call of the C library. Raises: OSError with errno if it is below 0."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


_UNCHANGED = -1

log = Logger()


@attrs.frozen
class User:
    """An unprivileged user of the machine; `groups` are its supplementary groups."""

    name: str
    uid: int
    gid: int
    groups: frozenset[int]
    home: str


@attrs.frozen
class Privileges:
    """The change of `process` to the rights of `user`; None keeps the present user."""

    process: CurrentProcess
    user: User | None = None

    @property
    def owner_ids(self) -> tuple[int, int] | None:
        """The numbers of the user and its group, for what root gives to the user."""
        return None if self.user is None else (self.user.uid, self.user.gid)

    def build_user_environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return an environment with the variables of the user."""
        if self.user is None:
            return dict(given)
        return {**given, **_variables(self.user)}

    @contextlib.contextmanager
    def act_as_user(self) -> Iterator[None]:
        """Run the body with the user's rights, so that its symbolic links cannot mislead root."""
        if self.user is None:
            yield
            return
        process, user = self.process, self.user
        groups = process.get_supplementary_groups()
        gid, uid = process.get_group_ids()[1], process.get_user_ids()[1]
        process.set_supplementary_groups(sorted(user.groups))
        process.set_group_ids(_UNCHANGED, user.gid, _UNCHANGED)
        process.set_user_ids(_UNCHANGED, user.uid, _UNCHANGED)
        try:
            yield
        finally:
            process.set_user_ids(_UNCHANGED, uid, _UNCHANGED)
            process.set_group_ids(_UNCHANGED, gid, _UNCHANGED)
            process.set_supplementary_groups(sorted(groups))

    def become_user(self) -> None:
        """Become the user for good, with no capability but that of binding ports below 1024.

        The supplementary groups are those that `find_user` has checked; initgroups(3) would look
        them up again. Raises: SystemExit.
        """
        if self.user is None:
            return
        process, user = self.process, self.user
        try:
            if process.count_threads() != 1:
                raise SystemExit(
                    "tawebeval: service.user: another thread would keep running as root"
                )
            port = process.get_capabilities() & 1 << CAP_NET_BIND_SERVICE
            with contextlib.suppress(PermissionError):  # the bounding set is not needed below
                process.empty_bounding_set()
            process.keep_capabilities()
            process.set_supplementary_groups(sorted(user.groups))
            process.set_group_ids(user.gid, user.gid, user.gid)
            process.set_user_ids(user.uid, user.uid, user.uid)
            process.set_capabilities(port)
            process.forbid_tracing()
        except OSError as error:
            raise SystemExit(
                f"tawebeval: service.user: cannot become {user.name}: {error.strerror}"
            ) from None
        process.set_environment(_variables(user))
        log.info("changed from root to the user {user}", user=user.name)

    def drop_privileges(self) -> None:
        """Drop all capabilities and the effect of setuid bits, root or not. Raises: SystemExit.

        A sandbox that works by user namespaces needs neither.
        """
        process = self.process
        try:
            process.set_capabilities(0)
            process.set_no_new_privileges()
            process.forbid_tracing()
        except OSError as error:
            raise SystemExit(f"tawebeval: cannot drop capabilities: {error.strerror}") from None
        self.check_no_root_rights()

    def check_no_root_rights(self) -> None:
        """Check that no right of root is left or can be regained. Raises: SystemExit."""
        process, user = self.process, self.user
        if 0 in process.get_user_ids():
            raise SystemExit("tawebeval: " + _ROOT)
        if process.get_capabilities() or not process.is_tracing_forbidden():
            raise SystemExit(
                "tawebeval: the daemon still has capabilities that it should have dropped"
            )
        if user is None:
            return
        for is_now, shall_be in (
            (process.get_user_ids(), (user.uid,) * 3),
            (process.get_group_ids(), (user.gid,) * 3),
            # The kernel may list the primary group here.
            (process.get_supplementary_groups() | {user.gid}, user.groups | {user.gid}),
        ):
            if is_now != shall_be:
                raise SystemExit(
                    f"tawebeval: service.user: could not change from root to {user.name}"
                )
        for regain in (process.set_user_ids, process.set_group_ids):
            with contextlib.suppress(OSError):
                regain(0, 0, 0)
                raise SystemExit("tawebeval: service.user: the daemon can become root again")


_ROOT = (
    "service.user: not set, and the daemon does not run git and evaluators as root; create a user"
    " by `adduser --system --group --home /var/lib/tawebeval tawebeval` and name it there, or start"
    " the daemon as that user"
)


def find_privileges(name: str, process: CurrentProcess) -> Privileges:
    """Return the privileges to give up; `name` is `service.user`. Raises: ConfigurationError."""
    if 0 in process.get_user_ids():
        if not name:
            raise ConfigurationError(_ROOT)
        return Privileges(process, find_user(name))
    if name and find_user(name).uid != process.get_user_ids()[1]:
        raise ConfigurationError(
            f"service.user: only root can change to {name!r}; start the daemon as root or as that"
            " user, or remove the setting"
        )
    return Privileges(process)


def find_user(name: str) -> User:
    """Return a user by name. Raises: ConfigurationError, if it is root or does not exist."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise ConfigurationError(
            f"service.user: no user {name!r} on this machine; create one by "
            f"`adduser --system --group --home /var/lib/{name} {name}`"
        ) from None
    groups = frozenset(os.getgrouplist(name, entry.pw_gid))
    if entry.pw_uid == 0:
        raise ConfigurationError(f"service.user: {name!r} is root; name another user")
    if 0 in {entry.pw_gid, *groups}:
        raise ConfigurationError(
            f"service.user: {name!r} is in the group {_group_name(0)} of root; name a user outside"
            " that group"
        )
    return User(name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _variables(user: User) -> dict[str, str]:
    return {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}
