"""One evaluation on this machine, without a daemon: its surroundings, and its events."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.task import LoopingCall

from tawebeval.cli.fields import Submission
from tawebeval.cli.workingtree import NO_COMMIT, WorkingTree
from tawebeval.client.events import Page, parse_page
from tawebeval.config import Configuration
from tawebeval.core.budget import Budget
from tawebeval.core.form import EvaluationRequest, Repository, SubmissionFile, submission_file
from tawebeval.core.pages import read_page
from tawebeval.deferreds import Threads
from tawebeval.evaluations.context import Surroundings
from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.git.commits import TreeLimits
from tawebeval.linux.cgroups.group import Cgroups
from tawebeval.linux.child import Spawner
from tawebeval.linux.reaper import Orphans, become_subreaper
from tawebeval.sandbox.bubblewrap import write_accounts
from tawebeval.sandbox.monitor import Watch
from tawebeval.sandbox.probe import close_sandbox, open_sandbox, rely_on
from tawebeval.sandbox.workspace import Workspace

_THREADS = 3  # two of them look at the limits
_ACCOUNTS = "accounts"  # of the users and groups in the sandbox
_REAP = 1.0  # seconds between two looks for processes that have lost their parent


@attrs.frozen
class Attempt:
    """What is to be evaluated, by the working directory `root`."""

    root: Path
    directory: str
    evaluator_cmd: str
    seed: int
    submission: Submission


@attrs.frozen
class Bench:
    """Where one evaluation is made: in the directory `place`, by the directory `root`."""

    surroundings: Surroundings
    _place: Path
    _orphans: Orphans
    _reactor: Any

    @classmethod
    def open(
        cls,
        configuration: Configuration,
        root: Path,
        place: Path,
        cgroups: Cgroups,
        spawn: Spawner,
        reactor: Any,
    ) -> Bench:
        """Return one; it is done before rights are given up. Blocks.

        Raises ConfigurationError where the sandbox is not installed.
        """
        orphans = Orphans(reactor, spawn)
        threads = Threads.own(reactor, _THREADS, "work")
        limits, buffers = configuration.repositories, configuration.buffers
        surroundings = Surroundings(
            configuration=configuration,
            clock=reactor,
            random=os.urandom,
            threads=threads,
            spawn=spawn,
            repositories=WorkingTree(
                root, place, TreeLimits(limits.tree_files, limits.tree_bytes), threads
            ),
            sandbox=open_sandbox(configuration, place / _ACCOUNTS, cgroups, orphans),
            watch=Watch(reactor, threads, threads),
            budget=Budget(
                buffers.total, buffers.evaluation, 1, lambda call: reactor.callLater(0, call)
            ),
        )
        return cls(surroundings, place, orphans, reactor)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it an evaluation can be made. Blocks. Raises SystemExit for a sandbox that fails.

        What it needs is made as the user who runs it.
        """
        become_subreaper()
        accounts = self._place / _ACCOUNTS
        accounts.mkdir()
        write_accounts(accounts)
        rely_on(self.surroundings.sandbox)
        reaping = LoopingCall(self._orphans.reap)
        reaping.clock = self._reactor
        reaping.start(_REAP)
        self.surroundings.threads.start()
        try:
            yield
        finally:
            self.surroundings.threads.stop()
            reaping.stop()
            close_sandbox(self.surroundings.sandbox)

    def prepare(self, attempt: Attempt) -> Evaluation:
        """Return an evaluation that has not begun yet. Blocks.

        Raises OSError for a file of the submission that cannot be read.
        """
        sent = self._place / "upload"
        request = EvaluationRequest(
            Repository(attempt.root.as_uri()),
            NO_COMMIT,
            attempt.directory,
            attempt.evaluator_cmd,
            attempt.seed,
            upload(attempt.submission, sent),
        )
        workspace = Workspace(self._place / "evaluation")
        return Evaluation("try", request, attempt.seed, sent, workspace, self.surroundings)


def upload(submission: Submission, folder: Path) -> tuple[SubmissionFile, ...]:
    """Put the files of a submission where an upload would be; return them. Raises OSError."""
    files = []
    for field, content in submission.items():
        name = content.name if isinstance(content, Path) else None
        file = submission_file(f"submission[{field}]", name)
        assert file is not None, "it is a field of the submission"
        path = folder / "submission" / file.field / file.filename
        path.parent.mkdir(parents=True)
        path.write_bytes(content.read_bytes() if isinstance(content, Path) else content.encode())
        files.append(file)
    return tuple(files)


async def pages(evaluation: Evaluation) -> AsyncIterator[Page]:
    """Yield the pages of an evaluation, as a client would get them; the next one acknowledges."""
    after: str | None = None
    ring, limit = evaluation.ring, 2**16
    while True:
        page = read_page(ring, after, limit)
        if page.events.count:
            yield parse_page(page.encode(), after)
            ring.acknowledge(ring.oldest + page.events.count)
            evaluation.acknowledged()
        if page.final:
            return
        after = page.end
        if not page.events.count:
            await evaluation.changed.wait()
