"""Answers that stay the same until the daemon is started again.

Clients may keep them, and ask each time whether they have changed. The content is in memory: a
request costs no look at the disk, and the daemon's user need not be able to read where
tawebeval is installed.
"""

from __future__ import annotations

from hashlib import sha256

import attrs
from twisted.web.http import NOT_MODIFIED
from twisted.web.iweb import IRequest
from werkzeug.http import parse_etags

from tawebeval.web.responses import send
from tawebeval.web.server.headers import JSON


@attrs.frozen
class Fixed:
    """A content, and its entity tag in quotes (RFC 9110, section 8.8.3)."""

    content: bytes = attrs.field(repr=False)
    media_type: bytes = JSON
    entity_tag: str = attrs.field(init=False)

    @entity_tag.default
    def _digest(self) -> str:
        return f'"{sha256(self.content).hexdigest()[:32]}"'

    def send(self, request: IRequest) -> bytes:
        """Answer with the content, or say that the client has it (RFC 9110, section 13.1.2)."""
        body = send(request, self.content, self.media_type)
        request.setHeader(b"Cache-Control", b"no-cache")  # to be kept, and asked for
        request.setHeader(b"ETag", self.entity_tag.encode())
        known = request.requestHeaders.getRawHeaders(b"If-None-Match", [])
        tags = parse_etags(", ".join(value.decode("latin-1") for value in known))
        # Weakly, for a proxy that compresses weakens the tags.
        if not tags.contains_weak(self.entity_tag.strip('"')):
            return body
        request.setResponseCode(NOT_MODIFIED)
        return b""
