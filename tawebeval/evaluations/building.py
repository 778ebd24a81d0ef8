"""Builds: the trees that a problem's `build` command makes, once for all evaluations of a commit.

A build is an evaluation by itself, with no submission, no clients and no row in the store. It runs
in a copy of the checkout, under the limits of the problem and without a network: so no submission
and no other evaluation has a part in what it makes. Its tree is stored beside the checkouts, which
never change, when its processes are gone.

The next process of the daemon ends a build of this one with all that no evaluation needs, and
begins it again with the evaluation that waits for it.
"""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path

import attrs
from twisted.logger import Logger

from tawebeval import __version__
from tawebeval.config import Configuration
from tawebeval.core.evaluations import Checkout, TakeTree
from tawebeval.core.events import EventMemory
from tawebeval.core.form import ChosenLimits, pack_request, parse_limits
from tawebeval.deferreds import wait_despite_cancellation
from tawebeval.errors import EvaluationFailure, FailureReason
from tawebeval.evaluations.context import (
    EvaluationContext,
    FixedCheckout,
    make_unread_events_share,
)
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.store import EvaluationDetails
from tawebeval.linux.filetree import is_disk_full, remove_tree
from tawebeval.sandbox.workspace import Workspace, derive_directory_name

_CANCELLED = EvaluationFailure("cancelled", "the evaluation that builds was stopped")
# Reasons that are no fault of the command.
_OTHERS: frozenset[FailureReason] = frozenset(
    {"directory", "node", "preempted", "revoked", "cancelled", "shutdown", "lost"}
)

# Errors of a copy that are faults of the command.
_UNREADABLE = (errno.EACCES, errno.ENAMETOOLONG)

log = Logger()


@attrs.frozen
class BuildPlan:
    """How to build a tree. `key` tells all that decides the result: 40 hexadecimal digits."""

    command: str
    limits: ChosenLimits
    key: str
    configuration: Configuration = attrs.field(repr=False)


def plan_build(evaluation: Evaluation, checkout: Checkout) -> BuildPlan:
    """Return how to build the tree of an evaluation of a problem.

    A reload may have changed or removed the problem. The command is that of the request, which has
    the evaluator's command of the same time.
    """
    configuration, details = evaluation.context.configuration, evaluation.details
    environment, request = details.environment, details.request
    problem = configuration.problems.get(request.problem or "")
    # A request may choose limits, which must not decide over the builds of others.
    limits = {} if problem is None else {name: str(value) for name, value in problem.limits.items()}
    parts = [
        __version__,
        checkout.path.name,
        request.directory,
        request.build,
        sorted(limits.items()),
        sorted(configuration.evaluations.environment.items()),
        [configuration.sandbox.kind, *configuration.sandbox.readable],
        environment and [str(environment.root), sorted(environment.variables.items())],
    ]
    return BuildPlan(
        request.build,
        parse_limits(limits, configuration.limits.requestable_ranges),
        hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40],
        configuration,
    )


class Build:
    """One build, for `owner`; `evaluation` is its own.

    `take_tree` is called in a thread with the directory of the built tree.
    """

    def __init__(
        self,
        owner: Evaluation,
        plan: BuildPlan,
        checkout: Checkout,
        take_tree: TakeTree,
    ) -> None:
        context, details = owner.context, owner.details
        self._take_tree, self._figures = take_tree, (0, 0)
        self._threads = context.worker_threads
        self._error: EvaluationFailure | None = EvaluationFailure(
            "lost", "the built tree could not be taken; submit again"
        )
        request = attrs.evolve(
            details.request,
            evaluator_cmd=f"exec >&2\n{plan.command}",  # so that there are no events
            build="",
            seed=0,
            submission=(),
            callback_url=None,
            limits=plan.limits,
            metadata={},
        )
        identifier = context.generate_random_bytes(16).hex()
        root = owner.workspace.root.with_name(derive_directory_name(identifier))
        self._upload = root.with_suffix(".upload")
        self.evaluation = Evaluation(
            EvaluationDetails(
                identifier,
                pack_request(request),
                0,
                caller=details.caller,
                upload_directory=self._upload,
            ),
            Workspace(root),
            EvaluationContext(
                configuration=plan.configuration,
                clock=context.clock,
                generate_random_bytes=context.generate_random_bytes,
                worker_threads=context.worker_threads,
                spawner=context.spawner,
                checkout_source=FixedCheckout(attrs.evolve(checkout, release=lambda: None)),
                sandbox=context.sandbox,
                limit_monitor=context.limit_monitor,
                event_memory=EventMemory(plan.configuration.buffers.total),
                unread_events=make_unread_events_share(plan.configuration.buffers.disk),
                open_event_files=context.open_event_files,
                cleanup_queue=context.cleanup_queue,
            ),
            take_tree=self._take,
        )

    def create_directory(self) -> None:
        """Make the directory of a submission without files. Blocks. Raises: OSError."""
        Workspace(self._upload).submission_directory.mkdir(parents=True)

    def remove_directory(self) -> None:
        """Undo `create_directory` of a build that is not started. Blocks. Raises: OSError."""
        remove_tree(self._upload)

    def _take(self, tree: Path) -> None:
        try:
            self._figures = self._take_tree(tree)
        except EvaluationFailure as error:
            self._error = attrs.evolve(error, reason="build")
        except OSError as error:
            words = "{build}: the built tree cannot be copied: {error}"
            log.error(words, build=self.evaluation.details.log_name, error=error)  # noqa: TRY400
            if error.errno in _UNREADABLE:
                what = "the built tree has files that cannot be read, or is nested too deeply"
                self._error = EvaluationFailure("build", what)
            elif is_disk_full(error):
                what = "the server's disk is full; submit again"
                self._error = EvaluationFailure("lost", what)
        else:
            self._error = None

    async def finish(self) -> tuple[int, int]:
        """Return what `take_tree` has returned, when nothing else is left of the build.

        A cancellation stops it first. Raises: EvaluationFailure.
        """
        build = self.evaluation

        def stop() -> None:
            build.stop(_CANCELLED)
            if build.run is not None:
                build.run.kill()

        try:
            await wait_despite_cancellation(build.cleanup_event, stop)
        finally:
            await self._threads.run_in_thread(remove_tree, build.workspace.root)
        failure, result = build.details.failure or self._error, build.details.run_result
        if failure is None:
            return self._figures
        reason = failure.reason if failure.reason in _OTHERS else "build"
        printed = {} if result is None or reason != "build" else {"stderr": result.stderr_text}
        raise EvaluationFailure(
            reason,
            f"the build failed: {failure.message.replace('the evaluator', 'it', 1)}",
            printed,
            is_daemon_fault=failure.is_daemon_fault,
        )
