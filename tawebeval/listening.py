"""Where the daemon listens: services, made of what the configuration says."""

from __future__ import annotations

from typing import Any

from twisted.application.internet import StreamServerEndpointService
from twisted.application.strports import service
from twisted.internet.interfaces import IProtocolFactory

from tawebeval.errors import ConfigurationError
from tawebeval.web.sending import PromptEndpoint


def listen(endpoint: str, factory: IProtocolFactory, reactor: Any) -> StreamServerEndpointService:
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
    listening.endpoint = PromptEndpoint(listening.endpoint)
    listening.setName(endpoint)
    return listening
