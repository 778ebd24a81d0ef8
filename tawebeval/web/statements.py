"""Documents of problems with their statements: Markdown, and its pictures, from the commit.

A statement may be there in several languages: `statement.it.md` beside `statement.md`. The commit
is checked out as for an evaluation, in a fetch slot. A document is kept for
`MAX_DOCUMENT_AGE_SECONDS`, or until a reload: a branch is not asked for again with each request,
nor for a language that the statement does not have. If the next one cannot be read, that one stays.
A document has up to about 1 MiB: the text, and its pictures.
"""

from __future__ import annotations

import errno
import os
import re
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Set
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

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

MAX_DOCUMENT_AGE_SECONDS = 60.0
"""Seconds for which a document is kept."""

MAX_CACHED_DOCUMENTS = 32
"""Documents that are kept: those that were asked for last."""

MAX_STATEMENT_BYTES = 64 * 1024
"""Bytes of a statement."""

MAX_TOTAL_PICTURE_BYTES = 512 * 1024
"""Bytes of all pictures of a statement; those beyond are left out."""

MAX_STATEMENT_PICTURES = 50
"""Pictures of a statement."""

MAX_STATEMENT_LANGUAGES = 50
"""Languages of a statement besides the usual one."""

# All readers together are one caller of the fetch slots, of a name that no token has: evaluations
# that wait for a run slot hold the share of their caller, and a document is for all its readers.
_READERS = "readers of statements"

_PICTURE = re.compile(r"\]\(([^()\s:]{1,200}\.(png|jpe?g|gif|webp|svg))[)\s]", re.IGNORECASE)
_MEDIA_TYPES = {"jpg": "image/jpeg", "svg": "image/svg+xml"}

log = Logger()


@attrs.frozen
class _Document:
    configuration: Configuration  # that it was made for
    time: float
    content: bytes = attrs.field(repr=False)
    languages: Set[str]  # of the statement, besides the usual one


@attrs.define(eq=False)
class ProblemStatements:
    """The documents of the problems of a configuration."""

    _context: EvaluationContext
    _kept: OrderedDict[tuple[str, str], _Document] = attrs.field(factory=OrderedDict)
    _readings: SingleFlight[tuple[int, str, str], _Document] = attrs.field(factory=SingleFlight)

    async def read_problem_json(self, name: str, language: str, caller: str) -> bytes:
        """Return the JSON of a problem, with the statement in a language ("it") or the usual one.

        Raises: ProblemNotFound; ServerBusy, if the commit or the statement cannot be read.
        """
        configuration = self._context.configuration
        if name not in configuration.problems:
            raise ProblemNotFound(name)
        usual = await self._provide(configuration, name, "", caller)
        if language not in usual.languages:
            return usual.content
        return (await self._provide(configuration, name, language, caller)).content

    async def _provide(
        self, configuration: Configuration, name: str, language: str, caller: str
    ) -> _Document:
        """Return a document that is kept, or read it. Raises: ServerBusy."""
        key, now = (name, language), self._context.clock.seconds()
        kept = self._kept.get(key)
        if kept is not None and kept.configuration is not configuration:
            kept = None
        if kept is not None and now < kept.time + MAX_DOCUMENT_AGE_SECONDS:
            self._kept.move_to_end(key)
            return kept
        problem = configuration.problems[name]
        try:
            # By the configuration, too: nobody gets what was read before a reload. The work has it,
            # so that its `id` stays its own.
            document = await self._readings.run_once(
                (id(configuration), name, language),
                lambda: self._read(configuration, name, language, caller),
            )
        except (EvaluationFailure, OSError, ValueError) as error:
            log.warn("problem {problem}: no statement: {error}", problem=name, error=error)
            if kept is None:
                # The text of an OSError has a path of the machine.
                reason = error.strerror if isinstance(error, OSError) else str(error)
                words = f"cannot read the statement {problem.statement}: {reason}"
                raise ServerBusy(words, 10) from None
            document = attrs.evolve(kept, time=now)  # until it is time to try again
        if configuration is self._context.configuration:
            self._kept[key] = document
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_CACHED_DOCUMENTS:
                self._kept.popitem(last=False)
        return document

    async def _read(
        self, configuration: Configuration, name: str, language: str, caller: str
    ) -> _Document:
        problem, now = configuration.problems[name], self._context.clock.seconds()
        found: dict[str, Any] = {"statement": "", "pictures": {}}
        languages: Set[str] = frozenset()
        if problem.statement:
            source = self._context.checkout_source
            repository = Repository(problem.repository, problem.branch or None)
            async with self._context.fetch_slots.hold_slot(_READERS):
                oid = problem.commit.lower() or await source.resolve_branch(repository, caller)
                checkout = await source.check_out_commit(repository, oid, caller)
            try:
                found, languages = await self._context.worker_threads.run_in_thread(
                    _read_statement, checkout.path, problem, language
                )
            finally:
                checkout.release()
        content = orjson.dumps({**describe_problem(configuration, name), **found})
        return _Document(configuration, now, content, languages)


def _read_statement(
    tree: Path, problem: ProblemSettings, language: str
) -> tuple[dict[str, Any], Set[str]]:
    """Return the statement with its pictures, and the languages of the statement.

    Blocks. Raises: OSError, ValueError.
    """
    directory = tree / problem.directory
    path = directory / problem.statement
    own = path.with_name(f"{path.stem}.{language}{path.suffix}")
    # A link is not followed here: it may lead out of the tree.
    read = own if language and os.path.lexists(own) else path
    content = _read_file(tree, read, MAX_STATEMENT_BYTES)
    if content is None:
        raise ValueError("the file is over 64 KiB; shorten the statement")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ValueError("the file is not UTF-8") from None
    pictures: dict[str, str] = {}
    left = MAX_TOTAL_PICTURE_BYTES
    for name, ending in islice(_PICTURE.findall(text), MAX_STATEMENT_PICTURES):
        file = path.parent / unquote(name)
        try:
            picture = None if name in pictures else _read_file(tree, file, left)
        except (OSError, ValueError):
            continue  # the page shows its description
        if picture is not None:
            left -= len(picture)
            kind = _MEDIA_TYPES.get(ending.lower(), f"image/{ending.lower()}")
            pictures[name] = f"data:{kind};base64,{b64encode(picture).decode()}"
    return {"statement": text, "pictures": pictures}, _list_languages(path)


def _list_languages(path: Path) -> Set[str]:
    """Return the languages of the files beside a statement, such as `statement.it.md`."""
    form = re.compile(rf"{re.escape(path.stem)}\.([a-z]{{2,3}}){re.escape(path.suffix)}")
    with os.scandir(path.parent) as entries:
        found = (match[1] for entry in entries if (match := form.fullmatch(entry.name)))
        return frozenset(islice(found, MAX_STATEMENT_LANGUAGES))


def _read_file(tree: Path, path: Path, limit: int) -> bytes | None:
    """Return the content of a file of `tree`; None if it is over the limit.

    Raises: OSError, ValueError for a path that leads out of the tree.
    """
    try:
        real = path.resolve()
    except RuntimeError:  # what Python before 3.13 raises for links in a circle
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
    if not real.is_relative_to(tree.resolve()):
        raise ValueError("the path leads out of the repository")
    with open_regular_file(real) as file:
        content = file.read(limit + 1)
    return content if len(content) <= limit else None
