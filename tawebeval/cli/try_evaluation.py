"""One evaluation without a daemon: its environment, its files and its events."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.task import LoopingCall

from tawebeval.cli.evaluate import Submission
from tawebeval.client.events import Page, parse_page
from tawebeval.config import Configuration
from tawebeval.core.budget import RingBudget
from tawebeval.core.checkout import Checkout, Commit
from tawebeval.core.form import (
    EvaluationRequest,
    Repository,
    SubmissionFile,
    pack_request,
    parse_submission_file,
)
from tawebeval.core.limits import ChosenLimits
from tawebeval.core.pages import read_page
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.details import EvaluationDetails
from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.evaluations.status import format_rfc3339_time
from tawebeval.git.commits import TreeLimits
from tawebeval.linux.cgroups.manager import CgroupManager
from tawebeval.linux.child import Spawner
from tawebeval.linux.reaper import OrphanReaper, become_subreaper
from tawebeval.sandbox.bubblewrap import write_sandbox_files
from tawebeval.sandbox.limit_monitor import LimitMonitor
from tawebeval.sandbox.probe import check_sandbox_and_log_problems, close_sandbox, open_sandbox
from tawebeval.sandbox.workspace import Workspace

NO_COMMIT = "0" * 40
"""The commit identifier of a working directory."""

_THREADS = 3  # two of them poll limits
_ACCOUNTS = "accounts"  # the directory with passwd and group of the sandbox
_REAP = 1.0  # seconds between two searches for orphaned processes


@attrs.frozen
class LocalRequest:
    """A submission to be judged by the evaluator in the working directory `root`.

    `directory` is relative to `root`; the evaluator runs there.
    """

    root: Path
    directory: str
    evaluator_cmd: str
    seed: int
    submission: Submission
    limits: ChosenLimits = attrs.field(factory=dict)
    environment: str | None = None


@attrs.frozen
class WorkingTreeSource:
    """A working directory in place of a repository: `root` is copied, and never changed.

    The copy lies in `excluded_path`, which is left out if it is below `root`.
    """

    root: Path
    excluded_path: Path
    _limits: TreeLimits
    _threads: WorkerThreads

    def checkout_needs_network(self, repository: Repository, oid: str, caller: str) -> bool:
        """Return False: a copy needs no network."""
        return False

    async def resolve_branch(self, repository: Repository, caller: str) -> str:
        """Return the OID that stands for no commit."""
        return NO_COMMIT

    async def check_out_commit(
        self, repository: Repository, oid: str, caller: str, *, is_retry: bool = False
    ) -> Checkout:
        """Return a copy of the directory without `.git`. Raises EvaluationError."""
        tree = self.excluded_path / "checkout"
        files, size = await self._threads.run_in_thread(self._copy, tree)
        return Checkout(Commit(oid, NO_COMMIT, files, size), tree, lambda: None)

    def _copy(self, target: Path) -> tuple[int, int]:
        files = size = 0
        try:
            target.mkdir(parents=True)
            for folder, directories, names in os.walk(self.root, onerror=_raise):
                place = Path(folder)
                directories[:] = [
                    name for name in directories if not self._is_excluded(place / name)
                ]
                for name in (*directories, *names):
                    source = place / name
                    files += 1
                    size += self._copy_entry(source, target / source.relative_to(self.root))
                    self._limits.check_tree(files, size)
        except OSError as error:
            raise EvaluationFailure(
                "repository", f"{error.filename} cannot be copied: {error.strerror}"
            ) from None
        return files, size

    def _is_excluded(self, path: Path) -> bool:
        return path in (self.root / ".git", self.excluded_path)

    def _copy_entry(self, source: Path, target: Path) -> int:
        """Copy a file, a symbolic link or an empty directory; return its size in bytes."""
        status = source.lstat()
        if stat.S_ISLNK(status.st_mode):
            target.symlink_to(os.readlink(source))
        elif stat.S_ISDIR(status.st_mode):
            target.mkdir()
        elif stat.S_ISREG(status.st_mode):
            shutil.copy2(source, target)
            return status.st_size
        # A commit contains no sockets, pipes or devices.
        return 0


def _raise(error: OSError) -> None:
    raise error


@attrs.frozen
class LocalEnvironment:
    """The sandbox, threads and limits of one evaluation; its files lie in `place`."""

    evaluation_context: EvaluationContext
    _place: Path
    _orphans: OrphanReaper
    _reactor: Any

    @classmethod
    def open(
        cls,
        configuration: Configuration,
        root: Path,
        place: Path,
        cgroups: CgroupManager,
        spawn: Spawner,
        reactor: Any,
    ) -> LocalEnvironment:
        """Return the environment, before privileges are dropped. Blocks.

        Raises ConfigurationError if the sandbox is not installed.
        """
        orphans = OrphanReaper(reactor, spawn)
        threads = WorkerThreads.create(reactor, _THREADS, "work")
        limits, buffers = configuration.repositories, configuration.buffers
        surroundings = EvaluationContext(
            configuration=configuration,
            clock=reactor,
            generate_random_bytes=os.urandom,
            worker_threads=threads,
            spawner=spawn,
            checkout_source=WorkingTreeSource(
                root, place, TreeLimits(limits.max_tree_files, limits.max_tree_bytes), threads
            ),
            sandbox=open_sandbox(configuration, place / _ACCOUNTS, cgroups, orphans),
            limit_monitor=LimitMonitor(reactor, threads, threads),
            ring_budget=RingBudget(
                buffers.max_total_bytes,
                buffers.max_evaluation_bytes,
                1,
                lambda call: reactor.callLater(0, call),
            ),
        )
        return cls(surroundings, place, orphans, reactor)

    @contextmanager
    def run_services(self) -> Iterator[None]:
        """Start threads and sandbox, after privileges are dropped; stop them at the end. Blocks.

        Raises SystemExit if the sandbox does not work.
        """
        become_subreaper()
        accounts = self._place / _ACCOUNTS
        accounts.mkdir()
        write_sandbox_files(accounts)
        check_sandbox_and_log_problems(self.evaluation_context.sandbox)
        reaping = LoopingCall(self._orphans.reap_ended_orphans)
        reaping.clock = self._reactor
        reaping.start(_REAP)
        self.evaluation_context.worker_threads.start()
        try:
            yield
        finally:
            self.evaluation_context.worker_threads.stop()
            reaping.stop()
            close_sandbox(self.evaluation_context.sandbox)

    def prepare_evaluation(self, request: LocalRequest) -> Evaluation:
        """Return an evaluation that has not begun. Blocks.

        Raises OSError for a file of the submission that cannot be read.
        """
        sent = self._place / "upload"
        form = EvaluationRequest(
            Repository(request.root.as_uri()),
            NO_COMMIT,
            request.directory,
            request.evaluator_cmd,
            request.seed,
            write_upload(request.submission, sent),
            limits=request.limits,
            environment=request.environment,
        )
        workspace = Workspace(self._place / "evaluation")
        details = EvaluationDetails("try", pack_request(form), request.seed, sent)
        return Evaluation(details, workspace, self.evaluation_context)


def write_upload(submission: Submission, folder: Path) -> tuple[SubmissionFile, ...]:
    """Write the files of a submission as an upload would lie in `folder`. Raises OSError."""
    files = []
    for field, content in submission.items():
        name = content.name if isinstance(content, Path) else None
        file = parse_submission_file(f"submission[{field}]", name)
        assert file is not None, "a field of the submission"
        path = folder / "submission" / file.field / file.filename
        path.parent.mkdir(parents=True)
        if isinstance(content, Path):
            content = content.read_bytes()
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        files.append(file)
    return tuple(files)


async def read_pages(
    evaluation: Evaluation, on_cancel: Callable[[], object], *, times: bool = False
) -> AsyncIterator[Page]:
    """Yield the pages of an evaluation as a client would get them; the next one acknowledges.

    A cancellation calls `on_cancel`, and reading goes on. `times` adds their times to the events.
    """
    after: str | None = None
    ring, limit = evaluation.ring, 2**16
    while True:
        page = read_page(ring, after, limit, format_rfc3339_time if times else None)
        if page.events.count:
            yield parse_page(page.encode_json(), after)
            ring.acknowledge(ring.begin_cursor + page.events.count)
            evaluation.on_acknowledge()
        if page.is_last_page:
            return
        after = page.end_cursor
        if not page.events.count:
            try:
                await evaluation.change_condition.wait()
            except CancelledError:
                on_cancel()
