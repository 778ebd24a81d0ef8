"""Images of containers: the OCI image layout, and the archives of `docker save`.

`rewrite_image` verifies an image by its digests and writes a layout with one image of plain layers,
whatever compression and media types the source has; `umoci` unpacks that. Everything here blocks.

Images come from strangers: nothing is read into memory but JSON of bounded size, no path leads out
of the image, and a digest is that of what is used, not of what was read before.

Sources: the OCI image specification 1.1 (image-layout.md, image-index.md, manifest.md, config.md),
and docker's image specification 1.2 for archives without an `oci-layout`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import attrs
import msgspec
import zstandard

from tawebeval.errors import ConfigurationError, format_size

OCI_LAYOUT_FILE = "oci-layout"
"""The file that an OCI layout has in its top directory."""
DOCKER_MANIFEST_FILE = "manifest.json"
"""The file that an archive of docker has there."""
LAYOUT_IMAGE_NAME = "root"
"""The name of the image in the layout that `rewrite_image` writes."""

_MAX_JSON = 4 * 2**20  # bytes of a manifest, index or configuration; registries accept no more
_MAX_LAYERS = 500  # docker makes up to 127
_MAX_NESTED = 4  # indexes in indexes
_MAX_LISTED = 5  # digests in a message
_PIECE = 2**18  # bytes that are read at once
_WINDOW = 2**27  # bytes: the memory of zstd, beyond which zstd(1) needs --long, too
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_LAYER_TYPE = re.compile(
    r"application/vnd\.oci\.image\.layer\.(nondistributable\.)?v1\.tar(\+gzip|\+zstd)?"
    r"|application/vnd\.docker\.image\.rootfs\.(foreign\.)?diff\.tar(\.gzip|\.zstd)?"
)
_COMPRESSIONS = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x04\x22\x4d\x18": "lz4"}
# Names of architectures in images (GOARCH), where uname(2) has others.
_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "i686": "386",
    "loongarch64": "loong64",
}

T = TypeVar("T")


class _Platform(msgspec.Struct):
    architecture: str = ""
    os: str = ""


class _Descriptor(msgspec.Struct, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    platform: _Platform | None = None


class _Manifest(msgspec.Struct, rename="camel"):
    """A manifest or an index: whichever its members make it."""

    media_type: str = ""
    config: _Descriptor | None = None
    layers: list[_Descriptor] | None = None
    manifests: list[_Descriptor] | None = None


class _RootFiles(msgspec.Struct):
    diff_ids: list[str]


class _ImageConfiguration(msgspec.Struct):
    rootfs: _RootFiles


class _DockerImage(msgspec.Struct, rename="pascal"):
    config: str
    layers: list[str]


@attrs.frozen
class _Layer:
    """A layer: its file in the image, the digests of the file ("" if unknown) and of its content.

    `size` is that of the file in bytes; None if unknown.
    """

    file: str
    digest: str
    size: int | None
    content_digest: str


@attrs.frozen
class _Image:
    digest: str
    layers: Sequence[_Layer]


def check_digest(digest: str) -> None:
    """Raise ConfigurationError unless `digest` is one that images have."""
    if _DIGEST.fullmatch(digest) is None:
        raise ConfigurationError(
            f"{digest!r} is not the digest of an image",
            "write it as sha256:… with 64 hexadecimal digits; `skopeo inspect` prints it",
        )


def is_path_escape(name: str) -> bool:
    """Tell whether the name of a layer's member is a whiteout that names no file.

    A whiteout `.wh.NAME` removes NAME beside it: `.wh...` would remove the directory above.
    """
    base = os.path.basename(os.path.normpath(name))
    return base in (".wh.", ".wh..", ".wh...")


def rewrite_image(
    source: Path, target: Path, digest: str, check_disk: Callable[[], None]
) -> tuple[str, Sequence[Path]]:
    """Verify an image, and write it with plain layers into a new layout at `target`.

    `source` is an OCI layout, or an extracted archive of docker. `digest` is that of the manifest
    or the index, or of the configuration in an archive of docker (the image ID); "" takes the only
    image. `check_disk` is called again and again and raises an exception to end the work.

    Returns the image's digest and the files of the layers. Raises: ConfigurationError, OSError.
    """
    if digest:
        check_digest(digest)
    reader = _ImageReader(source)
    if (source / OCI_LAYOUT_FILE).exists():
        image = reader.read_layout(digest)
    else:
        image = reader.read_docker_archive(digest)
    blobs = target / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    files = []
    for layer in image.layers:
        path = blobs / layer.content_digest.removeprefix("sha256:")
        if not path.exists():
            reader.extract_layer(layer, path, check_disk)
        files.append(path)
    _write_layout(target, files)
    return image.digest, files


def _write_layout(target: Path, files: Sequence[Path]) -> None:
    """Write index, manifest and configuration of our own for these layers."""

    def write(kind: str, content: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(content).encode()
        name = hashlib.sha256(data).hexdigest()
        (target / "blobs" / "sha256" / name).write_bytes(data)
        return describe(kind, name, len(data))

    def describe(kind: str, name: str, size: int) -> dict[str, Any]:
        media_type = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media_type, "digest": f"sha256:{name}", "size": size}

    diff_ids = [f"sha256:{file.name}" for file in files]
    configuration = {
        "architecture": _architecture(),
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    layers = [describe("layer.v1.tar", file.name, file.stat().st_size) for file in files]
    manifest = write(
        "manifest.v1+json",
        {"schemaVersion": 2, "config": write("config.v1+json", configuration), "layers": layers},
    )
    manifest["annotations"] = {"org.opencontainers.image.ref.name": LAYOUT_IMAGE_NAME}
    (target / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    (target / OCI_LAYOUT_FILE).write_text('{"imageLayoutVersion": "1.0.0"}')


def _architecture() -> str:
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


class _ImageReader:
    """The image in a directory of which nothing is trusted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()

    def read_layout(self, digest: str) -> _Image:
        """Return the image of an OCI layout."""
        layout = self._decode(dict[str, Any], OCI_LAYOUT_FILE, self._read(OCI_LAYOUT_FILE))
        version = str(layout.get("imageLayoutVersion", ""))
        if not version.startswith("1."):
            raise _broken(f"{OCI_LAYOUT_FILE} has the version {version!r}, not 1.0.0")
        index = self._decode(_Manifest, "index.json", self._read("index.json"))
        listed = index.manifests or []
        if digest and not os.path.lexists(self._directory / _blob_file(digest)):
            raise ConfigurationError(
                f"the source has no image {digest}: {_enumerate(each.digest for each in listed)}",
                "copy the image with this digest, as by `skopeo copy docker://NAME@DIGEST oci:DIR`",
            )
        found = wanted = digest or _choose(listed).digest
        size: int | None = None
        for _ in range(_MAX_NESTED):
            data = self._read_blob(found, size)
            manifest = self._decode(_Manifest, found, data)
            if manifest.manifests is None:
                return self._read_manifest(manifest, wanted)
            if manifest.layers is not None or manifest.media_type not in ("", *_INDEX_TYPES):
                raise _broken(f"{found} is both an index and a manifest")
            chosen = _choose(manifest.manifests)
            found, size = chosen.digest, chosen.size
        raise _broken(f"it has more than {_MAX_NESTED} indexes in one another")

    def _read_manifest(self, manifest: _Manifest, digest: str) -> _Image:
        if manifest.media_type not in ("", *_MANIFEST_TYPES):
            raise _broken(f"{digest} has the media type {manifest.media_type!r}")
        if manifest.config is None or manifest.layers is None:
            raise _broken(f"{digest} is not the manifest of an image")
        for layer in manifest.layers:
            if _LAYER_TYPE.fullmatch(layer.media_type) is None:
                raise _broken(f"a layer has the media type {layer.media_type!r}")
        configuration = self._read_blob(manifest.config.digest, manifest.config.size)
        diff_ids = self._read_diff_ids(configuration, len(manifest.layers))
        layers = [
            _Layer(_blob_file(layer.digest), layer.digest, layer.size, content_digest)
            for layer, content_digest in zip(manifest.layers, diff_ids, strict=True)
        ]
        return _Image(digest, layers)

    def read_docker_archive(self, digest: str) -> _Image:
        """Return the image of an extracted archive of docker."""
        listed = self._decode(
            list[_DockerImage], DOCKER_MANIFEST_FILE, self._read(DOCKER_MANIFEST_FILE)
        )
        images = {}
        for image in listed[:_MAX_LAYERS]:
            data = self._read(image.config)
            images[f"sha256:{hashlib.sha256(data).hexdigest()}"] = image
        if digest and digest not in images:
            raise ConfigurationError(
                f"the archive has no image with the ID {digest}: {_enumerate(images)}",
                "`docker inspect --format '{{.Id}}' IMAGE` prints it",
            )
        if not digest and len(images) != 1:
            raise _ambiguous(images)
        chosen = digest or next(iter(images))
        image = images[chosen]
        diff_ids = self._read_diff_ids(self._read(image.config), len(image.layers))
        layers = [
            _Layer(name, "", None, content_digest)
            for name, content_digest in zip(image.layers, diff_ids, strict=True)
        ]
        return _Image(chosen, layers)

    def _read_diff_ids(self, configuration: bytes, number: int) -> Sequence[str]:
        decoded = self._decode(_ImageConfiguration, "the configuration", configuration)
        diff_ids = decoded.rootfs.diff_ids
        if len(diff_ids) != number:
            raise _broken(f"it has {number} layers, and {len(diff_ids)} in its configuration")
        if number > _MAX_LAYERS:
            raise _broken(f"it has {number} layers; the limit is {_MAX_LAYERS}")
        for diff_id in diff_ids:
            if _DIGEST.fullmatch(diff_id) is None or not diff_id.startswith("sha256:"):
                raise _broken(f"a layer has the digest {diff_id[:100]!r}, not one of SHA-256")
        return diff_ids

    def extract_layer(self, layer: _Layer, target: Path, check_disk: Callable[[], None]) -> None:
        """Write the tar archive of a layer to `target`, and verify both digests."""
        content = hashlib.sha256()
        with self._open(layer.file) as file, target.open("wb") as output:
            source = _HashingReader(file, layer.digest, layer.size)
            try:
                with _decompress(io.BufferedReader(source, _PIECE), layer.file) as plain:
                    while piece := plain.read(_PIECE):
                        content.update(piece)
                        output.write(piece)
                        check_disk()
                source.finish()
            except (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError) as error:
                raise _broken(f"{layer.file} cannot be decompressed: {error}") from None
        found = f"sha256:{content.hexdigest()}"
        if found != layer.content_digest:
            raise _broken(f"the content of {layer.file} is {found}, not {layer.content_digest}")

    def _read_blob(self, digest: str, size: int | None) -> bytes:
        """Return a verified blob of JSON."""
        file = _blob_file(digest)
        data = self._read(file)
        if size is not None and len(data) != size:
            raise _broken(f"{file} has {len(data)} bytes, not {size}")
        if _hash_of(digest, data).hexdigest() != digest.partition(":")[2]:
            raise _broken(f"{file} has other content than its digest")
        return data

    def _read(self, name: str) -> bytes:
        with self._open(name) as file:
            data = file.read(_MAX_JSON + 1)
        if len(data) > _MAX_JSON:
            raise _broken(f"{name} is larger than {format_size(_MAX_JSON)}")
        return data

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a regular file of the image; archives of docker have links to their layers."""
        path = Path(os.path.realpath(self._directory / name)) if "\0" not in name else None
        if path is None or not path.is_relative_to(self._directory):
            raise _broken(f"{name[:100]!r} leads out of it")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _broken(f"it has no {name[:200]}") from None
        with open(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _broken(f"{name[:200]} is not a regular file")
            yield file

    def _decode(self, type_: type[T], name: str, data: bytes) -> T:
        try:
            return msgspec.json.decode(data, type=type_)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _broken(f"{name}: {error}") from None


class _HashingReader(io.RawIOBase):
    """A file whose digest and size are checked while it is read; "" and None are not checked."""

    def __init__(self, file: IO[bytes], digest: str, size: int | None) -> None:
        self._file = file
        self._digest = digest
        self._hash = _hash_of(digest, b"")
        self._left = size

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer`. Raises: ConfigurationError, for too large a file."""
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._hash.update(data)
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise _broken(f"{_blob_file(self._digest)} is larger than its manifest says")
        return len(data)

    def finish(self) -> None:
        """Read the rest. Raises: ConfigurationError, unless digest and size are right."""
        rest = bytearray(_PIECE)
        while self.readinto(rest):
            pass
        if self._left:
            raise _broken(f"{_blob_file(self._digest)} is smaller than its manifest says")
        if self._digest and self._hash.hexdigest() != self._digest.partition(":")[2]:
            raise _broken(f"{_blob_file(self._digest)} has other content than its digest")


