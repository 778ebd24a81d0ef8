"""The servers that `tawebeval login` stores, with their tokens in the keyring or in the file."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tawebeval.errors import ConfigurationError

SERVER_NAME_PATTERN = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_SERVICE = "tawebeval"  # of the keyring
_OTHERS_MODE = 0o077


class StoredServer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The URL of a server, and its token unless the keyring has it; None without a token."""

    url: str
    token: str | None = None
    keyring: bool = False

    def read_token(self, server_name: str) -> str | None:
        """Return the token, None without one. Raises: ConfigurationError. Blocks."""
        return Keyring.open().get_token(server_name, self.url) if self.keyring else self.token

    @property
    def storage(self) -> str | None:
        """The place of the token, None without one."""
        if self.keyring:
            return "keyring"
        return "file" if self.token else None


class StoredServers(msgspec.Struct, omit_defaults=True):
    """All stored servers by name. `default` is the name that commands use without `--server`."""

    servers: dict[str, StoredServer] = {}
    default: str | None = None


def locate_server_file(environment: Mapping[str, str]) -> Path:
    """Return the path of the file. Raises: ConfigurationError."""
    folder = environment.get("XDG_CONFIG_HOME", "")
    if not folder.startswith("/"):  # as the XDG Base Directory Specification says
        try:
            folder = str(Path.home() / ".config")
        except RuntimeError:
            raise ConfigurationError("no home directory is known; set HOME") from None
    return Path(folder, "tawebeval", "servers.json")


def read_servers(path: Path) -> StoredServers:
    """Return the servers in a file; none if it does not exist. Blocks.

    Raises: ConfigurationError, also if other users have access to the file.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read()
    except FileNotFoundError:
        return StoredServers()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot read the file: {error.strerror}") from None
    if excess := mode & _OTHERS_MODE:
        raise ConfigurationError(
            f"{path}: other users have access to the file and its tokens"
            f" (mode {mode:04o}, {excess:03o} is too much)",
            f"chmod 600 {path}",
        )
    try:
        return msgspec.json.decode(content, type=StoredServers)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path}: {error}", "mend or remove the file, and run `tawebeval login` again"
        ) from None


@contextmanager
def edit_stored_servers(path: Path) -> Iterator[StoredServers]:
    """Yield the servers in a file, and write them at the end of the block. Blocks.

    No other process changes the file meanwhile. Raises: ConfigurationError.
    """
    path = Path(os.path.realpath(path))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _make_write_error(path, error) from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        servers = read_servers(path)
        yield servers
        try:
            _replace_file(path, msgspec.json.format(msgspec.json.encode(servers), indent=2))
        except OSError as error:
            raise _make_write_error(path, error) from None
    finally:
        os.close(folder)


def _make_write_error(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"{path}: cannot write the file: {error.strerror}")


def _replace_file(path: Path, content: bytes) -> None:
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


class Keyring:
    """The user's keyring, through the package `keyring`.

    The account of a token is the name and the URL of its server. So no token reaches another URL,
    nor another account of the same URL.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    @classmethod
    def open(cls) -> Keyring:
        """Return the keyring. Raises: ConfigurationError, without one. Blocks."""
        try:
            import keyring
        except ImportError:
            raise ConfigurationError(
                "the package keyring is not installed", "pip install 'tawebeval[keyring]'"
            ) from None
        backend = cls._call(keyring.get_keyring)
        if backend.priority <= 0:
            raise ConfigurationError(
                "this session has no keyring", "tawebeval login --storage file URL"
            )
        return cls(backend)

    def get_token(self, name: str, url: str) -> str | None:
        """Return the token of a server. Raises: ConfigurationError. Blocks."""
        token = self._call(self._backend.get_password, _SERVICE, f"{name} {url}")
        if token is None:
            raise ConfigurationError(
                f"the keyring has no token of the server {name}",
                f"tawebeval login --name {name} {url}",
            )
        return str(token)

    def store_token(self, name: str, url: str, token: str) -> None:
        """Store or replace the token of a server. Raises: ConfigurationError. Blocks."""
        self._call(self._backend.set_password, _SERVICE, f"{name} {url}", token)

    def remove_token(self, name: str, url: str) -> None:
        """Remove the token of a server, if there is one. Raises: ConfigurationError. Blocks."""
        if self._call(self._backend.get_password, _SERVICE, f"{name} {url}") is not None:
            self._call(self._backend.delete_password, _SERVICE, f"{name} {url}")

    @staticmethod
    def _call(function: Callable[..., Any], *arguments: str) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001  (backends raise exceptions of their own)
            said = str(error) or type(error).__name__
            raise ConfigurationError(f"the keyring does not answer: {said}") from None
