"""Writable trees that are overlays: what is changed is kept apart, and nothing is copied before.

Only root may mount, be it root of a user namespace that a user has made for himself. So there is
`mounter`, a process in such a namespace, which mounts each overlay in a mount namespace of its own
and hands that over. A sandbox is started in both. The daemon, which cannot be in another user
namespace, reads the tree by a descriptor.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import attrs
from twisted.logger import Logger

from tawebeval import mounter
from tawebeval.privileges import User
from tawebeval.workspace import Workspace
from tawebeval.writable import Copies, WritableTree

_UNSHARE = ("/usr/bin/unshare", "--user", "--map-current-user", "--mount", "--keep-caps", "--")
_NSENTER = ("/usr/bin/nsenter", "--mount=/proc/self/fd/0", "--preserve-credentials")
# Of the daemon's own Python the user that it has become may not be able to read anything.
_PYTHONS = (sys.executable, "/usr/bin/python3")
_SOURCE = Path(mounter.__file__).read_bytes()  # now, for the same reason
NAME = "tawebeval-mounter"
"""By which people find the process among others."""

_PATIENCE = 10.0  # seconds for the process to start, and to answer
_COMPLAINT = 8 * 1024  # bytes of what it says before it fails

log = Logger()


@attrs.frozen
class Mounter:
    """The process of `mounter`, and the connection to it."""

    _process: subprocess.Popen[bytes]
    _connection: socket.socket

    @property
    def prefix(self) -> Sequence[str]:
        """What runs a command in its user namespace, and in the mount namespace that is stdin."""
        return (*_NSENTER, f"--user=/proc/{self._process.pid}/ns/user", "--")

    def mount(self, paths: Sequence[Path]) -> tuple[int, int]:
        """Return a mount namespace and the top of an overlay, which that request asks for. Blocks.

        Raises OSError; one that is a ConnectionError or a TimeoutError tells that the process is
        of no use any more.
        """
        self._connection.send(b"\0".join(map(os.fsencode, paths)))
        answer, descriptors, _, _ = socket.recv_fds(
            self._connection, 16, 2, socket.MSG_CMSG_CLOEXEC
        )
        if answer == b"0":
            namespace, top = descriptors
            return namespace, top
        if not answer:
            raise ConnectionResetError("the process that mounts has ended")
        raise OSError(int(answer), os.strerror(int(answer)), str(paths[1]))

    def close(self) -> None:
        """End it. Blocks, hardly."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def start_mounter(user: User | None = None) -> Mounter:
    """Start the process, as `user` if one is given. Blocks. Raises OSError."""
    complaints = []
    for python in dict.fromkeys(_PYTHONS):
        try:
            return _start(python, user)
        except OSError as error:
            complaints.append(str(error.strerror or error))
    raise OSError(None, "; ".join(dict.fromkeys(complaints)))


def _start(python: str, user: User | None) -> Mounter:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        theirs,
        open(os.memfd_create("complaint", os.MFD_CLOEXEC), "r+b") as complaint,
        open(os.memfd_create("mounter", os.MFD_CLOEXEC), "r+b", buffering=0) as source,
    ):
        try:
            source.write(_SOURCE)
            ours.settimeout(_PATIENCE)
            process = subprocess.Popen(
                [*_UNSHARE, python, "-I", "-S", f"/proc/self/fd/{source.fileno()}", NAME],
                env={},
                cwd="/",
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=complaint,
                pass_fds=[source.fileno()],
                start_new_session=True,  # no key on a terminal ends it before the daemon does
                user=user.uid if user else None,
                group=user.gid if user else None,
                extra_groups=() if user else None,
            )
        except OSError:
            ours.close()
            raise
        theirs.close()
        started = Mounter(process, ours)
        try:
            if ours.recv(len(mounter.READY)) == mounter.READY:
                return started
            said = os.pread(complaint.fileno(), _COMPLAINT, 0).decode(errors="replace").strip()
            raise OSError(None, said.rpartition("\n")[2] or "the process that mounts has ended")
        except OSError:
            started.close()
            raise


class Overlays:
    """Makes overlays as long as `problem` is None, and copies where that says why it cannot."""

    def __init__(self) -> None:
        self.problem: str | None = "nothing is mounted yet"
        self._mounter: Mounter | None = None
        self._lock = Lock()
        self._copies = Copies()

    def open(self, user: User | None = None) -> None:
        """Begin to make overlays, if that can be done; as `user`, if one is given. Blocks."""
        try:
            self._mounter = start_mounter(user)
        except OSError as error:
            self.problem = str(error.strerror or error)
        else:
            self.problem = None

    def give_up(self, problem: str) -> None:
        """Make copies from now on. Blocks, hardly."""
        self.close()
        self.problem = problem

    def make(self, checkout: Path, workspace: Workspace) -> WritableTree:
        """Return a tree that is in the beginning as `checkout`. Blocks. Raises OSError."""
        if self.problem is None:
            try:
                return self._overlay(checkout, workspace)
            except OSError as error:
                log.warn("{path} is copied: {error}", path=checkout, error=error)
        return self._copies.make(checkout, workspace)

    def _overlay(self, checkout: Path, workspace: Workspace) -> WritableTree:
        workspace.work.mkdir()
        with self._lock:
            if self._mounter is None:
                self._mounter = start_mounter()
            try:
                namespace, top = self._mounter.mount((checkout, workspace.tree, workspace.work))
            except (ConnectionError, TimeoutError):
                self._end()
                raise
            return WritableTree(self._mounter.prefix, namespace, top)

    def close(self) -> None:
        """End what mounts; trees that there are stay as they are. Blocks, hardly."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._mounter is not None:
            self._mounter.close()
            self._mounter = None
