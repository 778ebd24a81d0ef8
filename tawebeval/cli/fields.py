"""The FIELD arguments: a submission, as TuringArena's commands have it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from tawebeval.client.submission import check_text
from tawebeval.core.filenames import base_name
from tawebeval.core.form import FIELD_NAME

DEFAULT_FIELDS = ("source",)
"""The fields that paths without a name are, in this order."""

_SHOWN = 100  # characters of a path that is none

Submission: TypeAlias = dict[str, str | Path]

_TEXT = re.compile(rf"({FIELD_NAME})=(.*)", re.DOTALL)
_FILE = re.compile(rf"({FIELD_NAME}):(.+)", re.DOTALL)


def parse_fields(arguments: Iterable[str]) -> Submission:
    """Return the submission: by the name of each field a text, or the path of a file.

    `name=text` and `name:path` name their fields; a bare path takes the next of the default
    ones that is free. Raises ValueError for a field that stands twice, a path without a field,
    what is no file, a name that the evaluator could not see, and text that cannot be UTF-8.
    """
    submission: Submission = {}
    bare: list[Path] = []
    for argument in arguments:
        if match := _TEXT.fullmatch(argument):
            check_text(match[1], match[2])
            _add(submission, match[1], match[2])
        elif match := _FILE.fullmatch(argument):
            _add(submission, match[1], _file(match[2]))
        else:
            bare.append(_file(argument))
    for path in bare:
        free = next((name for name in DEFAULT_FIELDS if name not in submission), None)
        if free is None:
            raise ValueError(f"{path}: which field is it? Write NAME:{path}")
        submission[free] = path
    if not submission:
        raise ValueError("there is nothing to evaluate: give a file, such as solution.py")
    return submission


def _add(submission: Submission, name: str, content: str | Path) -> None:
    if name in submission:
        raise ValueError(f"the field {name} stands there twice")
    submission[name] = content


def _file(path: str) -> Path:
    try:
        found = Path(path).is_file()
    except OSError as error:
        raise ValueError(f"{path[:_SHOWN]}: {error.strerror}") from None
    if not found:
        raise ValueError(f"there is no file {path}")
    base_name(path)
    return Path(path)
