"""The secrets file: its location and its present content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import attrs

from tawebeval.errors import ConfigurationError
from tawebeval.linux.ownership import find_secret_file, read_secret_file, warn_of_readable_file
from tawebeval.reloadable import Reloadable
from tawebeval.webhooks.signatures import SigningSecrets, parse_secrets

_SETTING = "callbacks.secrets"
_CREDENTIAL = "callback-secrets"


@attrs.define
class SigningSecretsFile:
    """The secrets in the file at `path`, which a reload reads again. Without a path no secrets."""

    path: Path | None = None
    current_secrets: SigningSecrets = attrs.field(factory=SigningSecrets, init=False)

    def __attrs_post_init__(self) -> None:
        """Read the file. Blocks. Raises: ConfigurationError."""
        if self.path is not None:
            self.current_secrets = read_signing_secrets(self.path)

    def list_reloadables(self) -> Iterator[Reloadable[SigningSecrets]]:
        """Yield the secrets file, if there is one."""
        if self.path is not None:
            read = partial(read_signing_secrets, self.path)
            yield Reloadable(_SETTING, (self.path,), read, self._apply)

    def _apply(self, secrets: SigningSecrets) -> None:
        self.current_secrets = secrets


def read_signing_secrets(path: Path) -> SigningSecrets:
    """Read the secrets in a file. Blocks.

    Log a warning if every user can read the file. Raises: ConfigurationError, which names the
    setting, the file and the line.
    """
    try:
        found = read_secret_file(path, parse_secrets)
        mode = path.stat().st_mode
    except (ConfigurationError, OSError) as error:
        raise ConfigurationError(f"{_SETTING}: {error}") from None
    warn_of_readable_file(path, mode, _SETTING)
    return found


def find_secrets_file(configured: str, environment: Mapping[str, str]) -> Path:
    """Return the path of the secrets file: `configured`, or if that is empty systemd's credential.

    `environment` is that of the daemon. Raises: ConfigurationError, if there is neither.
    """
    found = find_secret_file(configured, _CREDENTIAL, environment)
    if found is not None:
        return found
    raise ConfigurationError(
        f"{_SETTING}: callbacks need a file of secrets; set {_SETTING}, or"
        f" LoadCredential={_CREDENTIAL}:FILE in the unit"
    )
