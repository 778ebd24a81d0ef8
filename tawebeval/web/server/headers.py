"""Which pages may read an answer in a browser (CORS)."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def share_with(origins: Collection[str], asking: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return the headers of any answer; `asking` are the headers `Origin` of the request.

    With `*` among `origins` everybody may read. Else only one that is named, and then caches
    must not take the answer to one for that to another.
    """
    if "*" in origins:
        return {b"Access-Control-Allow-Origin": b"*"}
    headers = {b"Vary": b"Origin"}
    if len(asking) == 1 and asking[0].decode("latin-1") in origins:
        headers[b"Access-Control-Allow-Origin"] = asking[0]
    return headers
