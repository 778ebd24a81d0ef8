"""Evaluations that outlive the daemon, by a keeper (`linux.keeper`).

The unit of systemd, or whoever starts the daemon, names the keeper's socket in an environment
variable.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from twisted.logger import Logger

from tawebeval.config import Configuration
from tawebeval.deferreds import resolve_run_slot_count
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.evaluations.run_keeper import RunKeeper
from tawebeval.linux.cgroups.manager import find_pids_controller_parent
from tawebeval.linux.keeper_client import KeeperClient
from tawebeval.linux.rlimits import (
    assess_keeper_descriptor_limit,
    assess_keeper_process_limit,
    check_hard_limits,
)
from tawebeval.webhooks.deliveries import DELIVERY_OVERHEAD_BYTES

KEEPER_SOCKET_VARIABLE = "TAWEBEVAL_KEEPER"
"""The environment variable with the path of the keeper's socket."""

log = Logger()


def open_keeper_client(
    configuration: Configuration, environment: Mapping[str, str]
) -> KeeperClient | None:
    """Connect to the keeper; None if evaluations end with the daemon (`service.lasting`). Blocks.

    Raises: OSError, if the keeper does not answer; ConfigurationError, if they must last and
    cannot, if the keeper is of another version, or if its hard limits are too low for evaluators.
    """
    setting = configuration.service.evaluations_outlive_daemon
    path = environment.get(KEEPER_SOCKET_VARIABLE, "")
    if not setting:
        return None
    if setting == "auto" and (not path or configuration.sandbox.kind == "none"):
        return None
    if not path:
        raise ConfigurationError(
            f"service.lasting: no keeper is named ({KEEPER_SOCKET_VARIABLE})",
            "start the daemon by tawebeval.service, or set service.lasting = false",
        )
    if configuration.sandbox.kind == "none":
        raise ConfigurationError(
            'service.lasting: evaluations last in a sandbox only, and sandbox.kind is "none"',
            "set service.lasting = false",
        )
    client = KeeperClient.connect(path)
    try:
        with suppress(PermissionError):
            check_hard_limits(configuration.limits, client.pid)
    except ConfigurationError:
        client.close()
        raise
    return client


def compute_max_journals(configuration: Configuration, environment: Mapping[str, str]) -> int:
    """Return the most journals of evaluations at once; 0 if evaluations end with the daemon."""
    if not (
        configuration.service.evaluations_outlive_daemon and environment.get(KEEPER_SOCKET_VARIABLE)
    ):
        return 0
    settings = configuration.evaluations
    return (
        resolve_run_slot_count(settings.max_running) + settings.max_queued + settings.max_retained
    )


def describe_keeper_limits(
    configuration: Configuration, environment: Mapping[str, str], client: KeeperClient
) -> Iterator[str | SetupProblem]:
    """Yield what the keeper may have and need: a problem where it may have too few. Blocks, hardly.

    What the kernel does not tell is left out.
    """
    callbacks = configuration.callbacks
    others = compute_max_journals(configuration, environment)
    others += callbacks.max_pending_bytes // DELIVERY_OVERHEAD_BYTES if callbacks.is_enabled else 0
    parent = find_pids_controller_parent(client.cgroups)
    with suppress(PermissionError):  # the keeper of another user
        found = {"descriptors": assess_keeper_descriptor_limit(configuration, others, client.pid)}
        if parent is not None:
            found["processes"] = assess_keeper_process_limit(configuration, client.pid, parent)
        for name, assessment in found.items():
            what = f"{name}: {assessment}"
            yield SetupProblem(what, assessment.remedy) if assessment.problems else what


def open_run_keeper(
    configuration: Configuration, environment: Mapping[str, str], reactor: Any
) -> RunKeeper | None:
    """Return the keeper; None if evaluations end with the daemon. Blocks.

    Raises: ConfigurationError, as `open_keeper_client`, or if it must answer and does not.
    """
    try:
        client = open_keeper_client(configuration, environment)
        if client is not None:
            for found in describe_keeper_limits(configuration, environment, client):
                if isinstance(found, SetupProblem):
                    log.warn("the keeper's {problem}", problem=str(found))
            return RunKeeper(client, reactor)
        _drop_bundles(environment)
    except OSError as error:
        what = f"the keeper does not answer: {error.strerror or error}"
        remedy = "start tawebeval-keeper.service"
        # A keeper that is only slow may hold evaluations.
        is_absent = isinstance(error, (FileNotFoundError, ConnectionRefusedError))
        if configuration.service.evaluations_outlive_daemon is True or not is_absent:
            raise ConfigurationError(f"service.lasting: {what}", remedy) from None
        log.warn("evaluations end with the daemon: {what}; {remedy}", what=what, remedy=remedy)
    return None


def _drop_bundles(environment: Mapping[str, str]) -> None:
    """End what an earlier process has left with a keeper that is not used any more. Blocks."""
    path = environment.get(KEEPER_SOCKET_VARIABLE, "")
    if path:
        with suppress(OSError, ConfigurationError):
            client = KeeperClient.connect(path)
            for name, bundle in client.list_bundles().items():
                for descriptor in bundle.descriptors:
                    os.close(descriptor)
                client.drop_bundle(name)
            client.close()
