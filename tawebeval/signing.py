"""The secrets of callers as they are now: read from their file, at the start and again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import attrs

from tawebeval.errors import ConfigurationError
from tawebeval.rereading import Rereading
from tawebeval.secretfiles import find_file, read_secrets, warn_of_strangers
from tawebeval.signatures import Secrets, parse_secrets

_SETTING = "callbacks.secrets"
_CREDENTIAL = "callback-secrets"


@attrs.define
class Signing:
    """Has the secrets of the file at `source`, none without one."""

    source: Path | None = None
    secrets: Secrets = attrs.field(factory=Secrets, init=False)

    def __attrs_post_init__(self) -> None:
        """Read the file. Raises ConfigurationError with the setting, the file and the line."""
        if self.source is not None:
            self.secrets = self._read(self.source)

    def rereadings(self) -> Iterator[Rereading[Secrets]]:
        """Yield what reads the file again; nothing without one."""
        if self.source is not None:
            yield Rereading(_SETTING, (self.source,), partial(self._read, self.source), self._take)

    def _take(self, secrets: Secrets) -> None:
        self.secrets = secrets

    def _read(self, path: Path) -> Secrets:
        try:
            found = read_secrets(path, parse_secrets)
            mode = path.stat().st_mode
        except (ConfigurationError, OSError) as error:
            raise ConfigurationError(f"{_SETTING}: {error}") from None
        warn_of_strangers(path, mode, _SETTING)
        return found


def find_secrets(configured: str, environment: Mapping[str, str]) -> Path:
    """Return where the file of secrets is: as configured, or what systemd hands over.

    Raises ConfigurationError if there is neither.
    """
    found = find_file(configured, _CREDENTIAL, environment)
    if found is not None:
        return found
    raise ConfigurationError(
        f"{_SETTING}: callbacks have to be signed, and no file of secrets is named, nor does"
        f" systemd hand one over (LoadCredential={_CREDENTIAL}:...)"
    )
