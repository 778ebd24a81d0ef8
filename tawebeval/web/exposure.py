"""Exposure of a daemon without tokens: endpoints and origins that may use it.

Such a daemon runs the programs of anybody who reaches it. So it listens on this machine only, and
refuses requests that a browser sends on behalf of a page of another origin (by `Origin`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import Enum

from tawebeval.errors import ConfigurationError, ForeignPage

_LOOPBACK = re.compile(r"localhost|127\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}|::1")
_PARTS = re.compile(r"(?:[^:\\]|\\.)+", re.DOTALL)
_SETTING = re.compile(r"((?:[^=\\]|\\.)*)=(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[?([^/\]]*?)\]?(?::[0-9]+)?)")
_SAFE_METHODS = (b"GET", b"HEAD", b"OPTIONS")


class Exposure(Enum):
    """The clients that can connect to an endpoint."""

    MACHINE = "programs of this machine"
    UNKNOWN = "whom the operator lets: the socket is opened by somebody else"
    OTHERS = "other machines, as far as can be seen"


def classify_endpoint(endpoint: str) -> Exposure:
    """Return the exposure of one of Twisted's endpoint strings."""
    kind, *arguments = _PARTS.findall(endpoint) or [""]
    if kind == "haproxy":  # a prefix of another endpoint
        return classify_endpoint(endpoint.partition(":")[2])
    if kind == "unix":
        return Exposure.MACHINE
    if kind in ("systemd", "fd"):
        return Exposure.UNKNOWN
    interface = ""
    for argument in arguments:
        setting = _SETTING.fullmatch(argument)
        if setting and _ESCAPED.sub(r"\1", setting[1]) == "interface":  # the last one counts
            interface = _ESCAPED.sub(r"\1", setting[2])
    local = kind in ("tcp", "tcp6", "ssl") and _LOOPBACK.fullmatch(interface)
    return Exposure.MACHINE if local else Exposure.OTHERS


def check_endpoints(endpoints: Iterable[str]) -> list[str]:
    """Return the endpoints whose exposure only the operator knows.

    Raises: ConfigurationError, if other machines may reach a daemon without tokens.
    """
    unknown = []
    for endpoint in endpoints:
        found = classify_endpoint(endpoint)
        if found is Exposure.OTHERS:
            raise ConfigurationError(
                f"listen: other machines can reach {endpoint!r}, and without tokens any of them"
                " could run programs here; set callers.tokens to a file of the lines that"
                " `tawebeval token new NAME` prints, or listen on tcp:8080:interface=127.0.0.1, or"
                " set callers.open = true to admit everybody"
            )
        if found is Exposure.UNKNOWN:
            unknown.append(endpoint)
    return unknown


def check_change(
    method: bytes, origin: str | None, host: str | None, origins: Collection[str]
) -> None:
    """Raise ForeignPage for an unsafe method from a page that is not trusted."""
    if method not in _SAFE_METHODS and not is_trusted_page(origin, host, origins):
        raise ForeignPage(
            f"pages of {origin!r:.80} cannot submit or cancel, as this server has no tokens; the"
            " operator can list the origin in callers.origins"
        )


def check_read(origin: str | None, host: str | None, origins: Collection[str]) -> None:
    """Raise ForeignPage for a page that is not trusted and may not read this response."""
    if not is_trusted_page(origin, host, origins):
        raise ForeignPage(
            f"pages of {origin!r:.80} cannot read this; the operator can list the origin in"
            " callers.origins"
        )


def is_trusted_page(origin: str | None, host: str | None, origins: Collection[str]) -> bool:
    """Tell whether a request is of no browser page, or of a trusted page.

    `origin` and `host` are the headers `Origin` and `Host`. Trusted are pages of this daemon's own
    address, and of `origins` (`*` names none). A request without `Origin` is of no page. The
    address must be a loopback address or localhost: another name may be an attacker's that resolves
    to this machine (DNS rebinding).
    """
    if origin is None or origin in origins:
        return True
    found = _ORIGIN.fullmatch(origin)
    return (
        found is not None
        and found[1] == (host or "").lower()
        and _LOOPBACK.fullmatch(found[2]) is not None
    )
