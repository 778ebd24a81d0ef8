"""The directories of one evaluation, from the upload to the removal. Everything here blocks.

<evaluation>/submission/<field>/<filename>   as uploaded
<evaluation>/tree/                           the commit's tree, writable; what differs in it, where
                                             it is an overlay
<evaluation>/tmp/                            TEMPORARY_DIRECTORY
<evaluation>/home/                           HOME
<evaluation>/work/                           what an overlay needs beside it
<evaluation>/scratch/                        /tmp, where there is a sandbox
<evaluation>/shm/                            /dev/shm, likewise

With project quotas (`project_quotas`) all but the first lie in a quota directory.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from tawebeval.core.form import SubmissionFile
from tawebeval.errors import EvaluationError
from tawebeval.linux.filetree import empty, remove

_SUBMISSION = "submission"
_EXCERPT = 80  # characters of a path in a message
NOT_THE_EVALUATORS = frozenset({_SUBMISSION})
"""What in a workspace an evaluator cannot write to, by name."""


class FileRefused(Exception):
    """A path that an evaluator gave is not one to read; `str()` is a sentence for people."""


@attrs.frozen
class View:
    """How an evaluator sees its workspace, all of which lies below `root` there.

    The places it may read only, and those it may write to, are pairs of its path for them and
    ours. `opened` has descriptors of those, by our paths, that are mounted for the evaluator
    alone.
    """

    root: Path
    writable: Sequence[tuple[Path, Path]]
    readable: Sequence[tuple[Path, Path]] = ()
    opened: Mapping[Path, int] = attrs.field(factory=dict)
    _ours: Sequence[Path] = attrs.field(kw_only=True)

    def of(self, path: Path) -> Path:
        """Return the evaluator's path for a path of ours in the workspace."""
        top = next(top for top in self._ours if path.is_relative_to(top))
        return self.root / path.relative_to(top)


@attrs.frozen
class Workspace:
    """The directories below `root`, an absolute path without symbolic links.

    Those that the evaluator may write to lie in `quota_directory`, if there is one.
    """

    root: Path
    quota_directory: Path | None = None

    @property
    def writable(self) -> Path:
        """The directory of those that the evaluator may write to."""
        return self.quota_directory or self.root

    @property
    def tree(self) -> Path:
        """Where the evaluator has the commit's tree.

        If that is an overlay, others find here what the evaluator has changed.
        """
        return self.writable / "tree"

    @property
    def temporary(self) -> Path:
        """What the evaluator knows as TEMPORARY_DIRECTORY."""
        return self.writable / "tmp"

    @property
    def home(self) -> Path:
        """What the evaluator knows as HOME."""
        return self.writable / "home"

    @property
    def work(self) -> Path:
        """What the kernel needs for the tree, if that is an overlay."""
        return self.writable / "work"

    @property
    def submission(self) -> Path:
        """Where the submitted files lie."""
        return self.root / _SUBMISSION

    @property
    def scratch(self) -> Path:
        """What the evaluator knows as /tmp, if it does not see the machine's."""
        return self.writable / "scratch"

    @property
    def shared_memory(self) -> Path:
        """What the evaluator knows as /dev/shm, likewise."""
        return self.writable / "shm"

    def submission_path(self, file: SubmissionFile) -> Path:
        """Return where a file of the submission lies."""
        return self.submission / file.field / file.filename

    def as_it_is(self) -> View:
        """Return the view of an evaluator that sees what we see."""
        own = (self.tree, self.temporary, self.home)
        return View(Path("/"), [(path, path) for path in own], ours=[Path("/")])

    def elsewhere(self, root: Path) -> View:
        """Return the view of an evaluator that sees its workspace, and no other, at `root`."""
        inside = Workspace(root)
        return View(
            root,
            [
                (inside.tree, self.tree),
                (inside.temporary, self.temporary),
                (inside.home, self.home),
                (Path("/tmp"), self.scratch),  # noqa: S108  (a path inside)
                (Path("/dev/shm"), self.shared_memory),  # noqa: S108
            ],
            [(inside.submission, self.submission)],
            ours=[self.root, self.writable],
        )

    def create(self, upload: Path, view: View) -> None:
        """Make what an evaluator with that view may write to, taking over what was uploaded."""
        upload.rename(self.root)
        for _, directory in view.writable:
            directory.mkdir()

    def working_directory(self, directory: str, checkout: Path) -> Path:
        """Return where the evaluator runs. Raises EvaluationError.

        `directory` is as the form gave it; a symbolic link may not lead out of the tree, which
        lies in `checkout` as it was committed.
        """
        try:
            path = (checkout / directory).resolve()
            inside = path.is_relative_to(checkout)
            found = inside and path.is_dir()
        except (OSError, RuntimeError):  # too long a name, links in a circle
            inside, found = True, False
        shown = directory[:_EXCERPT]
        if not inside:
            raise EvaluationError("directory", f"{shown!r} leads out of the repository")
        if not found:
            raise EvaluationError("directory", f"{shown!r} is no directory of that commit")
        return self.tree / path.relative_to(checkout)

    def read_file(self, path: str, directory: Path, limit: int, view: View) -> bytes:
        """Return the content of a file that the evaluator, working in `directory`, names.

        It must be a regular file of at most `limit` bytes in one of the places that `view`
        lets it write to, reached without a symbolic link. Raises FileRefused.
        """
        if "\0" in path:
            raise FileRefused("a file block's path contains NUL")
        absolute = Path(os.path.normpath(view.of(directory) / path))
        for inside, ours in view.writable:
            if absolute.is_relative_to(inside):
                top = view.opened.get(ours)
                return _read_beneath(ours, top, absolute.relative_to(inside).parts, limit, path)
        raise FileRefused(f"{path!r} lies outside of the evaluator's own directories")

    def remove(self) -> None:
        """Remove everything but the quota directory, whatever modes the evaluator has left."""
        remove(self.root)
        if self.quota_directory is not None:
            empty(self.quota_directory)


def directory_of(identifier: str) -> str:
    """Return the name of an evaluation's directory.

    Evaluators can read it among their mounts; the identifier gives rights to who knows it.
    """
    return hashlib.sha256(identifier.encode()).hexdigest()[:32]


def log_name(identifier: str) -> str:
    """Return what the log calls an evaluation: how the name of its directory begins.

    Without tokens whoever knows an identifier may read and cancel; who reads the log may not.
    """
    return directory_of(identifier)[:16]


def _read_beneath(
    root: Path, opened: int | None, parts: Iterable[str], limit: int, path: str
) -> bytes:
    """Read a file below `root` component by component: the evaluator may change it meanwhile.

    Where `root` is `opened` already its path is not looked at.
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
            raise FileRefused(f"{path!r} is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise FileRefused(f"{path!r} cannot be read: {error.strerror}") from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if len(content) > limit:
        raise FileRefused(f"{path!r} is over {limit} bytes")
    return content
