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
from tawebeval.config import MAX_TREE_FILES, Configuration
from tawebeval.core.evaluations import Checkout, Commit
from tawebeval.core.event_log import EventLog, EventMemory, make_page
from tawebeval.core.form import (
    EvaluationRequest,
    Repository,
    SubmissionFile,
    pack_request,
    parse_submission_file,
)
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.context import EvaluationContext, make_unread_events_share
from tawebeval.evaluations.details import EvaluationDetails
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.reading import EvaluationEvents, SegmentLoader
from tawebeval.git.fetch_limits import TreeLimits
from tawebeval.linux.cgroups import CgroupManager
from tawebeval.linux.child import OrphanReaper, Spawner, become_subreaper
from tawebeval.sandbox.bubblewrap import write_sandbox_files
from tawebeval.sandbox.limits import LimitMonitor
from tawebeval.sandbox.probe import check_sandbox_and_log_problems, open_sandbox
from tawebeval.sandbox.workspace import Workspace, WritableTrees

NO_COMMIT = "0" * 40
"""The commit identifier of a working directory."""
CHECKOUT_NAME, UPLOAD_NAME = "checkout", "upload"
"""The names in a `place` of the copy of the working directory, and of the submission."""

_THREADS = 3  # two of them poll limits
_ACCOUNTS = "accounts"  # the directory with passwd and group of the sandbox
_REAP = 1.0  # seconds between two searches for orphaned processes


@attrs.frozen
class WorkingTreeSource:
    """The copy of a working directory, in place of a repository."""

    _checkout: Checkout

    def checkout_needs_network(self, repository: Repository, oid: str, caller: str) -> bool:
        """Return False: a copy needs no network."""
        return False

    async def resolve_branch(self, repository: Repository, caller: str) -> str:
        """Return the OID that stands for no commit."""
        return NO_COMMIT

    async def check_out_commit(
        self, repository: Repository, oid: str, caller: str, *, is_retry: bool = False
    ) -> Checkout:
        """Return the copy."""
        return self._checkout


def copy_working_tree(root: Path, place: Path, limits: TreeLimits) -> Checkout:
    """Copy a working directory, without `.git`, into `place`. Blocks. Raises: EvaluationFailure.

    Of the directory `place`, if it is below `root`, nothing is copied, nor are sockets, pipes and
    devices, which no commit has.
    """
    target = place / CHECKOUT_NAME
    files = size = 0
    try:
        target.mkdir(parents=True)
        for folder, directories, names in os.walk(root, onerror=_raise):
            parent = Path(folder)
            directories[:] = [
                name for name in directories if parent / name not in (root / ".git", place)
            ]
            for source in (parent / name for name in (*directories, *names)):
                status, copy = source.lstat(), target / source.relative_to(root)
                mode = status.st_mode
                files += 1
                size += status.st_size if stat.S_ISREG(mode) else 0
                limits.check_tree(files, size)
                if stat.S_ISLNK(mode):
                    copy.symlink_to(os.readlink(source))
                elif stat.S_ISDIR(mode):
                    copy.mkdir()
                elif stat.S_ISREG(mode):
                    shutil.copy2(source, copy)
    except OSError as error:
        raise EvaluationFailure(
            "repository", f"{error.filename} cannot be copied: {error.strerror}"
        ) from None
    return Checkout(Commit(NO_COMMIT, NO_COMMIT, files, size), target, lambda: None)


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
        trees: WritableTrees,
        reactor: Any,
    ) -> LocalEnvironment:
        """Return the environment with a copy of `root`. Blocks.

        Raises ConfigurationError if the sandbox is not installed, EvaluationFailure if `root` is
        too large or cannot be copied.
        """
        spawner = Spawner(reactor)
        orphans = OrphanReaper(reactor, spawner)
        threads = WorkerThreads.create(reactor, _THREADS, "work")
        limits, buffers = configuration.repositories, configuration.buffers
        tree_limits = TreeLimits(MAX_TREE_FILES, limits.tree_bytes)
        tree = WorkingTreeSource(copy_working_tree(root, place, tree_limits))
        surroundings = EvaluationContext(
            configuration=configuration,
            clock=reactor,
            generate_random_bytes=os.urandom,
            worker_threads=threads,
            spawner=spawner,
            checkout_source=tree,
            sandbox=open_sandbox(configuration, place / _ACCOUNTS, cgroups, orphans, trees),
            limit_monitor=LimitMonitor(reactor, threads, threads),
            event_memory=EventMemory(buffers.total),
            unread_events=make_unread_events_share(buffers.disk),
            segment_loader=SegmentLoader(threads),
        )
        return cls(surroundings, place, orphans, reactor)

    @contextmanager
    def run_services(self) -> Iterator[None]:
        """Start threads and sandbox; stop them at the end. Blocks.

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
        context = self.evaluation_context
        context.worker_threads.start()
        context.sandbox.writable_trees.attach(
            self._reactor, context.worker_threads.run_in_thread, lambda: None
        )
        try:
            yield
        finally:
            self.evaluation_context.worker_threads.stop()
            reaping.stop()
            self.evaluation_context.sandbox.writable_trees.close()

    def prepare_evaluation(self, request: EvaluationRequest) -> Evaluation:
        """Return an evaluation that has not begun."""
        workspace = Workspace(self._place / "evaluation")
        sent = self._place / UPLOAD_NAME
        assert request.seed is not None, "drawn before"
        details = EvaluationDetails(
            "try", pack_request(request), request.seed, upload_directory=sent
        )
        context = self.evaluation_context
        events = EvaluationEvents(
            EventLog(context.event_memory), "", details.log_name, context.segment_loader
        )
        return Evaluation(details, workspace, context, events)


def write_upload(submission: Submission, folder: Path) -> tuple[SubmissionFile, ...]:
    """Write the files of a submission as an upload would lie in `folder`. Blocks.

    Raises OSError.
    """
    files = []
    for field, content in submission.items():
        name = content.name if isinstance(content, Path) else None
        file = parse_submission_file(f"submission[{field}]", name)
        assert file is not None, "a field of the submission"
        path = folder / "submission" / file.field / file.filename
        if isinstance(content, Path):
            content = content.read_bytes()
        path.parent.mkdir(parents=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        files.append(file)
    return tuple(files)


async def read_pages(
    evaluation: Evaluation, on_cancel: Callable[[], object]
) -> AsyncIterator[Page]:
    """Yield the pages of an evaluation as a client would get them; the next one acknowledges.

    A cancellation calls `on_cancel`, and reading goes on.
    """
    after: str | None = None
    events, limit = evaluation.events, 2**16
    while True:
        begin = int(after or 0)
        batch = await events.read(begin, limit)
        page = make_page(events.log, after, batch)
        if page.events.count:
            yield parse_page(page.encode_json(), after)
            events.acknowledge(begin + page.events.count)
        if page.is_last_page:
            return
        after = page.end_cursor
        if not page.events.count:
            try:
                await events.change_condition.wait()
            except CancelledError:
                on_cancel()
