"""Endpoints: how the daemon listens, who reaches them, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from socket import AF_INET, AF_INET6, IPPROTO_TCP, TCP_USER_TIMEOUT
from typing import Any

import attrs
from twisted.application import strports
from twisted.application.internet import StreamServerEndpointService
from twisted.internet.address import UNIXAddress
from twisted.internet.defer import Deferred
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IListeningPort, IProtocolFactory, IStreamServerEndpoint
from zope.interface import implementer

from tawebeval.config import Configuration, HttpSettings
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.web.auth import LOOPBACK_REGEX

_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104  (compared only)
_MIN_USER_TIMEOUT = 120.0  # seconds for which a client may be unreachable
_LARGE_RESPONSE = 256 * 1024  # bytes, which a client may read slowly
_PARTS = re.compile(r"(?:[^:\\]|\\.)+", re.DOTALL)
_SETTING = re.compile(r"((?:[^=\\]|\\.)*)=(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def build_page_url(endpoint: str, address: Any, base_path: str) -> str:
    """Return the URL of the page at an open endpoint, as a program of this machine reaches it.

    `address` is the port's own address. A UNIX socket stands in the URL as in those of nginx.
    """
    if isinstance(address, UNIXAddress):
        path = (address.name or b"").decode(errors="replace")
        return f"http://unix:{path}:{base_path}/"
    scheme = "https" if endpoint.startswith(("ssl:", "tls:")) else "http"
    host = "localhost" if address.host in _ALL_ADDRESSES else address.host
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{address.port}{base_path}/"


@implementer(IStreamServerEndpoint)
@attrs.define
class ApiEndpoint:
    """An endpoint whose TCP connections end when the client is unreachable.

    The kernel drops a connection of which the client's kernel has not acknowledged sent data for
    `timeout` seconds; its own default is about 15 minutes. `port` is the open port, None before
    `listen`.
    """

    _endpoint: IStreamServerEndpoint
    _timeout: float
    port: IListeningPort | None = attrs.field(default=None, init=False)

    def listen(self, factory: IProtocolFactory) -> Deferred[IListeningPort]:
        """Listen on the endpoint."""
        return self._endpoint.listen(factory).addCallback(self._prepare)

    def _prepare(self, port: Any) -> Any:
        if getattr(port, "addressFamily", None) in (AF_INET, AF_INET6):
            # Accepted sockets inherit the option: no connection costs a system call (tcp(7)).
            port.socket.setsockopt(IPPROTO_TCP, TCP_USER_TIMEOUT, round(self._timeout * 1000))
        self.port = port
        return port


def make_listener(
    endpoint: str, factory: IProtocolFactory, reactor: Any, settings: HttpSettings
) -> StreamServerEndpointService:
    """Return a service that listens at an endpoint.

    Raises: ConfigurationError, for an invalid endpoint. The start of the service raises the
    errors of the endpoint, such as CannotListenError.
    """
    try:
        listening = strports.service(endpoint, factory, reactor=reactor)
    except LookupError:  # raised for `systemd:` endpoints only
        raise ConfigurationError(
            f"listen: systemd passes no socket for {endpoint!r} (LISTEN_FDS); open it in a unit"
            ' such as tawebeval.socket, or set listen = ["tcp:8080:interface=127.0.0.1"]'
        ) from None
    except (ValueError, TypeError, OSError) as error:
        raise ConfigurationError(f"listen: {explain_wrong_endpoint(endpoint, error)}") from None
    # TCP_USER_TIMEOUT cannot tell a client that reads nothing from an unreachable one.
    timeout = max(
        _MIN_USER_TIMEOUT,
        settings.rate_window_seconds + _LARGE_RESPONSE / settings.min_bytes_per_second,
    )
    listening.endpoint = ApiEndpoint(listening.endpoint, timeout)
    listening.setName(endpoint)
    return listening


def explain_wrong_endpoint(endpoint: str, error: Exception) -> str:
    """Return the message about what is no endpoint, from the error of its parser."""
    if isinstance(error, OSError):  # of a certificate or its key
        return f"{endpoint}: cannot read {error.filename}: {error.strerror}"
    why = str(error).partition("invalid literal for int() with base 10: ")[2]
    why = f"{why} is not a port" if why else str(error)
    return (
        f"{endpoint!r} is not an endpoint such as tcp:8080:interface=127.0.0.1 or"
        f" unix:/run/tawebeval/socket:mode=660: {why}"
    )


def explain_listen_error(error: Exception) -> str:
    """Return why an endpoint cannot be opened, with the remedy."""
    cause = error.socketError if isinstance(error, CannotListenError) else error
    reason = cause.strerror or cause if isinstance(cause, OSError) else error
    return f"{reason}; choose another endpoint by --listen or the setting listen"


def is_local_endpoint(endpoint: str) -> bool | None:
    """Return whether only programs of this machine can connect to an endpoint string.

    None: only the operator knows, since somebody else opens the socket.
    """
    kind, *arguments = _PARTS.findall(endpoint) or [""]
    if kind in ("systemd", "fd"):
        return None
    interface = ""
    for argument in arguments:
        setting = _SETTING.fullmatch(argument)
        if setting and _ESCAPED.sub(r"\1", setting[1]) == "interface":  # the last one counts
            interface = _ESCAPED.sub(r"\1", setting[2])
    is_loopback = kind in ("tcp", "tcp6", "ssl") and LOOPBACK_REGEX.fullmatch(interface) is not None
    return kind == "unix" or is_loopback


def find_exposed_endpoints(configuration: Configuration) -> Iterator[SetupProblem]:
    """Yield the endpoints by which anybody may reach a daemon without tokens, as problems.

    Raises: ConfigurationError, for an endpoint that other machines reach, unless `callers.open`.
    """
    if configuration.callers.open:
        yield SetupProblem(
            "no tokens, and callers.open is true: everybody who can connect may run programs here",
            "run `tawebeval token add NAME`, set callers.tokens, and remove callers.open",
        )
        return
    for endpoint in configuration.listen:
        is_local = is_local_endpoint(endpoint)
        if is_local is False:
            raise ConfigurationError(
                f"listen: other machines can reach {endpoint!r}, and without tokens any of them"
                " could run programs here; set callers.tokens to a file that"
                " `tawebeval token add NAME` writes, or listen on tcp:8080:interface=127.0.0.1, or"
                " set callers.open = true to admit everybody"
            )
        if is_local is None:
            yield SetupProblem(
                f"no tokens (callers.tokens): everybody who reaches the socket of {endpoint} may"
                " run programs here",
                "run `tawebeval token add NAME`, and set callers.tokens",
            )
