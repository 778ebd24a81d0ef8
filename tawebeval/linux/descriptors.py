"""File descriptors: how many the settings need, and how many there may be.

Where connections could take all of them no evaluation could begin, and Twisted would close what it
cannot serve without a word. So there may be as many connections as leave enough for the rest; those
beyond are told.
"""

from __future__ import annotations

import resource

import msgspec
from twisted.logger import Logger

from tawebeval.admission import count_places
from tawebeval.config import Configuration
from tawebeval.errors import ConfigurationError

_OF_EVALUATION = 9  # pipes, pidfd, files of its sandbox, tree; and git's beside them
_OF_FETCH = 6  # pipes, pidfd, a filter of the sandbox, a password
_SPARE = 128  # the daemon's own, and connections that are just being refused
_FEWEST = 16  # connections: with fewer there is no use in a start

log = Logger()


def needed(configuration: Configuration) -> int:
    """Return how many descriptors the daemon may need at the same time."""
    return configuration.http.connections + _besides(configuration)


def _besides(configuration: Configuration) -> int:
    """Return how many of these are for other things than connections.

    Callbacks count also where they are disabled: enabling them takes no connections away.
    """
    running = count_places(configuration.evaluations.running)
    fetches = configuration.repositories.fetches * _OF_FETCH
    return running * _OF_EVALUATION + fetches + configuration.callbacks.at_once + _SPARE


def allowed() -> int:
    """Return how many this process may have, once it has raised its limit as far as it may."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return hard if hard != resource.RLIM_INFINITY else 2**31 - 1


def raise_limit() -> None:
    """Let this process have as many as it may: a soft limit is for programs that use select(2)."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fit(configuration: Configuration) -> Configuration:
    """Return it with as many connections as descriptors are for; fewer are told in the log.

    Raises ConfigurationError where they do not do for what else there is.
    """
    there, wanted = allowed(), needed(configuration)
    check(configuration)
    if there >= wanted:
        return configuration
    most = there - _besides(configuration)
    log.warn(
        "descriptors: {there} are allowed here, and {wanted} may be needed: there may be {most} "
        "connections, in place of http.connections = {connections}; {remedy}",
        there=there,
        wanted=wanted,
        most=most,
        connections=configuration.http.connections,
        remedy=remedy(wanted),
    )
    http = msgspec.structs.replace(configuration.http, connections=most)
    return msgspec.structs.replace(configuration, http=http)


def check(configuration: Configuration) -> None:
    """Raise ConfigurationError where there are too few beside no more than a few connections."""
    there, fewest = allowed(), _besides(configuration) + _FEWEST
    if there < fewest:
        raise ConfigurationError(
            f"descriptors: {there} are allowed here, and {fewest} are the fewest for so many"
            f" evaluations; LimitNOFILE={needed(configuration)} in the unit (or ulimit -n), or"
            " fewer evaluations.running or callbacks.at_once"
        )


def remedy(wanted: int) -> str:
    """Return what helps where so many may be needed, and are not allowed."""
    return f"LimitNOFILE={wanted} in the unit (or ulimit -n), or fewer http.connections"
