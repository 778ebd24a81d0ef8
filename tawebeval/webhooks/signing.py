"""The secrets of callers as they are now: read from their file, at the start and again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import attrs

from tawebeval.config import CallbackSettings
from tawebeval.errors import ConfigurationError
from tawebeval.linux.secretfiles import find_file, read_secrets, warn_of_strangers
from tawebeval.reloadable import Rereading
from tawebeval.webhooks.signatures import Secrets, parse_secrets

_SETTING = "callbacks.secrets"
_CREDENTIAL = "callback-secrets"


@attrs.define
class Signing:
    """Has the secrets that were read last, none at first; `environment` is the daemon's own."""

    _environment: Mapping[str, str]
    secrets: Secrets = attrs.field(factory=Secrets, init=False)

    def rereadings(self, settings: CallbackSettings) -> Iterator[Rereading[Secrets]]:
        """Yield what reads the file that these settings name; nothing without callbacks.

        Raises ConfigurationError if there is no file.
        """
        if settings.enabled:
            path = find_secrets(settings.secrets, self._environment)
            yield Rereading(_SETTING, (path,), partial(read_signing, path), self._take)

    def _take(self, secrets: Secrets) -> None:
        self.secrets = secrets


def read_signing(path: Path) -> Secrets:
    """Return the secrets in a file. Blocks.

    Raises ConfigurationError with the setting, the file and the line.
    """
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
