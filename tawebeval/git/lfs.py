"""Files in Git LFS: their pointers in a tree, and their contents on an LFS server.

A pointer is a small text file in the place of a large one. The server of the repository names a URL
for each content (git-lfs, docs/api/batch.md and basic-transfers.md). git-lfs itself would connect
to any address, so the daemon asks and downloads, under the operator's rules for each URL.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import msgspec
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone
from twisted.web.http_headers import Headers
from twisted.web.iweb import IPolicyForHTTPS, IResponse

from tawebeval import __version__
from tawebeval.core.hosts import ServerAddress
from tawebeval.deferreds import Condition, WorkerThreads
from tawebeval.errors import EvaluationFailure
from tawebeval.git.remotes import Credential, RemoteResolver
from tawebeval.linux.filetree import open_directory_nofollow, rename_durably, walk_tree
from tawebeval.pinned_agent import (
    BytesProducer,
    OutgoingRequestFailed,
    PinnedAgent,
    ResponseSizeLimit,
    convert_request_failures,
)

_START = b"version https://git-lfs.github.com/spec/v1\n"
_POINTER = re.compile(re.escape(_START) + rb"oid sha256:([0-9a-f]{64})\nsize ([0-9]{1,15})\n")
_MAX_POINTER = 1024  # bytes (git-lfs, docs/spec.md)
_OBJECTS_PER_REQUEST = 16  # so that an answer with signed URLs has at most 64 KiB
_COPIED_AT_ONCE = 2**20  # bytes
_MEDIA_TYPE = "application/vnd.git-lfs+json"
_USER_AGENT = f"tawebeval/{__version__}"

_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,100}")
_HEADER_VALUE = re.compile(r"[ -~]{0,8192}")
# Headers of the connection, which are not the server's to choose.
_OWN_HEADERS = frozenset(
    (
        *("accept-encoding", "connection", "content-length", "expect", "host", "keep-alive"),
        *("te", "trailer", "transfer-encoding", "upgrade", "user-agent"),
    )
)


@attrs.frozen
class LfsPointer:
    """A file at `path` with the pointer to `object_size`, which itself has `pointer_file_size`."""

    path: str
    oid: str
    object_size: int
    pointer_file_size: int


class _Action(msgspec.Struct):
    href: str
    header: dict[str, str] = {}


class _Actions(msgspec.Struct):
    download: _Action | None = None


class _Object(msgspec.Struct):
    oid: str
    actions: _Actions | None = None  # None with an error, which may repeat a secret


class _Batch(msgspec.Struct):
    objects: list[_Object]
    transfer: str = "basic"


def build_gitattributes_grep_command(oid: str) -> Sequence[str]:
    """Return the git command that exits with 0 if a commit may have converted files, else with 1.

    These are in Git LFS, or get other bytes than committed when git checks them out
    (gitattributes(5)).
    """
    attributes = ("filter=lfs", "eol=crlf", "working-tree-encoding=")
    return (
        *("grep", "--quiet", "--threads=1", "--fixed-strings"),
        *(word for attribute in attributes for word in ("-e", attribute)),
        *(oid, "--", ":(glob)**/.gitattributes"),
    )


def find_lfs_pointers(tree: Path) -> tuple[Sequence[LfsPointer], int]:
    """Return the pointers in a tree, and the bytes of all its files. Blocks.

    Raises: EvaluationFailure for a malformed one, and for two sizes of one content.
    """
    pointers: list[LfsPointer] = []
    size = 0
    top = open_directory_nofollow(tree)
    try:
        for path, status in walk_tree(top):
            if not stat.S_ISDIR(status.st_mode):
                size += status.st_size
            if stat.S_ISREG(status.st_mode) and len(_START) < status.st_size < _MAX_POINTER:
                pointers += _read_pointer(os.path.normpath(path), top)
    finally:
        os.close(top)
    sizes = {one.oid: one.object_size for one in pointers}
    for one in pointers:
        if one.object_size != sizes[one.oid]:
            why = "but another pointer claims another size of the same content"
            raise make_lfs_failure(one.path, why)
    return pointers, size


def add_lfs_object_sizes(size: int, pointers: Sequence[LfsPointer]) -> int:
    """Return the bytes of a tree of `size` bytes once its pointers are replaced."""
    return size + sum(one.object_size - one.pointer_file_size for one in pointers)


def find_missing_lfs_objects(pointers: Sequence[LfsPointer], objects: Path) -> Sequence[LfsPointer]:
    """Return one pointer for each content that the directory `objects` lacks. Blocks.

    A file with another size than in its pointer counts as missing.
    """
    missing = {}
    for one in pointers:
        try:
            is_there = (objects / one.oid).stat().st_size == one.object_size
        except FileNotFoundError:
            is_there = False
        if not is_there:
            missing[one.oid] = one
    return tuple(missing.values())


def replace_lfs_pointers(tree: Path, objects: Path, size: int) -> str | None:
    """Replace the pointers in a tree by the files of the directory `objects`. Blocks.

    `size`: bytes of the tree with these files. Without all of them, each with the size in its
    pointer, or with another sum, the function returns the path of a pointer and replaces none.
    Raises: EvaluationFailure, OSError.
    """
    pointers, found = find_lfs_pointers(tree)
    is_whole = add_lfs_object_sizes(found, pointers) == size
    if missing := find_missing_lfs_objects(pointers, objects) if is_whole else pointers:
        return missing[0].path
    for pointer in pointers:
        flags = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(tree / pointer.path, flags)
        with open(objects / pointer.oid, "rb") as source, open(target, "wb") as file:
            shutil.copyfileobj(source, file, _COPIED_AT_ONCE)
    return None


def make_lfs_failure(path: str, why: str) -> EvaluationFailure:
    """Return the error about a pointer whose file is not there."""
    return EvaluationFailure(
        "repository",
        f"{path!r} is stored in Git LFS, {why}; commit the file itself (`git lfs migrate export`)",
        {"path": path},
    )


def _read_pointer(path: str, top: int) -> Iterator[LfsPointer]:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        content = os.read(file, _MAX_POINTER)
    finally:
        os.close(file)
    if content.startswith(_START):
        found = _POINTER.fullmatch(content)
        if found is None:
            why = "by a pointer that this server does not understand"
            raise make_lfs_failure(path, why)
        yield LfsPointer(path, found[1].decode(), int(found[2]), len(content))


class _BodyReader(Protocol):
    """Reader of a body that pauses the connection until each chunk is taken."""

    transport: Any

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._end: Failure | None = None
        self._changed = Condition()

    def dataReceived(self, data: bytes) -> None:
        self._chunks.append(data)
        self.transport.pauseProducing()
        self._changed.notify()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._end = reason
        self._changed.notify()

    async def read_chunk(self) -> bytes:
        """Return the next bytes, empty at the end. Raises: OutgoingRequestFailed for a cut body."""
        while not self._chunks and self._end is None:
            self.transport.resumeProducing()
            await self._changed.wait()
        if not self._chunks and self._end is not None and not self._end.check(ResponseDone):
            raise OutgoingRequestFailed("the answer is cut, or too long")
        data, self._chunks = b"".join(self._chunks), []
        return data


@attrs.frozen
class LfsClient:
    """Client of the LFS servers of repositories; each request lasts at most `timeout` seconds."""

    _reactor: Any
    _tls_policy: IPolicyForHTTPS
    _threads: WorkerThreads
    _remotes: RemoteResolver
    _timeout: float

    async def download_objects(
        self,
        url: str,
        pointers: Sequence[LfsPointer],
        directory: Path,
        credential: Credential | None = None,
    ) -> None:
        """Download the contents of pointers, of the repository at `url`, into `directory`.

        The files are named by their OIDs; one appears whole or not at all. `credential`: for the
        server of the repository alone. Raises: EvaluationFailure.
        """
        base = url.rstrip("/")
        endpoint = f"{base if base.endswith('.git') else base + '.git'}/info/lfs/objects/batch"
        for start in range(0, len(pointers), _OBJECTS_PER_REQUEST):
            some = {one.oid: one for one in pointers[start : start + _OBJECTS_PER_REQUEST]}
            found = await self._ask(endpoint, tuple(some.values()), credential)
            for pointer in some.values():
                with _name_path(pointer):
                    action = _choose_action(pointer, found)
                    await self._download(url, pointer, action, directory, credential)

    async def _ask(
        self, endpoint: str, pointers: Sequence[LfsPointer], credential: Credential | None
    ) -> Mapping[str, _Object]:
        """Return what the server answers about each object."""
        question = {
            "operation": "download",
            "transfers": ["basic"],
            "objects": [{"oid": one.oid, "size": one.object_size} for one in pointers],
        }
        headers = {"Accept": _MEDIA_TYPE, "Content-Type": _MEDIA_TYPE}
        with _name_path(pointers[0]):
            limit = ResponseSizeLimit()
            response = await self._request(
                b"POST", endpoint, headers, endpoint, credential, limit, question
            )
            content = b""
            with _open_body(response, limit) as body:
                while chunk := await body.read_chunk():
                    content += chunk
            try:
                batch = msgspec.json.decode(content, type=_Batch)
            except (msgspec.DecodeError, RecursionError):
                raise OutgoingRequestFailed("the answer of the LFS server is malformed") from None
            if batch.transfer != "basic":
                raise OutgoingRequestFailed("the LFS server has no basic transfers")
            return {one.oid: one for one in batch.objects}

    async def _download(
        self,
        url: str,
        pointer: LfsPointer,
        action: _Action,
        directory: Path,
        credential: Credential | None,
    ) -> None:
        headers = {
            name: value
            for name, value in action.header.items()
            if _HEADER_NAME.fullmatch(name)
            and _HEADER_VALUE.fullmatch(value)
            and name.lower() not in _OWN_HEADERS
        }
        limit = ResponseSizeLimit()
        response = await self._request(b"GET", action.href, headers, url, credential, limit)
        if response.length != pointer.object_size:
            limit.abort_connection()
            raise OutgoingRequestFailed(f"the server does not announce {pointer.object_size} bytes")
        limit.remaining_bytes += pointer.object_size
        unfinished = directory / f"{pointer.oid}.new"
        file: BinaryIO = await self._threads.run_in_thread(open, unfinished, "wb")
        digest = hashlib.sha256()

        def write(chunk: bytes) -> None:
            digest.update(chunk)
            file.write(chunk)

        try:
            with _open_body(response, limit) as body:
                while chunk := await body.read_chunk():
                    await self._threads.run_in_thread(write, chunk)
            if digest.hexdigest() != pointer.oid:
                raise OutgoingRequestFailed("the server's file has another SHA-256")
        finally:
            await self._threads.run_in_thread(file.close)
        await self._threads.run_in_thread(rename_durably, unfinished, directory / pointer.oid)

    async def _request(
        self,
        method: bytes,
        url: str,
        headers: Mapping[str, str],
        repository: str,
        credential: Credential | None,
        limit: ResponseSizeLimit,
        question: object = None,
    ) -> IResponse:
        """Return the response of a checked server, which has the status 200.

        The server of the URL `repository` gets the credential, unless `headers` have another one.
        """
        target = self._remotes.check_web_url(url)
        addresses = await self._remotes.find_permitted_addresses(target)
        sent = {"User-Agent": _USER_AGENT, **headers}
        if (
            credential is not None
            and target == self._remotes.check_web_url(repository)
            and "authorization" not in map(str.lower, headers)
        ):
            login = credential.make_login(target, addresses)
            if login is not None:
                sent["Authorization"] = login.basic_authorization
        agent = PinnedAgent(
            self._reactor, self._tls_policy, self._timeout, target, addresses, limit
        )
        body = None if question is None else BytesProducer(msgspec.json.encode(question))
        fields = Headers({name: [value] for name, value in sent.items()})
        try:
            with convert_request_failures(target.host):
                response = await agent.request(method, url.encode(), fields, body)
        except ValueError:  # of Twisted, for characters that a URL or a name cannot have
            raise OutgoingRequestFailed(f"the URL for {target.host} is not valid") from None
        if response.code != HTTPStatus.OK:
            limit.abort_connection()
            raise OutgoingRequestFailed(_explain_status(target, response.code))
        return response


def _explain_status(target: ServerAddress, status: int) -> str:
    words = f"{target.host} answered with status {status}"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
        return f"{words}; it has no LFS there, or needs credentials (repositories.credentials)"
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return f"{words}; redirects are not followed: use the new URL of the repository"
    return words


def _choose_action(pointer: LfsPointer, found: Mapping[str, _Object]) -> _Action:
    one = found.get(pointer.oid)
    if one is None or one.actions is None or one.actions.download is None:
        raise OutgoingRequestFailed("the LFS server does not have the file")
    return one.actions.download


@contextmanager
def _name_path(pointer: LfsPointer) -> Iterator[None]:
    """Raise EvaluationFailure, with the path of the pointer, if a request fails."""
    words = f"{pointer.path!r} is stored in Git LFS, and cannot be fetched"
    members = {"path": pointer.path}
    try:
        yield
    except OutgoingRequestFailed as error:
        raise EvaluationFailure("repository", f"{words}: {error}", members) from None
    except EvaluationFailure as error:
        raise attrs.evolve(
            error,
            message=f"{words}: {error.message}",
            extra_members={**error.extra_members, **members},
        ) from None


@contextmanager
def _open_body(response: IResponse, limit: ResponseSizeLimit) -> Iterator[_BodyReader]:
    """Yield the reader of a body, which the limit bounds; close the connection at the end."""
    reader = _BodyReader()
    response.deliverBody(reader)
    try:
        yield reader
    finally:
        limit.abort_connection()
