"""Routes from URLs to the addresses that git may connect to, and the credentials for servers.

Hosts are looked up once and checked, and connections are pinned to the addresses found.

A credential is for the protocol, host and port of a URL that `core.hosts` has parsed and checked.
What was fetched with a credential is kept apart by the credential's identity, a MAC of all its
parts, so that it is reached with that credential alone.
"""

from __future__ import annotations

import hmac
import os
import posixpath
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from os.path import abspath, realpath
from pathlib import Path
from urllib.parse import quote

import attrs

from tawebeval.config import CredentialSettings
from tawebeval.core.form import check_repository_url
from tawebeval.core.hosts import (
    DEFAULT_PORTS,
    IPAddress,
    ResolvedGitRemote,
    ServerAddress,
    is_public_address,
    matches_host_pattern,
    parse_local_path,
    parse_server_address,
    resolve_git_remote,
)
from tawebeval.errors import ConfigurationError, EvaluationFailure, ForbiddenURLHost, format_size
from tawebeval.linux.filetree import KERNEL_DIRECTORIES
from tawebeval.linux.privileges import (
    ReloadableFiles,
    parse_text_file,
    warn_of_file_readable_by_others,
)
from tawebeval.pinned_agent import MAX_LOOKUP_SECONDS, CheckedResolver, LookupFailed, UnknownHost

MAX_PASSWORD_BYTES = 2048
"""Bytes of a password: with the user name it fits into any pipe at once."""

_WHOLE_LINE = re.compile(r"[^\x00-\x1f\x7f]+")

_SETTING = "repositories.credentials"
_PREFIX = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^/]*/|[^/]*:|/?)(.*)", re.DOTALL)


@attrs.frozen
class Login:
    """A user name and a password, for one server alone.

    `origin`: the server's protocol, host and port, as in `credential.<origin>.helper`.
    """

    origin: str
    _username: str
    _password: str = attrs.field(repr=False)

    @property
    def git_credential_output(self) -> bytes:
        """The answer to git's request for a credential (git-credential(1))."""
        return f"username={self._username}\npassword={self._password}\n".encode()

    @property
    def basic_authorization(self) -> str:
        """The value of the header `Authorization` (RFC 7617)."""
        return "Basic " + b64encode(f"{self._username}:{self._password}".encode()).decode()

    def scrub_password(self, text: str) -> str:
        """Return `text` with stars for the password, plain or encoded as in HTTP."""
        for form in self._forms():
            text = text.replace(form, "***")
        return text

    @property
    def max_encoded_password_bytes(self) -> int:
        """Bytes of the longest form of the password in a text."""
        return max(len(form.encode()) for form in self._forms())

    def _forms(self) -> Sequence[str]:
        pair = f"{self._username}:{self._password}"
        basic = b64encode(pair.encode()).decode()
        return basic, basic.rstrip("="), quote(self._password, safe=""), self._password


@attrs.frozen
class Credential:
    """One entry of `repositories.credentials`, with its secret.

    `host`: a pattern of `HostPolicy`. `port`: 0 is the default port of the protocol.
    `callers`: names of the callers who may use it; empty: all.
    `secret`: the password for HTTP, or the content of `key_file`, which ssh uses with
    `known_hosts_file`.
    """

    host: str
    port: int
    username: str
    callers: Sequence[str]
    secret: str = attrs.field(repr=False)
    key_file: str = ""
    known_hosts_file: str = ""

    def is_usable_for(self, target: ServerAddress, caller: str) -> bool:
        """Tell whether the credential is for this server, and whether the caller may use it."""
        protocols = ("ssh",) if self.key_file else ("https", "http")
        return (
            target.protocol in protocols
            and matches_host_pattern(target.host, self.host)
            and target.port == (self.port or DEFAULT_PORTS[target.protocol])
            and (not self.callers or caller in self.callers)
        )

    def derive_credential_id(self, key: bytes) -> bytes:
        """Return the MAC of the credential under `key`, which reveals nothing of the secret.

        The callers are no part of it: another caller who may use the credential may read what it
        has fetched. A new secret changes the identity, since it may open other repositories.
        """
        named = "\0".join((self.host, str(self.port), self.username, self.key_file))
        return hmac.digest(key, f"{named}\0{self.secret}".encode(), "sha256")

    def make_login(self, target: ServerAddress, addresses: Sequence[IPAddress]) -> Login | None:
        """Return the login for the server at `addresses`, None for a key.

        Raises: EvaluationFailure if the password would cross the internet unencrypted.
        """
        if self.key_file:
            return None
        if target.protocol == "http" and any(map(is_public_address, addresses)):
            raise EvaluationFailure(
                "repository",
                f"the credentials for {target.host} are sent over https only; use an https URL",
            )
        port = "" if target.port == DEFAULT_PORTS[target.protocol] else f":{target.port}"
        return Login(f"{target.protocol}://{target.url_host}{port}", self.username, self.secret)

    @property
    def ssh_files(self) -> Sequence[str]:
        """Files that ssh has to read."""
        return (self.key_file, self.known_hosts_file) if self.key_file else ()

    @property
    def ssh_options(self) -> Sequence[str]:
        """Options of ssh: this user name and key and no other, and a known server only."""
        if not self.key_file:
            return ()
        return (
            "-F/dev/null",
            f"-oUser={self.username}",
            f"-i{self.key_file}",
            "-oIdentitiesOnly=yes",
            "-oIdentityAgent=none",
            f"-oUserKnownHostsFile={self.known_hosts_file}",
            "-oGlobalKnownHostsFile=/dev/null",
            "-oStrictHostKeyChecking=yes",
        )


