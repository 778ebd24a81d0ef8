"""End of an evaluation, and the removal of its processes and directories.

The removal is idempotent: it is repeated until it succeeds, also by a later process of the daemon.
"""

from __future__ import annotations

from twisted.logger import Logger

from tawebeval.deferreds import run_in_background
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.linux.filetree import remove_tree

log = Logger()


def conclude_in_background(evaluation: Evaluation, failure: EvaluationFailure | None) -> None:
    """End an evaluation as `conclude` does, without waiting for it."""
    run_in_background(
        conclude(evaluation, failure),
        log,
        "{evaluation}: defect of the daemon",
        evaluation=evaluation.details.log_name,
    )


async def conclude(evaluation: Evaluation, failure: EvaluationFailure | None) -> None:
    """End an evaluation, give back its slots and remove its processes and directories.

    One that is left ends in the next process of the daemon: this one may store nothing any more.
    """
    details = evaluation.details
    if evaluation.left_at is not None:
        return
    evaluation.cancel_start = None
    if failure is not None:
        await evaluation.store_failure(failure)
    evaluation.run = None
    if evaluation.events.stdout is not None:
        evaluation.events.stdout.drop_parser()
    # Of an evaluation that has not started; otherwise it is in the workspace.
    request = (
        details.pack_for_rerun()
        if details.upload_directory and details.should_keep_submission
        else b""
    )
    try:
        evaluation.end(failure)
    finally:
        if evaluation.slots is not None:
            evaluation.slots.release_slot(details.identifier)
        evaluation.context.fetch_slots.release_slot(details.identifier)
        await clean_up(evaluation, request)


async def clean_up(evaluation: Evaluation, request: bytes = b"") -> None:
    """Remove the processes and directories of an evaluation that has ended.

    The files of its events stay, and those of its submission, if they are kept. `request` is kept
    with a submission that is still where it was uploaded.
    """
    details, context, workspace = evaluation.details, evaluation.context, evaluation.workspace
    upload, sandboxed, checkout = (
        details.upload_directory,
        evaluation.sandboxed,
        evaluation.checkout,
    )
    evaluation.sandboxed = evaluation.checkout = None
    keeps = details.should_keep_submission

    def remove_all() -> None:
        nonlocal keeps
        keep, keeps = keeps, False  # the registry does not see what a second attempt would keep
        try:
            if sandboxed is not None:
                sandboxed.close()
        finally:  # a killed process that is not gone yet is only in the way of its cgroup
            if keep and request and upload is not None and upload.exists():
                workspace.take_over_upload(upload)
                workspace.request_file.write_bytes(request)
            keep = keep and workspace.request_file.exists()
            workspace.remove_evaluator_content(keep_submission=keep)
            if upload is not None:
                remove_tree(upload)
        details.has_kept_submission = keep

    try:
        await context.cleanup_queue.attempt_call(
            f"{details.log_name}: removal of its processes and directories",
            remove_all,
        )
    except Exception:  # noqa: BLE001  (the evaluation ends all the same)
        log.failure(
            "{evaluation}: its processes and directories could not be removed",
            evaluation=details.log_name,
        )
    if checkout is not None:
        checkout.release()
    evaluation.cleanup_event.set_value(evaluation)
