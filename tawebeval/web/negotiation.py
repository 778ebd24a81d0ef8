"""Which of the offered media types a client is given (RFC 9110, section 12.5.1)."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.web.http_headers import Headers
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from tawebeval.errors import NotAcceptable


def negotiate(headers: Headers, offered: Sequence[str]) -> str:
    """Return the media type that the client likes best; the first one if it does not care.

    For each type the most specific range that matches it counts. Of types that are liked
    equally the one that is named wins over those that are only included, then the earlier.
    Parameters other than `q` make no difference. Raises NotAcceptable.
    """
    ranges = parse_accept_header(
        ", ".join(value.decode("latin-1") for value in headers.getRawHeaders(b"Accept", []))
    )
    if not ranges:
        return offered[0]
    plain = [(media_range.partition(";")[0].strip(), quality) for media_range, quality in ranges]
    found = MIMEAccept(plain).best_match(offered)
    if found is None:
        raise NotAcceptable(
            f"nothing that the request accepts is offered here; there is {', '.join(offered)}",
            offered=", ".join(offered),
        )
    return found
