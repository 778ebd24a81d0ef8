"""The directories of one evaluation, from upload to removal, and its writable tree. All blocks.

<evaluation>/submission/<field>/<filename>   as uploaded
<evaluation>/request                         the request, to run the evaluation again
<evaluation>/tree/                           the commit's tree, writable; the changes, if the tree
                                             is an overlay
<evaluation>/tmp/                            TEMPORARY_DIRECTORY
<evaluation>/home/                           HOME
<evaluation>/work/                           the work directory of an overlay
<evaluation>/scratch/                        /tmp, in a sandbox
<evaluation>/shm/                            /dev/shm, in a sandbox
<evaluation>/output/                         what the evaluator prints, and its events

Of an evaluation that has ended only the first two and the last may be kept. A sandbox lets the
evaluator read the submission and does not show the request; without a sandbox, an evaluator may
change both, as it may change all files of the daemon's user.

The tree is an overlay mount over a checkout, which does not change: changes go to a directory of
the evaluation, and nothing is copied in advance. Mounting needs a capability, which a user has in a
user namespace of its own. So the starter runs in such a namespace and mounts each overlay in a new
mount namespace, which is the evaluator's. The daemon, outside of that namespace, reads the tree by
a descriptor. Without a sandbox, or where overlays do not work, the tree is a copy.
"""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import stat
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.protocol import ProcessProtocol

from tawebeval.core.form import SubmissionFile
from tawebeval.errors import ConfigurationError, EvaluationFailure, format_size
from tawebeval.linux.filetree import copy_tree, is_transient_error, remove_tree
from tawebeval.linux.starter import LaunchSpec
from tawebeval.linux.starter_client import (
    StartedProgram,
    StarterClient,
    spawn_starter,
)
from tawebeval.linux.tail import InotifyFileWatcher, TailContext, TailedProcess

_SUBMISSION = "submission"
_REQUEST = "request"
_OUTPUT = "output"
_EXCERPT = 80  # characters of a path in a message
READ_ONLY_WORKSPACE_NAMES = frozenset({_SUBMISSION, _REQUEST, _OUTPUT})
"""The names in a workspace that an evaluator cannot write to."""


class EvaluatorFileRefused(Exception):
    """An evaluator's path that is not read; `str()` is the reason, for people."""


@attrs.frozen
class WorkspaceView:
    """The paths under which an evaluator sees its workspace, all of them below `root`.

    `writable_paths` and `readable_paths` are pairs: the evaluator's path and the daemon's.
    `tree_descriptor` is one of the tree, if it is mounted for the evaluator only.
    """

    root: Path
    writable_paths: Sequence[tuple[Path, Path]]
    readable_paths: Sequence[tuple[Path, Path]] = ()
    tree_descriptor: int | None = None
    _ours: Sequence[Path] = attrs.field(kw_only=True)

    def translate_path(self, path: Path) -> Path:
        """Return the evaluator's path for one of the daemon's in the workspace."""
        top = next(top for top in self._ours if path.is_relative_to(top))
        return self.root / path.relative_to(top)


