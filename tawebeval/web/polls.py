"""Polls: questions for a page, and when to ask for the next.

However a request was read, this is what its answer is made of.
"""

from __future__ import annotations

import attrs

from tawebeval.core.pages import Page
from tawebeval.evaluations.registry import Registry

_POLL_AGAIN = b"1"  # seconds after an empty page, for those who do not wait


@attrs.frozen
class Poll:
    """A question of `caller` for the events of `identifier` that follow the cursor `after`.

    While there are none the answer comes up to `wait` seconds later; `asked_to` is whether it
    was the client who has said so. `limit` is the most bytes of events that the client wants on a
    page, None if it has not said so.
    """

    caller: str
    identifier: str
    after: str | None
    wait: int = 0
    asked_to: bool = False
    limit: int | None = None

    @classmethod
    def of(
        cls,
        caller: str,
        identifier: str,
        after: str | None,
        preferred: int | None,
        most: int,
        usual: int = 0,
        limit: int | None = None,
    ) -> Poll:
        """Return the poll of a client that would wait for `preferred` seconds, and may for `most`.

        None stands for `usual` ones.
        """
        wait = min(usual if preferred is None else preferred, most)
        return cls(caller, identifier, after, wait, bool(wait and preferred), limit)

    def page(self, registry: Registry) -> Page | None:
        """Return the page; None where it is still to be waited for. Raises RequestErrors."""
        page = registry.page(self.identifier, self.after, self.caller, self.limit)
        return None if self.wait and not page.has_news else page

    async def later(self, registry: Registry) -> Page:
        """Return the page that was to be waited for: with news, or when the time is over.

        Raises RequestErrors.
        """
        return await registry.next_page(
            self.identifier, self.after, self.wait, self.caller, self.limit
        )

    def headers(self, page: Page) -> dict[bytes, bytes]:
        """Return the headers that tell when to ask again."""
        if self.asked_to:
            return {b"Preference-Applied": b"wait=%d" % self.wait}
        if self.wait or page.has_news:
            return {}
        return {b"Retry-After": _POLL_AGAIN}

    def link(self, page: Page, base_path: str) -> dict[bytes, bytes]:
        """Return the header that tells for what to ask then, if anything."""
        if page.end is None:
            return {}
        limit = "" if self.limit is None else f"&limit={self.limit}"
        target = f"{base_path}/evaluation/{self.identifier}/events?after={page.end}{limit}"
        link = f'<{target}>; rel="next"'
        return {b"Link": link.encode()}
