"""Headers of requests, bounded before any code parses their values.

Clients without a token choose every byte of a header, and the reactor waits for the parser. So all
code reads headers by these functions: a header has at most `MAX_HEADER_BYTES`, and no pattern here
backtracks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from twisted.web.http_headers import Headers

from tawebeval.errors import HeaderTooLarge, format_size

MAX_HEADER_BYTES = 1024
"""Maximum of bytes of a header that the daemon reads, in all its lines together."""

_ELEMENT = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*+"?)++')  # of a list; quotes may have commas
_WEIGHT = re.compile(r"0(?:\.[0-9]*)?|1(?:\.0*)?|\.[0-9]+")  # Java writes .2 (RFC 9110: 0.2)


def get_header_values(headers: Headers, name: str) -> Sequence[bytes]:
    """Return the values of a header, one for each line of it. Raises: HeaderTooLarge."""
    values: Sequence[bytes] | None = headers.getRawHeaders(name.encode())
    if values is None:
        return ()
    size = sum(map(len, values))
    if size > MAX_HEADER_BYTES:
        raise HeaderTooLarge(
            f"{name}: the header has {format_size(size)}; the limit is"
            f" {format_size(MAX_HEADER_BYTES)}"
        )
    return values


def get_header_elements(headers: Headers, name: str) -> list[str]:
    """Return the elements of a header that is a list, without empty ones. Raises: HeaderTooLarge.

    The list may be in one line or in several (RFC 9110, section 5.3).
    """
    values = get_header_values(headers, name)
    return split_elements(b",".join(values)) if values else []


def split_elements(joined: bytes) -> list[str]:
    """Return the elements of a list, without empty ones."""
    found = _ELEMENT.findall(joined.decode("latin-1"))
    return [stripped for each in found if (stripped := each.strip(" \t"))]


def parse_weights(elements: Sequence[str]) -> Mapping[str, float]:
    """Return the weights of the elements of `Accept` or `Accept-Encoding`, by lower-case name.

    Parameters other than `q` are ignored, and elements with an invalid weight. Of a repeated
    element the highest weight counts.
    """
    weights: dict[str, float] = {}
    for element in elements:
        name, *parameters = (part.strip(" \t").lower() for part in element.split(";"))
        weight = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.rstrip(" \t") == "q":
                value = value.lstrip(" \t")
                weight = float(value) if _WEIGHT.fullmatch(value) else -1
        if weight >= 0:
            weights[name] = max(weight, weights.get(name, 0))
    return weights