@attrs.frozen
class Workspace:
    """The directories below `root`, an absolute path without symbolic links."""

    root: Path

    @property
    def tree_directory(self) -> Path:
        """The commit's tree; outside of the sandbox an overlay shows only its changes here."""
        return self.root / "tree"

    @property
    def temporary_directory(self) -> Path:
        """The evaluator's TEMPORARY_DIRECTORY."""
        return self.root / "tmp"

    @property
    def home_directory(self) -> Path:
        """The evaluator's HOME."""
        return self.root / "home"

    @property
    def overlay_work_directory(self) -> Path:
        """The work directory of the tree's overlay."""
        return self.root / "work"

    @property
    def submission_directory(self) -> Path:
        """The directory of the submitted files."""
        return self.root / _SUBMISSION

    @property
    def sandbox_tmp_directory(self) -> Path:
        """The evaluator's /tmp in a sandbox."""
        return self.root / "scratch"

    @property
    def sandbox_shm_directory(self) -> Path:
        """What the evaluator knows as /dev/shm, in a sandbox."""
        return self.root / "shm"

    @property
    def request_file(self) -> Path:
        """The file of the request."""
        return self.root / _REQUEST

    @property
    def output_directory(self) -> Path:
        """The directory of what the evaluator prints, and of its events."""
        return self.root / _OUTPUT

    def locate_submitted_file(self, file: SubmissionFile) -> Path:
        """Return the path of a submitted file."""
        return self.submission_directory / file.field / file.filename

    def make_unsandboxed_view(self) -> WorkspaceView:
        """Return the view of an evaluator that sees the daemon's paths."""
        own = (self.tree_directory, self.temporary_directory, self.home_directory)
        return WorkspaceView(Path("/"), [(path, path) for path in own], ours=[Path("/")])

    def make_sandboxed_view(self, root: Path) -> WorkspaceView:
        """Return the view of an evaluator that sees its own workspace only, at `root`."""
        inside = Workspace(root)
        return WorkspaceView(
            root,
            [
                (inside.tree_directory, self.tree_directory),
                (inside.temporary_directory, self.temporary_directory),
                (inside.home_directory, self.home_directory),
                (Path("/tmp"), self.sandbox_tmp_directory),  # noqa: S108  (a path inside)
                (Path("/dev/shm"), self.sandbox_shm_directory),  # noqa: S108
            ],
            [(inside.submission_directory, self.submission_directory)],
            ours=[self.root],
        )

    def create_directories(self, upload: Path, view: WorkspaceView) -> None:
        """Take over the uploaded files, and make the directories that `view` lets be written."""
        upload.rename(self.root)
        for _, directory in view.writable_paths:
            directory.mkdir(parents=True)

    def take_over_upload(self, upload: Path) -> None:
        """Take over the uploaded files of an evaluation that has not started."""
        if not self.root.exists():
            upload.rename(self.root)

    def restore_uploaded_files(self, upload: Path) -> None:
        """Undo `create_directories`, whatever was done since then."""
        self.remove_all_but_output(keep_submission=True)
        self.request_file.unlink(missing_ok=True)
        remove_tree(self.output_directory)
        self.root.rename(upload)

    def locate_working_directory(self, directory: str, checkout: Path) -> Path:
        """Return the path in the tree of `directory`, the form's field. Raises: EvaluationFailure.

        Symbolic links are resolved in `checkout`, and may not lead out of it.
        """
        if not directory:
            return self.tree_directory
        try:
            path = (checkout / directory).resolve()
            inside = path.is_relative_to(checkout)
            found = inside and path.is_dir()
        except (OSError, RuntimeError):  # too long a name, links in a circle
            inside, found = True, False
        shown = directory[:_EXCERPT]
        if not inside:
            raise EvaluationFailure(
                "directory", f"{shown!r} leads out of the repository through a symbolic link"
            )
        if not found:
            raise EvaluationFailure(
                "directory",
                f"{shown!r} is not a directory of the commit; list them with `git ls-tree -d"
                " COMMIT`",
            )
        return self.tree_directory / path.relative_to(checkout)

    def read_file(self, path: str, directory: Path, limit: int, view: WorkspaceView) -> bytes:
        """Return the content of a file that the evaluator, working in `directory`, names.

        The file must be a regular one of at most `limit` bytes, in a directory that `view` lets be
        written, and reached without a symbolic link. Raises: EvaluatorFileRefused.
        """
        if "\0" in path:
            raise EvaluatorFileRefused("the path in a file block contains NUL")
        absolute = Path(os.path.normpath(view.translate_path(directory) / path))
        for inside, ours in view.writable_paths:
            if absolute.is_relative_to(inside):
                top = view.tree_descriptor if ours == self.tree_directory else None
                parts = absolute.relative_to(inside).parts
                return _read_beneath(ours, top, parts, path, limit)
        where = "outside the directories that the evaluator can write to"
        raise EvaluatorFileRefused(f"{path!r} is {where}")

    def remove_all_but_output(self, *, keep_submission: bool) -> None:
        """Remove everything but the events and perhaps the submission, whatever the modes are."""
        kept = READ_ONLY_WORKSPACE_NAMES if keep_submission else {_OUTPUT}
        if self.root.exists():
            remove_tree(*(path for path in self.root.iterdir() if path.name not in kept))


@lru_cache(maxsize=1024)  # each line of the log has it
def derive_directory_name(identifier: str) -> str:
    """Return the name of an evaluation's directory, a digest of the identifier.

    Evaluators can read the name in /proc/self/mountinfo, and the identifier alone gives access.
    """
    return hashlib.sha256(identifier.encode()).hexdigest()[:32]


def derive_log_pseudonym(identifier: str) -> str:
    """Return an evaluation's name in the log: the beginning of its directory's name.

    Without tokens the identifier lets anybody read and cancel; readers of the log must not.
    """
    return derive_directory_name(identifier)[:16]


