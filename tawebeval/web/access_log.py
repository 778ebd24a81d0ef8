"""Requests, as they are answered: counted, and logged where the operator wants that."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

import attrs
from klein import Klein
from twisted.logger import Logger
from werkzeug.exceptions import HTTPException

from tawebeval.core.identifiers import IDENTIFIER
from tawebeval.core.tally import SHORT_BOUNDS, Histogram
from tawebeval.sandbox.workspace import log_name

OTHER = "other"
"""The route, or the method, of a request that has none of ours: strangers make up any number."""

EVENTS = "/evaluation/<identifier>/events"
"""The route of pages and streams."""

_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
_IDENTIFIER = re.compile(IDENTIFIER)
_LONGEST = 200  # characters of a path in the log

log = Logger()


@attrs.define(eq=False)
class RequestLog:
    """What was answered: how often, by method, route and status, and in how many seconds.

    Answers that were to wait, for events or for the end of an evaluation, count without a time:
    it is the evaluator's. `plain_pages` are the pages that plain polls got, which are not among
    the `answers`. `logged` is whether each answer has a line in the log.
    """

    logged: bool = False
    plain_pages: int = 0
    answers: Counter[tuple[str, str, int]] = attrs.field(factory=Counter)
    seconds: defaultdict[str, Histogram] = attrs.field(
        factory=lambda: defaultdict(lambda: Histogram(SHORT_BOUNDS))
    )

    def answered(self, method: str, route: str, status: int, seconds: float | None) -> None:
        """Count an answer; `seconds` is None for one that was to wait."""
        self.answers[method, route, int(status)] += 1  # HTTPStatus is equal, and hashes otherwise
        if seconds is not None:
            self.seconds[route].observe(seconds)

    def plain_page(self, seconds: float | None) -> None:
        """Count a page that was the answer to a plain poll; for `seconds` see `answered`."""
        self.plain_pages += 1
        if seconds is not None:
            self.seconds[EVENTS].observe(seconds)

    def counted(self) -> Counter[tuple[str, str, int]]:
        """Return how many answers there were, of all kinds, by method, route and status."""
        return self.answers + Counter({("GET", EVENTS, 200): self.plain_pages})

    def refused(self, status: int, client: str) -> None:
        """Count what is no request, or not one yet, and is refused."""
        self.answered(OTHER, OTHER, status, None)
        if self.logged:
            self.write_line(client, "", OTHER, "-", status, 0, 0.0)

    def write_line(
        self, client: str, caller: str, method: str, path: str, status: int, size: int, took: float
    ) -> None:
        """Write a line for an answer of `size` bytes to a client, by its address, after `took` s.

        The path has no query, and evaluations in it are called what they are in the log.
        """
        log.info(
            "{client} {caller!r} {method} {path} {status} {size} {took:.6f}",
            client=client or "-",
            caller=caller,
            method=method,
            path=_IDENTIFIER.sub(lambda found: log_name(found[0]), path)[:_LONGEST],
            status=status,
            size=size,
            took=took,
        )


@attrs.frozen
class Routes:
    """Tells to which route of an application a request belongs."""

    _app: Klein

    def of(self, method: bytes, path: bytes) -> tuple[str, str]:
        """Return the method and the route; each of them may be OTHER."""
        named = method.decode("latin-1")
        named = named if named in _METHODS else OTHER
        mapper = self._app.url_map.bind("")
        try:
            rule, _ = mapper.match(readable(path), named, return_rule=True)
        except HTTPException:  # which answers that there is none
            return named, OTHER
        return named, rule.rule

    def known(self) -> Iterator[tuple[str, str]]:
        """Yield each method and route that `of` may return."""
        for rule in self._app.url_map.iter_rules():
            for method in sorted(_METHODS & (rule.methods or _METHODS)):
                yield method, rule.rule
        for method in sorted(_METHODS | {OTHER}):
            yield method, OTHER


def readable(path: bytes) -> str:
    """Return a path as the routes are written."""
    return unquote_to_bytes(path).decode("utf-8", "replace")
