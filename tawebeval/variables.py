"""The evaluator's environment (contract, section 4)."""

from __future__ import annotations

from collections.abc import Mapping

from tawebeval.form import EvaluationRequest
from tawebeval.markers import Markers
from tawebeval.workspace import View, Workspace


def variables(
    request: EvaluationRequest,
    seed: int,
    workspace: Workspace,
    view: View,
    markers: Markers,
    configured: Mapping[str, str],
) -> dict[str, str]:
    """Return it; nothing of the daemon's own is in it, but what the operator has `configured`."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        **configured,
        "HOME": str(view.of(workspace.home)),
        "TEMPORARY_DIRECTORY": str(view.of(workspace.temporary)),
        "TURINGARENA_SEED": str(seed),
        **{
            f"SUBMISSION_FILE_{file.field.upper()}": str(view.of(workspace.submission_path(file)))
            for file in request.submission
        },
        **markers.environment(),
    }
