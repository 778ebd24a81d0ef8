"""The secrets of callers as they are now: read from their file, at the start and again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
from twisted.logger import Logger

from tawebeval.errors import ConfigurationError
from tawebeval.secretfiles import find_file, read_secrets, warn_of_strangers
from tawebeval.signatures import Secrets, parse_secrets

_SETTING = "callbacks.secrets"
_CREDENTIAL = "callback-secrets"

log = Logger()


@attrs.define
class Signing:
    """Has the secrets of the file at `source`, none without one."""

    source: Path | None = None
    secrets: Secrets = attrs.field(factory=Secrets, init=False)

    def __attrs_post_init__(self) -> None:
        """Read the file. Raises ConfigurationError with the setting, the file and the line."""
        if self.source is not None:
            self.secrets = self._read(self.source)

    def reload(self) -> ConfigurationError | None:
        """Read the file again. What is wrong with it is logged, and changes nothing.

        It is also returned.
        """
        if self.source is None:
            return None
        try:
            self.secrets = self._read(self.source)
        except ConfigurationError as error:
            log.error("the secrets of callbacks stay as they were: {error}", error=error)  # noqa: TRY400
            return error
        log.info("the secrets of callbacks were read again from {path}", path=self.source)
        return None

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