def _read_beneath(
    root: Path, opened: int | None, parts: Iterable[str], path: str, limit: int
) -> bytes:
    """Return a file below `root` by one component at a time: the evaluator may change the path.

    `opened` is a descriptor of `root`, if there is one.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = -1
    try:
        top = root if opened is None else "."
        descriptor = os.open(top, flags | os.O_DIRECTORY, dir_fd=opened)
        for part in parts:
            parent, descriptor = descriptor, os.open(part, flags, dir_fd=descriptor)
            os.close(parent)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise EvaluatorFileRefused(f"{path!r} is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(limit + 1) if status.st_size <= limit else b""
    except OSError as error:
        raise EvaluatorFileRefused(f"{path!r} cannot be read: {error.strerror}") from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if max(len(content), status.st_size) > limit:  # the evaluator may write to the file
        raise EvaluatorFileRefused(f"{path!r} is over {format_size(limit)}")
    return content


class WorkspaceLauncher:
    """The launcher of programs, each with a writable tree in its workspace, by the starter.

    The starter listens at `socket`. If it `is_own`, it is started here, by the main thread, and
    ends at `close` or with this process. Trees are overlays if `overlay_problem` is None, as it is
    after `connect_starter` if the starter can mount them, and otherwise copies for that reason.
    """

    def __init__(self, socket: Path, *, is_own: bool = True) -> None:
        self.overlay_problem: str | None = "the starter is not connected"
        self._socket = socket
        self._is_own = is_own
        self._client: StarterClient | None = None
        self._tail_context: TailContext | None = None
        self._watcher: InotifyFileWatcher | None = None

    def connect_starter(self) -> StarterClient:
        """Return the connection to the starter, which is started if it is the daemon's own. Blocks.

        Raises: OSError; ConfigurationError, if it is of another version.
        """
        if self._client is None:
            if self._is_own:
                # One of a killed daemon, which may not have ended yet.
                with suppress(OSError, ConfigurationError):
                    client = StarterClient.connect(self._socket)
                    client.stop_starter(signal.SIGKILL)
                    client.close()
                spawn_starter(self._socket)
            self._client = StarterClient.connect(self._socket)
            self.overlay_problem = self._client.mount_problem
        return self._client

    @property
    def starter(self) -> StarterClient:
        """The connected starter."""
        assert self._client is not None, "connected by the check of the sandbox"
        return self._client

    def attach_reactor(
        self,
        reactor: Any,
        run_in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_lost: Callable[[], object],
    ) -> None:
        """Let started programs drive protocols; `on_lost()` is called if the starter ends. Blocks.

        Raises: OSError.
        """
        self.starter.attach_reactor(reactor, on_lost)
        self._watcher = InotifyFileWatcher(reactor)
        self._tail_context = TailContext(reactor, self.starter, self._watcher, run_in_thread)

    async def run_in_thread(self, call: Callable[[], Any]) -> Any:
        """Make a call that blocks, after `attach_reactor`, in a thread."""
        assert self._tail_context is not None, "a reactor is attached"
        return await self._tail_context.run_in_thread(call)

    def start_program(
        self, checkout: Path, workspace: Workspace, launch: LaunchSpec, *, copies_tree: bool = False
    ) -> StartedProgram:
        """Start a program, with a tree of the workspace that begins as `checkout`. Blocks.

        `copies_tree`: whether the tree is a copy even where overlays work. Copying blocks the
        longer the larger the checkout is. The caller closes the top of the overlay, if
        there is one. Raises: OSError.
        """
        layers: Sequence[Path] = ()
        if self.overlay_problem is None and not copies_tree:
            work = workspace.overlay_work_directory
            work.mkdir()
            layers = (checkout, workspace.tree_directory, work)
        else:
            copy_tree(checkout, workspace.tree_directory)
        return self.starter.start_program(workspace.output_directory, launch, layers)

    def connect_program(
        self, protocol: ProcessProtocol, program: StartedProgram, stdout_offset: int = 0
    ) -> TailedProcess:
        """Let a program drive a protocol, from `stdout_offset` bytes of stdout on.

        Raises: OSError.
        """
        assert self._tail_context is not None, "a reactor is attached"
        return TailedProcess(self._tail_context, protocol, program, stdout_offset)

    def kill_program(self, workspace: Workspace) -> None:
        """Kill the program of a workspace, and its overlay with it. Blocks.

        Raises: OSError, if the starter cannot be asked now; call again later.
        """
        if self._client is not None:
            try:
                self._client.forget_program_blocking(workspace.output_directory)
            except OSError as error:
                if is_transient_error(error) or error.errno in (errno.ENOBUFS, errno.ETIMEDOUT):
                    raise  # otherwise the starter, or the program, has ended

    def close(self) -> None:
        """Close the connection, and end a starter that was started here. Blocks."""
        client, self._client = self._client, None
        if self._watcher is not None:
            self._watcher.close()
            self._tail_context = self._watcher = None
        if client is not None:
            client.ignore_connection_loss()
            if self._is_own:
                client.stop_starter()
            client.close()