def parse_password(text: str) -> str:
    """Return the password in a file, without the line end. Raises: ConfigurationError."""
    password = text.removesuffix("\n").removesuffix("\r")
    if not password.strip():
        raise ConfigurationError("is empty")
    if not _WHOLE_LINE.fullmatch(password):
        raise ConfigurationError("has more than one line, or control characters")
    if len(text.encode()) > MAX_PASSWORD_BYTES:
        raise ConfigurationError(f"is over {format_size(MAX_PASSWORD_BYTES)}")
    return password


def _parse_ssh_file(text: str) -> str:
    if not text.strip():
        raise ConfigurationError("is empty")
    return text


@attrs.define
class GitKeyring:
    """The credentials of `settings`, in their order.

    `directory`: that of systemd's credentials (LoadCredential=), for file names without one; empty:
    there is none. `credential_id_key`: the daemon's key, for identities
    of credentials.
    """

    _settings: Sequence[CredentialSettings]
    _directory: str
    credential_id_key: bytes = attrs.field(repr=False)
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

    def list_reloadable_files(self) -> Iterator[ReloadableFiles[Sequence[Credential]]]:
        """Yield the reloadable files; none without credentials."""
        if self._settings:
            # ssh reads its files again for each fetch.
            paths = tuple(
                Path(self._directory, name)
                for entry in self._settings
                for name in (entry.password_file, entry.key_file, entry.known_hosts_file)
                if name
            )
            yield ReloadableFiles(_SETTING, paths, self._read, self._apply)

    def _apply(self, credentials: Sequence[Credential]) -> None:
        self._credentials = credentials

    def _read(self) -> Sequence[Credential]:
        return tuple(
            self._credential(entry, f"{_SETTING}[{number}]")
            for number, entry in enumerate(self._settings)
        )

    def _credential(self, entry: CredentialSettings, setting: str) -> Credential:
        key, known_hosts = "", ""
        if entry.password_file:
            setting += ".password_file"
            _, secret = self._read_file(entry.password_file, setting, parse_password)
        else:
            hosts_setting = f"{setting}.known_hosts_file"
            hosts, _ = self._read_file(entry.known_hosts_file, hosts_setting, _parse_ssh_file)
            path, secret = self._read_file(entry.key_file, f"{setting}.key_file", _parse_ssh_file)
            key, known_hosts = str(path), str(hosts)
        return Credential(
            host=entry.host.lower(),
            port=entry.port,
            username=entry.username,
            callers=entry.callers,
            secret=secret,
            key_file=key,
            known_hosts_file=known_hosts,
        )

    def _read_file(self, name: str, setting: str, parse: Callable[[str], str]) -> tuple[Path, str]:
        """Return the path and the content of a file."""
        path = Path(self._directory, name)
        if not path.is_absolute():
            raise ConfigurationError(
                f"{setting}: {name} is not an absolute path, and systemd passes no credentials"
                f" (LoadCredential={name}:FILE in the unit)"
            )
        try:
            content = parse_text_file(path, parse)
        except ConfigurationError as error:
            raise ConfigurationError(f"{setting}: {error}") from None
        if not setting.endswith("known_hosts_file"):
            warn_of_file_readable_by_others(path, path.stat().st_mode, setting)
        return path, content


