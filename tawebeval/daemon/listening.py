"""Where the daemon listens: services, made of what the configuration says."""

from __future__ import annotations

from typing import Any

from twisted.application.internet import StreamServerEndpointService
from twisted.application.strports import service
from twisted.internet.interfaces import IProtocolFactory

from tawebeval.config import Http
from tawebeval.errors import ConfigurationError
from tawebeval.web.server.transport import PromptEndpoint

_SILENCE = 120.0  # seconds for which a client may be unreachable
_ANSWER = 256 * 1024  # bytes of an answer, for which a slow client has as long as the settings say


def listen(
    endpoint: str, factory: IProtocolFactory, reactor: Any, settings: Http
) -> StreamServerEndpointService:
    """Return what listens there once it is started, and then raises where it cannot.

    Raises ConfigurationError for what is no endpoint.
    """
    try:
        listening = service(endpoint, factory, reactor=reactor)
    except LookupError:  # only of systemd's are some there, and others not
        raise ConfigurationError(
            f"listen: {endpoint!r}: there is no such socket from systemd; let a unit open it, as"
            ' tawebeval.socket does, or listen without: ["tcp:8080:interface=127.0.0.1"]'
        ) from None
    except (ValueError, TypeError, OSError) as error:
        raise ConfigurationError(f"listen: {endpoint!r} is no endpoint: {error}") from None
    # To the kernel a client that takes nothing is one that says nothing.
    silence = max(_SILENCE, settings.window + _ANSWER / settings.rate)
    listening.endpoint = PromptEndpoint(listening.endpoint, silence)
    listening.setName(endpoint)
    return listening
