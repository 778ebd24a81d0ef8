"""Links that only read one evaluation: those that hold, and the requests that use them.

The daemon keeps for each evaluation with links its caller, a generation and the latest expiry. A
revocation removes them, and cuts the requests and streams of the evaluation's links. Requests and
rates of links have bounds of their own, of which one caller has half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from tawebeval.config import CallerSettings
from tawebeval.core.shares import Share, SharedResource
from tawebeval.core.signed_links import LINK_GENERATION_BYTES, LinkSigner, find_bearer_link
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import (
    AccessDenied,
    CallerQuotaExceeded,
    MalformedRequest,
    Unauthorized,
)
from tawebeval.evaluations.database import LinkRow
from tawebeval.evaluations.store import EvaluationStore
from tawebeval.web.auth import Authentication, RateLimit
from tawebeval.web.responses import Query, get_query_number
from tawebeval.web.server.request import ApiRequest

MAX_EVALUATIONS_WITH_LINKS = 5000
"""Evaluations with links, at most."""

MAX_EVALUATIONS_WITH_LINKS_PER_CALLER = 1000
"""Those of one caller with a token."""

MAX_LINK_READERS = 200
"""Requests and streams of all links at once, at most."""

MAX_LINK_READERS_PER_CALLER = 100
"""Those of the links that one caller with a token has made."""

MAX_LINK_READERS_PER_EVALUATION = 50
"""Those of the links of one evaluation."""

DEFAULT_LINK_LIFETIME = 7 * 86400
"""Seconds for which a link holds if its maker does not choose."""

LINK_REQUESTS_PER_MINUTE = 6000
"""Requests of all links in a minute, at most."""

LINK_REQUESTS_PER_MINUTE_PER_CALLER = 3000
"""Those of the links that one caller with a token has made."""

LINK_REQUESTS_PER_MINUTE_PER_EVALUATION = 1200
"""Those of the links of one evaluation."""

_EVERY = ""  # the bucket of all links
_OF_CALLER = "caller "  # the beginning of that of a caller's links; no identifier has a space
_RETRY_AFTER = 10  # seconds, if too many requests of links run
_TOO_MANY_READERS = "too many requests by links to evaluations at the same time; try again later"
_DAY = 86400


@attrs.define(eq=False)
class _Reader:
    """A request that uses a link, until its response ends."""

    identifier: str
    caller: str
    abort: Callable[[], object]
    timer: IDelayedCall


@attrs.define(eq=False)
class EvaluationLinks:
    """All links of the daemon; the `store` keeps them.

    `random_bytes(n)` returns n random bytes. `readers_share` counts requests and streams that use a
    link now, for the callers that have made the links; `evaluations_share` those with links.
    """

    _store: EvaluationStore
    _signer: LinkSigner
    _authentication: Authentication
    _clock: IReactorTime
    _read_wall_clock: Callable[[], float]
    _random_bytes: Callable[[int], bytes]
    linked_evaluations: dict[str, LinkRow] = attrs.field(init=False)
    _rate: RateLimit = attrs.field(init=False)
    # By request; and how many each evaluation has.
    _readers: dict[Any, _Reader] = attrs.field(factory=dict, init=False)
    _counts: Counter[str] = attrs.field(factory=Counter, init=False)
    readers_share: Share = attrs.field(init=False)
    evaluations_share: Share = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.readers_share = Share(
            SharedResource.LINK_READERS,
            MAX_LINK_READERS,
            MAX_LINK_READERS_PER_CALLER,
            _TOO_MANY_READERS,
            _TOO_MANY_READERS,
            _RETRY_AFTER,
        )
        self.evaluations_share = Share(
            SharedResource.LINKED_EVALUATIONS,
            MAX_EVALUATIONS_WITH_LINKS,
            MAX_EVALUATIONS_WITH_LINKS_PER_CALLER,
            f"{MAX_EVALUATIONS_WITH_LINKS_PER_CALLER} of your evaluations have links; revoke some"
            " by DELETE /evaluation/ID/links, or try again when some have expired",
            f"{MAX_EVALUATIONS_WITH_LINKS} evaluations have links; revoke some by DELETE"
            " /evaluation/ID/links, or try again when some have expired",
            _RETRY_AFTER,
        )
        self.linked_evaluations = self._store.load_links()
        for linked in self.linked_evaluations.values():
            self.evaluations_share.take(1, linked.caller)
        self._rate = RateLimit(0, self._clock.seconds)
        self._authentication.add_reload_observer(self._cut_unknown_callers)

    async def make_link(self, identifier: str, caller: str, lifetime: int) -> tuple[str, int]:
        """Return a new link of an evaluation, and its expiry in seconds since the epoch.

        `lifetime` is in seconds. Raises: ServerBusy, CallerQuotaExceeded.
        """
        self._drop_expired()
        known = self.linked_evaluations.get(identifier)
        if known is None:
            self._check_room(caller)
        expires = int(self._read_wall_clock()) + lifetime
        generation = known.link_generation if known else self._random_bytes(LINK_GENERATION_BYTES)
        latest = max(expires, known.last_expiry if known else 0)
        self._change(identifier, LinkRow(caller, generation, latest))
        await self._store.flush()
        return self._signer.sign_link(identifier, generation, expires), expires

    async def revoke_links(self, identifier: str) -> None:
        """Revoke all links of an evaluation, and cut the requests that use them.

        Raises: ServerBusy, if the store does not work; then they are revoked only as long as the
        daemon runs.
        """
        if identifier in self.linked_evaluations:
            self._change(identifier, None)
        self._cut_readers(identifier)
        await self._store.flush()

    def add_reader(
        self, request: Any, identifier: str, link: str, abort: Callable[[], object]
    ) -> str:
        """Count a request by a link; return the name of the evaluation's caller.

        `abort` ends the request when the link expires or is revoked. Raises: Unauthorized, the same
        for every reason; CallerQuotaExceeded.
        """
        caller, expires = self._check_link(identifier, link)
        self.readers_share.check(1, caller)
        if self._counts[identifier] >= MAX_LINK_READERS_PER_EVALUATION:
            raise CallerQuotaExceeded(_TOO_MANY_READERS, _RETRY_AFTER)
        self._rate.count_in_bucket(
            identifier, LINK_REQUESTS_PER_MINUTE_PER_EVALUATION, "for the links of an evaluation"
        )
        if caller != ANONYMOUS_CALLER:
            self._rate.count_in_bucket(
                f"{_OF_CALLER}{caller}",
                LINK_REQUESTS_PER_MINUTE_PER_CALLER,
                "for the links of a caller",
            )
        self._rate.count_in_bucket(_EVERY, LINK_REQUESTS_PER_MINUTE, "for all links")
        left = max(0.0, expires - self._read_wall_clock())
        timer = self._clock.callLater(left, abort)
        self._readers[request] = _Reader(identifier, caller, abort, timer)
        self._counts[identifier] += 1
        self.readers_share.take(1, caller)
        return caller

    def remove_reader(self, request: Any) -> None:
        """Count a request no more, if it uses a link: its response has ended."""
        reader = self._readers.pop(request, None)
        if reader is not None:
            self._counts -= Counter([reader.identifier])
            self.readers_share.give_back(1, reader.caller)
            if reader.timer.active():
                reader.timer.cancel()

    def _check_link(self, identifier: str, link: str) -> tuple[str, int]:
        linked = self.linked_evaluations.get(identifier)
        generation = linked.link_generation if linked else bytes(LINK_GENERATION_BYTES)
        expires = self._signer.verify_and_read_expiry(link, identifier, generation)
        if (
            linked is None
            or expires is None
            or expires <= self._read_wall_clock()
            or not self._authentication.has_caller(linked.caller)
        ):
            raise Unauthorized(
                "the link to the evaluation is unknown, expired or revoked; ask for a new one"
            )
        return linked.caller, expires

    def _cut_readers(self, identifier: str) -> None:
        for reader in list(self._readers.values()):
            if reader.identifier == identifier:
                reader.abort()

    def _cut_unknown_callers(self) -> None:
        """Cut the requests by links of callers without a token."""
        for identifier in set(self._counts):
            linked = self.linked_evaluations.get(identifier)
            if linked is not None and not self._authentication.has_caller(linked.caller):
                self._cut_readers(identifier)

    def _check_room(self, caller: str) -> None:
        if caller == ANONYMOUS_CALLER and self.evaluations_share.is_part_used_up(caller):
            # Clients without tokens cannot be told apart: one could keep all places for 30 days.
            first = min(
                self.linked_evaluations,
                key=lambda identifier: self.linked_evaluations[identifier].last_expiry,
            )
            self._change(first, None)
            self._cut_readers(first)
        self.evaluations_share.check(1, caller)

    def _drop_expired(self) -> None:
        now = self._read_wall_clock()
        for identifier in [
            name for name, linked in self.linked_evaluations.items() if linked.last_expiry <= now
        ]:
            self._change(identifier, None)

    def _change(self, identifier: str, linked: LinkRow | None) -> None:
        known = self.linked_evaluations.pop(identifier, None)
        if known is not None:
            self.evaluations_share.give_back(1, known.caller)
        if linked is not None:
            self.evaluations_share.take(1, linked.caller)
            self.linked_evaluations[identifier] = linked
            self._store.save_link(identifier, linked)
        else:
            self._rate.drop_bucket(identifier)
            self._store.delete_link(identifier)


def find_link(query: Query, authorization: Sequence[bytes]) -> str | None:
    """Return the link of a request, from `Authorization: Bearer` or `?link=`; None without one.

    `authorization` has the values of these headers. The link may be none of this daemon. Raises:
    MalformedRequest, for more than one.
    """
    if not authorization and b"link" not in query:
        return None
    given = [value.decode("latin-1") for value in query.get(b"link", [])]
    in_header = find_bearer_link(authorization)
    if len(given) > 1 or (given and authorization):
        raise MalformedRequest(
            "link: the query parameter is repeated, or the request has a token or link in the"
            " header Authorization, too; send one of them"
        )
    return given[0] if given else in_header


def parse_link_lifetime(request: ApiRequest, settings: CallerSettings) -> int:
    """Return `?lifetime=N` in seconds, or the default. Raises: AccessDenied, MalformedRequest."""
    most = int(settings.link_days * _DAY)
    if not most:
        raise AccessDenied("links are disabled; the operator can set callers.link_days")
    lifetime = get_query_number(request.query, "lifetime")
    if lifetime is None:
        return min(DEFAULT_LINK_LIFETIME, most)
    if not 0 < lifetime <= most:
        raise MalformedRequest(
            f"lifetime: {lifetime} should be from 1 to {most} seconds (callers.link_days)",
            limit=most,
        )
    return lifetime