@attrs.frozen
class RemoteResolver:
    """The operator's rules for URLs, and the look-up of their hosts.

    `own`: directories of the daemon, from which nobody fetches; absolute, without symbolic links.
    `protocols`: those allowed, by git's names.
    """

    _addresses: CheckedResolver
    _own: Sequence[Path] = ()
    _protocols: Sequence[str] = ("https",)

    def check_url(self, url: str) -> None:
        """Check a URL without a look-up. Raises: EvaluationFailure."""
        self._target(url)

    def is_network_url(self, url: str) -> bool:
        """Return whether a URL leads over a network. Raises: EvaluationFailure, as `check_url`."""
        return self._target(url) is not None

    def resolve_submodule(self, url: str, parent: str) -> str:
        """Return the URL of a submodule of the repository at `parent`, for `check_url`.

        Raises: EvaluationFailure.
        """
        try:
            found = resolve_submodule_url(url, parent)
            check_repository_url(found, self._protocols)
        except ValueError as error:
            raise EvaluationFailure("repository", f"the URL {url!r:.200} {error}") from None
        return found

    def check_web_url(self, url: str) -> ServerAddress:
        """Return the server of a URL over http or https, as far as these are allowed.

        Raises: EvaluationFailure.
        """
        allowed = [each for each in self._protocols if each in ("https", "http")]
        try:
            check_repository_url(url, allowed)
        except ValueError as error:
            shown = url.partition("?")[0]  # a signature may follow
            raise EvaluationFailure("repository", f"the URL {shown!r:.200} {error}") from None
        target = self._target(url)
        assert target is not None, "of a URL with a host"
        return target

    async def find_permitted_addresses(
        self, target: ServerAddress, timeout: float = MAX_LOOKUP_SECONDS
    ) -> Sequence[IPAddress]:
        """Return the permitted addresses of a server. Raises: EvaluationFailure."""
        try:
            return await self._addresses.find_permitted_addresses(target, timeout)
        except (ForbiddenURLHost, UnknownHost) as error:
            raise EvaluationFailure("repository", str(error)) from None
        except LookupFailed as error:
            raise EvaluationFailure("lost", str(error), is_daemon_fault=False) from None

    async def resolve_remote(
        self, url: str, credential: Credential | None = None, timeout: float = MAX_LOOKUP_SECONDS
    ) -> tuple[ResolvedGitRemote, Login | None]:
        """Return the route to a repository, and the login for its server, None without one.

        `timeout`: seconds for the look-up of the host. Raises: EvaluationFailure.
        """
        target = self._target(url)
        if target is None:
            path = parse_local_path(url)
            # git also finds `x.git` by the name `x`.
            return ResolvedGitRemote(
                url, local_path=path, readable_paths=(path, f"{path}.git")
            ), None
        addresses = await self.find_permitted_addresses(target, timeout)
        if credential is None:
            return resolve_git_remote(url, target, addresses), None
        login = credential.make_login(target, addresses)
        found = resolve_git_remote(url, target, addresses, credential.ssh_options)
        return attrs.evolve(found, readable_paths=credential.ssh_files), login

    def check_local_repository(self, path: str) -> None:
        """Check the path of a repository of this machine. Blocks.

        Raises: EvaluationFailure for the daemon's own directories, what is in them or contains
        them, and for an unreadable path, with which git's sandbox would not start.
        """
        names = (path, f"{path}.git")
        for name in names:
            try:
                os.stat(name)
            except (FileNotFoundError, NotADirectoryError):
                pass  # git reports it
            except OSError as error:
                message = f"cannot read the repository {path}: {error.strerror}"
                raise EvaluationFailure("repository", message) from None
        places = [Path(find(name)) for name in names for find in (abspath, realpath)]
        for own in (*self._own, *KERNEL_DIRECTORIES):
            if any(one.is_relative_to(own) or own.is_relative_to(one) for one in places):
                raise EvaluationFailure(
                    "repository",
                    f"{path} is in, or contains, a directory of the daemon or the kernel; move the"
                    " repository",
                )

    def _target(self, url: str) -> ServerAddress | None:
        try:
            target = parse_server_address(url)
        except ValueError as error:
            raise EvaluationFailure("repository", f"the repository's URL {error}") from None
        try:
            if target is not None:
                self._addresses.check_host(target)
        except ForbiddenURLHost as error:
            raise EvaluationFailure("repository", str(error)) from None
        return target


def resolve_submodule_url(url: str, parent: str) -> str:
    """Return the URL of a submodule of the repository at `parent`.

    A relative one begins with `./` or `../` (gitmodules(5)). Raises: ValueError, with a message
    for people.
    """
    if url.startswith(("./", "../")):
        found = _PREFIX.fullmatch(parent)
        assert found is not None, "it matches any text"
        start, path = found.groups()
        joined = posixpath.normpath(posixpath.join(path.rstrip("/"), url))
        if joined.startswith(".."):
            raise ValueError("leads out of its server")
        return start + joined
    # As git does by itself: a network must not choose files of this machine.
    if parse_server_address(url) is None and parse_server_address(parent) is not None:
        raise ValueError("is a path; a repository on a network cannot have one")
    return url
