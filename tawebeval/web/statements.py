"""Documents of problems with their statements: Markdown, and its pictures, from the commit.

A statement may be there in several languages: `statement.it.md` beside `statement.md`. The commit
is checked out as for an evaluation, in a fetch slot of the caller. A document is kept for `MAX_AGE`
seconds, or until a reload: a branch is not asked for again with each request. If the next one
cannot be read, that one stays. A document has up to about 1 MiB: the text, and its pictures.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import OrderedDict
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import orjson
from twisted.logger import Logger

from tawebeval.config import Configuration, ProblemSettings
from tawebeval.core.form import Repository
from tawebeval.deferreds import SingleFlight
from tawebeval.errors import EvaluationFailure, ProblemNotFound, ServerBusy
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.linux.filetree import open_regular_file
from tawebeval.web.lists import describe_problem

MAX_AGE = 60.0
"""Seconds for which a document is kept."""

MAX_DOCUMENTS = 32
"""Documents that are kept: those that were asked for last."""

MAX_STATEMENT_BYTES = 64 * 1024
"""Bytes of a statement."""

MAX_PICTURE_BYTES = 512 * 1024
"""Bytes of all pictures of a statement; those beyond are left out."""

MAX_PICTURES = 50
"""Pictures of a statement."""

_PICTURE = re.compile(r"\]\(([^()\s:]{1,200}\.(png|jpe?g|gif|webp|svg))[)\s]", re.IGNORECASE)
_MEDIA_TYPES = {"jpg": "image/jpeg", "svg": "image/svg+xml"}

log = Logger()


@attrs.frozen
class _Document:
    configuration: Configuration  # that it was made for
    time: float
    content: bytes = attrs.field(repr=False)


@attrs.define(eq=False)
class ProblemDocuments:
    """The documents of the problems of a configuration."""

    _context: EvaluationContext
    _kept: OrderedDict[tuple[str, str], _Document] = attrs.field(factory=OrderedDict)
    _readings: SingleFlight[tuple[str, str], bytes] = attrs.field(factory=SingleFlight)

    async def read_document(self, name: str, language: str, caller: str) -> bytes:
        """Return the JSON of a problem, with the statement in a language ("it") or the usual one.

        Raises: ProblemNotFound; ServerBusy, if the commit or the statement cannot be read.
        """
        configuration, now = self._context.configuration, self._context.clock.seconds()
        if name not in configuration.problems:
            raise ProblemNotFound(name)
        key = name, language
        kept = self._kept.get(key)
        if kept is not None and kept.configuration is not configuration:
            kept = None
        if kept is not None and now < kept.time + MAX_AGE:
            return kept.content
        problem = configuration.problems[name]
        try:
            content = await self._readings.run_once(
                key, lambda: self._read(name, problem, language, caller)
            )
        except (EvaluationFailure, OSError, ValueError) as error:
            log.warn("problem {problem}: no statement: {error}", problem=name, error=error)
            if kept is None:
                # The text of an OSError has a path of the machine.
                reason = error.strerror if isinstance(error, OSError) else str(error)
                words = f"cannot read the statement {problem.statement}: {reason}"
                raise ServerBusy(words, 10) from None
            content = kept.content  # until it is time to try again
        self._kept[key] = _Document(configuration, now, content)
        self._kept.move_to_end(key)
        while len(self._kept) > MAX_DOCUMENTS:
            self._kept.popitem(last=False)
        return content

    async def _read(self, name: str, problem: ProblemSettings, language: str, caller: str) -> bytes:
        document = describe_problem(self._context.configuration, name)
        found: dict[str, Any] = {"statement": "", "pictures": {}}
        if problem.statement:
            source = self._context.checkout_source
            repository = Repository(problem.repository, problem.branch or None)
            async with self._context.fetch_slots.take_turn(caller):
                oid = problem.commit.lower() or await source.resolve_branch(repository, caller)
                checkout = await source.check_out_commit(repository, oid, caller)
            try:
                found = await self._context.worker_threads.run_in_thread(
                    _read_statement, checkout.path, problem, language
                )
            finally:
                checkout.release()
        return orjson.dumps({**document, **found})


def _read_statement(tree: Path, problem: ProblemSettings, language: str) -> dict[str, Any]:
    """Return the statement and its pictures. Blocks. Raises: OSError, ValueError."""
    directory = tree / problem.directory
    path = directory / problem.statement
    own = path.with_name(f"{path.stem}.{language}{path.suffix}")
    content = _read_file(tree, own if language and own.is_file() else path, MAX_STATEMENT_BYTES)
    if content is None:
        raise ValueError("the file is over 64 KiB; shorten the statement")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ValueError("the file is not UTF-8") from None
    pictures: dict[str, str] = {}
    left = MAX_PICTURE_BYTES
    for name, ending in islice(_PICTURE.findall(text), MAX_PICTURES):
        try:
            picture = None if name in pictures else _read_file(tree, path.parent / name, left)
        except (OSError, ValueError):
            continue  # the page shows its description
        if picture is not None:
            left -= len(picture)
            kind = _MEDIA_TYPES.get(ending.lower(), f"image/{ending.lower()}")
            pictures[name] = f"data:{kind};base64,{b64encode(picture).decode()}"
    return {"statement": text, "pictures": pictures}


def _read_file(tree: Path, path: Path, limit: int) -> bytes | None:
    """Return the content of a file of `tree`; None if it is over the limit.

    Raises: OSError, ValueError for a path that leads out of the tree.
    """
    try:
        real = path.resolve()
    except RuntimeError:  # links in a circle
        raise ValueError("the path leads nowhere") from None
    if not real.is_relative_to(tree.resolve()):
        raise ValueError("the path leads out of the repository")
    with open_regular_file(real) as file:
        content = file.read(limit + 1)
    return content if len(content) <= limit else None
