"""Environment variables of an evaluator (docs/evaluators.md)."""

from __future__ import annotations

from collections.abc import Mapping

from tawebeval.core.segi import MARKER_VARIABLE_NAMES, Markers

_DEFAULTS = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
_OF_EACH_RUN = ("HOME", "TEMPORARY_DIRECTORY", "TURINGARENA_SEED")
_TOOLS = "EVALUATION_TOOLS"
_RESERVED = frozenset((*_OF_EACH_RUN, *MARKER_VARIABLE_NAMES, _TOOLS))
_SUBMISSION_FILE = "SUBMISSION_FILE_"


def is_reserved_variable(name: str) -> bool:
    """Return whether the daemon sets a variable itself, so that operators cannot configure it."""
    return name in _RESERVED or name.startswith(_SUBMISSION_FILE)


def add_tools_to_path(environment: Mapping[str, str], tools_directory: str) -> dict[str, str]:
    """Return the environment with the directory of tools for evaluators, whose `bin` is on PATH."""
    path = f"{environment.get('PATH', _DEFAULTS['PATH'])}:{tools_directory}/bin"
    return {**environment, "PATH": path, _TOOLS: tools_directory}


def build_environment(
    configured: Mapping[str, str],
    *,
    home: str,
    temporary_directory: str,
    seed: int,
    submission: Mapping[str, str],
    markers: Markers,
) -> dict[str, str]:
    """Return the environment of an evaluator; nothing is inherited from the daemon.

    `home`, `temporary_directory` and the values of `submission` (by field name) are paths inside
    the sandbox. `configured` are the operator's variables.
    """
    return {
        **_DEFAULTS,
        **configured,
        **dict(zip(_OF_EACH_RUN, (home, temporary_directory, str(seed)), strict=True)),
        **{f"{_SUBMISSION_FILE}{field.upper()}": path for field, path in submission.items()},
        **markers.build_environment(),
    }
