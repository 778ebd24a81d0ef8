"""What is the daemon's own, and is shown to no evaluator, whatever `sandbox.readable` says."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tawebeval.config import Configuration
from tawebeval.daemon.state import locate
from tawebeval.errors import ConfigurationError
from tawebeval.git.remotes import KERNEL


def check_readable(
    configuration: Configuration, file: str | Path | None, environment: Mapping[str, str]
) -> None:
    """Look whether evaluators would be shown what is not theirs to read. Blocks.

    `file` is the configuration's own, `environment` the daemon's. Raises ConfigurationError for
    a path that is, holds, or lies in something of the daemon's or of the kernel's. Without a
    sandbox nothing is shown, and everything is to be seen.
    """
    sandbox = configuration.sandbox
    if sandbox.kind == "none":
        return
    own = [
        (what, place)
        for what, path in _belongings(configuration, file, environment)
        for place in _places(path)
    ]
    for index, path in enumerate(sandbox.readable):
        for place in _places(path):
            for what, other in own:
                if place.is_relative_to(other) or other.is_relative_to(place):
                    raise ConfigurationError(
                        f"sandbox.readable[{index}]: {path} would show evaluators {what}"
                        f" ({other}); name no more than they need"
                    )


def _belongings(
    configuration: Configuration, file: str | Path | None, environment: Mapping[str, str]
) -> Iterator[tuple[str, str | Path]]:
    """Yield what there is to hide, and where."""
    state, cache = locate(environment)
    yield "the state directory", state
    yield "the cache directory", cache
    if file is not None:
        yield "the configuration", file
    if configuration.callers.tokens:
        yield "the tokens", configuration.callers.tokens
    if configuration.metrics.tokens:
        yield "the tokens of the metrics", configuration.metrics.tokens
    if configuration.callbacks.secrets:
        yield "the secrets of callbacks", configuration.callbacks.secrets
    handed_over = environment.get("CREDENTIALS_DIRECTORY", "")
    if handed_over:
        yield "the credentials that systemd hands over", handed_over
    for entry in configuration.repositories.credentials:
        for name in (entry.password_file, entry.key_file):
            if name:
                yield "a credential", Path(handed_over, name)
    for path in KERNEL:
        yield "what the kernel tells of processes and devices", path


def _places(path: str | Path) -> set[Path]:
    """Return a path as it is written, and as it is without symbolic links."""
    return {Path(os.path.abspath(path)), Path(os.path.realpath(path))}
