"""The operator's credentials, read from their files, and the choice of one for a caller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from tawebeval.config import CredentialSettings
from tawebeval.core.hosts import parse_server_address
from tawebeval.errors import ConfigurationError
from tawebeval.git.credentials import Credential, parse_password
from tawebeval.linux.ownership import warn_of_file_readable_by_others
from tawebeval.reloadable import ReloadableFiles

_SETTING = "repositories.credentials"


@attrs.define
class GitKeyring:
    """The credentials of `settings`, in their order.

    `directory`: that of systemd's credentials (LoadCredential=), for file names without one; empty:
    there is none. `key`: the daemon's key, for identities.
    """

    _settings: Sequence[CredentialSettings]
    _directory: str
    _key: bytes = attrs.field(repr=False)
    _credentials: Sequence[Credential] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        """Read the files. Raises ConfigurationError with the name of the setting."""
        self._credentials = self._read()

    def choose_credential(self, url: str, caller: str) -> Credential | None:
        """Return the first credential for the server of `url` that this caller may use.

        Raises: ValueError for an invalid URL.
        """
        target = parse_server_address(url)
        if target is None:
            return None
        return next((one for one in self._credentials if one.is_usable_for(target, caller)), None)

    def derive_credential_id(self, credential: Credential) -> bytes:
        """Return the identity of a credential under the daemon's key."""
        return credential.derive_credential_id(self._key)

    @property
    def secret_files(self) -> Sequence[Path]:
        """All files of the credentials; ssh reads its files again for each fetch."""
        return tuple(
            Path(self._directory, name)
            for entry in self._settings
            for name in (entry.password_file, entry.key_file, entry.known_hosts_file)
            if name
        )

    def list_reloadable_files(self) -> Iterator[ReloadableFiles[Sequence[Credential]]]:
        """Yield the reloadable files; none without credentials."""
        if self._settings:
            yield ReloadableFiles(_SETTING, self.secret_files, self._read, self._apply)

    def _apply(self, credentials: Sequence[Credential]) -> None:
        self._credentials = credentials

    def _read(self) -> Sequence[Credential]:
        return tuple(
            self._credential(entry, f"{_SETTING}[{number}]")
            for number, entry in enumerate(self._settings)
        )

    def _credential(self, entry: CredentialSettings, setting: str) -> Credential:
        password, key, known_hosts = None, "", ""
        if entry.password_file:
            setting += ".password_file"
            path, secret = self._read_file(entry.password_file, setting)
            try:
                password = parse_password(secret)
            except ValueError as error:
                raise ConfigurationError(f"{setting}: {path} {error}") from None
            secret = password.encode()
        else:
            hosts, _ = self._read_file(entry.known_hosts_file, f"{setting}.known_hosts_file")
            path, secret = self._read_file(entry.key_file, f"{setting}.key_file")
            key, known_hosts = str(path), str(hosts)
        return Credential(
            host=entry.host.lower(),
            port=entry.port,
            username=entry.username,
            callers=entry.callers,
            secret_file_content=secret,
            password=password,
            key_file=key,
            known_hosts_file=known_hosts,
        )

    def _read_file(self, name: str, setting: str) -> tuple[Path, bytes]:
        """Return the path and the content of a file."""
        path = Path(name)
        if not path.is_absolute():
            if not self._directory:
                raise ConfigurationError(
                    f"{setting}: {name} is not an absolute path, and systemd passes no credentials"
                    f" (LoadCredential={name}:FILE in the unit)"
                )
            path = Path(self._directory, name)
        try:
            content = path.read_bytes()
            mode = path.stat().st_mode
        except OSError as error:
            raise ConfigurationError(f"{setting}: cannot read {path}: {error.strerror}") from None
        if not content.strip():
            raise ConfigurationError(f"{setting}: {path} is empty")
        if not setting.endswith("known_hosts_file"):
            warn_of_file_readable_by_others(path, mode, setting)
        return path, content
