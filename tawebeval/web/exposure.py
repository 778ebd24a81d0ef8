"""A daemon without tokens does what anybody asks; here is who may be able to ask.

Two ways lead to it: through the network, so that it listens on this machine only, and through
a browser on this machine, which sends what the page of a stranger wants. Browsers say
by `Origin` whose page it is that posts.
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
    """Who can connect to an endpoint."""

    MACHINE = "programs of this machine"
    UNKNOWN = "whom the operator lets: the socket is opened by somebody else"
    OTHERS = "other machines, as far as can be seen"


def exposure_of(endpoint: str) -> Exposure:
    """Tell who can connect to one of Twisted's endpoint strings."""
    kind, *arguments = _PARTS.findall(endpoint) or [""]
    if kind == "haproxy":  # what follows is an endpoint of its own
        return exposure_of(endpoint.partition(":")[2])
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
    """Return the endpoints of which it is the operator's affair who reaches them.

    Raises ConfigurationError where other machines may reach a daemon without tokens.
    """
    unknown = []
    for endpoint in endpoints:
        found = exposure_of(endpoint)
        if found is Exposure.OTHERS:
            raise ConfigurationError(
                f"listen: {endpoint!r} may be reached from other machines, and there are no "
                "tokens: whoever reaches it could run programs here; name a file of tokens "
                '([callers] tokens = "/etc/tawebeval/tokens", with what `tawebeval token new NAME` '
                "prints), or listen on this machine only (tcp:8080:interface=127.0.0.1), or write "
                "[callers] open = true if everybody shall"
            )
        if found is Exposure.UNKNOWN:
            unknown.append(endpoint)
    return unknown


def check_change(
    method: bytes, origin: str | None, host: str | None, origins: Collection[str]
) -> None:
    """Raise ForeignPage for a method that changes something, from a page that is not ours."""
    if method not in _SAFE_METHODS and not is_ours(origin, host, origins):
        raise ForeignPage(
            "pages of another origin may change nothing where callers have no tokens; "
            "the operator can name the origin in [callers] origins"
        )


def check_reading(origin: str | None, host: str | None, origins: Collection[str]) -> None:
    """Raise ForeignPage for a page that is not ours, and wants to read what not all may."""
    if not is_ours(origin, host, origins):
        raise ForeignPage(
            "pages of another origin may not read this; "
            "the operator can name the origin in [callers] origins"
        )


def is_ours(origin: str | None, host: str | None, origins: Collection[str]) -> bool:
    """Tell whether it is no stranger's page that asks; `origin` and `host` are those headers.

    Ours are pages that this daemon's own address has served, and those of the `origins` that
    are named; `*` names nobody. Without `Origin` it is no page of a browser that asks. The
    address must be one that only this machine can have: another name may be a stranger's, who
    lets it lead to this machine.
    """
    if origin is None or origin in origins:
        return True
    found = _ORIGIN.fullmatch(origin)
    return (
        found is not None
        and found[1] == (host or "").lower()
        and _LOOPBACK.fullmatch(found[2]) is not None
    )