@contextmanager
def _decompress(file: io.BufferedReader, name: str) -> Iterator[IO[bytes]]:
    """Give the content of a layer, whose compression its first bytes tell."""
    head = file.peek(8)
    if head.startswith(b"\x1f\x8b"):
        with gzip.GzipFile(fileobj=file) as plain:
            yield plain  # type: ignore[misc]
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        with decompressor.stream_reader(file, read_across_frames=True, closefd=False) as plain:
            yield plain
    else:
        for magic, compression in _COMPRESSIONS.items():
            if head.startswith(magic):
                raise ConfigurationError(
                    f"{name} is compressed by {compression}; layers can be compressed by gzip or"
                    " zstd",
                    "copy the image by `skopeo copy --dest-compress-format=gzip`",
                )
        yield file


def _choose(descriptors: Sequence[_Descriptor]) -> _Descriptor:
    """Return the only one for this machine."""
    found = {each.digest: each for each in descriptors if _is_for_machine(each.platform)}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise _ambiguous(found)
    raise ConfigurationError(
        f"the image has nothing for linux/{_architecture()}", "choose an image for this machine"
    )


def _is_for_machine(platform_: _Platform | None) -> bool:
    if platform_ is None:
        return True
    return (platform_.os, platform_.architecture) == ("linux", _architecture())


def _hash_of(digest: str, data: bytes) -> Any:
    return hashlib.new(digest.partition(":")[0] or "sha256", data)


def _blob_file(digest: str) -> str:
    if _DIGEST.fullmatch(digest) is None:
        raise _broken(f"{digest[:100]!r} is not a digest of SHA-256 or SHA-512")
    return f"blobs/{digest.replace(':', '/')}"


def _enumerate(digests: Any) -> str:
    listed = list(digests)
    more = ", ..." if len(listed) > _MAX_LISTED else ""
    return f"it has {', '.join(listed[:_MAX_LISTED])}{more}" if listed else "it has none"


def _ambiguous(digests: Any) -> ConfigurationError:
    return ConfigurationError(
        f"the source does not have exactly one image: {_enumerate(digests)}",
        "choose one with --digest",
    )


def _broken(why: str) -> ConfigurationError:
    return ConfigurationError(f"the image is broken: {why}")
