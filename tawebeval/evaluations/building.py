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
from collections.abc import Callable
from pathlib import Path

import attrs
from twisted.internet.defer import CancelledError
from twisted.logger import Logger

from tawebeval import __version__
from tawebeval.config import Configuration
from tawebeval.core.evaluations import Checkout, EvaluationCounters, TreeCopier
from tawebeval.core.events import EventMemory
from tawebeval.core.form import ChosenLimits, EvaluationRequest, pack_request, parse_limits
from tawebeval.deferreds import wait_despite_cancellation
from tawebeval.errors import EvaluationFailure, FailureReason
from tawebeval.evaluations.context import FixedCheckoutSource, make_unread_events_budget
from tawebeval.evaluations.lifecycle import Evaluation, make_log_fields
from tawebeval.evaluations.store import EvaluationDetails
from tawebeval.linux.filetree import is_disk_full_error, remove_tree
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
    daemon_configuration: Configuration = attrs.field(repr=False)


def plan_build(evaluation: Evaluation, checkout: Checkout) -> BuildPlan:
    """Return how to build the tree of an evaluation of a problem.

    A reload may have changed or removed the problem. The command is that of the request, which has
    the evaluator's command of the same time.
    """
    configuration, details = evaluation.context.configuration, evaluation.details
    environment, request = details.environment, details.request
    problem = configuration.problems.get(request.problem_name or "")
    # A request may choose limits, which must not decide over the builds of others.
    limits = {} if problem is None else {name: str(value) for name, value in problem.limits.items()}
    parts = [
        __version__,
        checkout.path.name,
        request.directory,
        request.build_command,
        sorted(limits.items()),
        sorted(configuration.evaluations.environment.items()),
        [configuration.sandbox.kind, *configuration.sandbox.readable],
        environment and [str(environment.root), sorted(environment.variables.items())],
    ]
    return BuildPlan(
        request.build_command,
        parse_limits(limits, configuration.limits.requestable_ranges),
        hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40],
        configuration,
    )


async def build_tree(
    owner: Evaluation,
    plan: BuildPlan,
    checkout: Checkout,
    start: Callable[[Evaluation], object],
    take_tree: TreeCopier,
) -> tuple[int, int]:
    """Build a tree for an evaluation; return what `take_tree` returns for its directory.

    `start(evaluation)` starts the build. `take_tree` is called in a thread. When the result is
    there, nothing else is left of the build; a cancellation stops it first. Raises:
    EvaluationFailure, OSError.
    """
    context, details, threads = owner.context, owner.details, owner.context.worker_threads
    figures = 0, 0
    error: EvaluationFailure | None = EvaluationFailure(
        "lost", "the built tree could not be taken; submit again"
    )

    def take(tree: Path) -> None:
        nonlocal figures, error
        try:
            figures, error = take_tree(tree), None
        except EvaluationFailure as failure:
            error = attrs.evolve(failure, reason="build")
        except OSError as failure:
            words = "{build}: the built tree cannot be copied: {error}"
            log.error(words, build=build.details.log_name, error=failure)  # noqa: TRY400
            if failure.errno in _UNREADABLE:
                what = "the built tree has files that cannot be read, or is nested too deeply"
                error = EvaluationFailure("build", what)
            elif is_disk_full_error(failure):
                error = EvaluationFailure("lost", "the server's disk is full; submit again")

    # A new field of requests reaches no build, whose tree serves all evaluations of the commit.
    asked = details.request
    request = EvaluationRequest(
        asked.repository,
        asked.commit_oid,
        asked.directory,
        f"exec >&2\n{plan.command}",  # so that there are no events
        seed=0,
        submission=(),
        limits=plan.limits,
        environment_name=asked.environment_name,
        problem_name=asked.problem_name,
    )
    identifier = context.generate_random_bytes(16).hex()
    root = owner.workspace.root.with_name(derive_directory_name(identifier))
    upload = root.with_suffix(".upload")
    build = Evaluation(
        EvaluationDetails(
            identifier, pack_request(request), 0, caller=details.caller, upload_directory=upload
        ),
        Workspace(root),
        attrs.evolve(
            context,
            configuration=plan.daemon_configuration,
            checkout_source=FixedCheckoutSource(attrs.evolve(checkout, release=lambda: None)),
            event_memory=EventMemory(plan.daemon_configuration.buffers.total),
            unread_events_budget=make_unread_events_budget(plan.daemon_configuration.buffers.disk),
            store=None,
            archive=None,
            counters=EvaluationCounters(),
        ),
        on_tree_built=take,
    )
    try:
        await threads.run_in_thread(Workspace(upload).submission_directory.mkdir, parents=True)
    except (CancelledError, OSError):
        await threads.run_in_thread(remove_tree, upload)
        raise
    log.info(
        "{evaluation}: builds the tree as {build}",
        build=build.details.log_name,
        **make_log_fields(details),
    )
    start(build)

    def stop() -> None:
        build.stop(_CANCELLED)
        if build.run is not None:
            build.run.kill()

    try:
        await wait_despite_cancellation(build.cleanup_completion, stop)
    finally:
        await threads.run_in_thread(remove_tree, root)
    failure, result = build.details.failure or error, build.details.run_result
    if failure is None:
        return figures
    reason = failure.reason if failure.reason in _OTHERS else "build"
    printed = {} if result is None or reason != "build" else {"stderr": result.stderr_text}
    raise EvaluationFailure(
        reason,
        f"the build failed: {failure.message.replace('the evaluator', 'it', 1)}",
        printed,
        is_daemon_fault=failure.is_daemon_fault,
    )
