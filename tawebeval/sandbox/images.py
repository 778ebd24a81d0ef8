"""Images of containers: which image of a source is imported. Everything here blocks.

skopeo verifies the digests of all that an image consists of, and umoci unpacks it. Both run in a
sandbox (`environment_store`). skopeo takes the digest of a layout's manifest for granted, so it is
verified here.

Source: the OCI image specification 1.1 (image-layout.md, image-index.md, manifest.md).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from tawebeval.errors import ConfigurationError, format_size
from tawebeval.linux.filetree import open_regular_file

OCI_LAYOUT_FILE = "oci-layout"
"""The file that an OCI layout has in its top directory."""
DOCKER_MANIFEST_FILE = "manifest.json"
"""The file that an archive of docker has there."""
MAX_JSON_BYTES = 4 * 2**20
"""The maximum bytes of a manifest, index or configuration; registries accept no more."""

_MAX_IMAGES = 16  # of an archive of docker
_MAX_LISTED = 5  # digests in a message
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_INDEX_FILE = "index.json"
_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"

T = TypeVar("T")


class _Descriptor(msgspec.Struct):
    digest: str


class _Index(msgspec.Struct):
    manifests: list[_Descriptor]


class _Manifest(msgspec.Struct, rename="camel"):
    """A manifest or an index: whichever its members make it."""

    media_type: str = ""
    manifests: list[_Descriptor] | None = None


class _DockerImage(msgspec.Struct):
    """One of an archive of docker; its members are for skopeo."""


def check_digest(digest: str) -> None:
    """Raise ConfigurationError unless `digest` is one that images have."""
    if _DIGEST.fullmatch(digest) is None:
        raise ConfigurationError(
            f"{digest!r} is not the digest of an image",
            "write it as sha256:… with 64 hexadecimal digits; `skopeo inspect` prints it",
        )


def choose_digest(listed: Iterable[str], digest: str) -> str:
    """Return the digest of the image to import; `digest` "" takes the only one that is listed.

    Raises: ConfigurationError.
    """
    found = list(dict.fromkeys(listed))
    more = ", ..." if len(found) > _MAX_LISTED else ""
    names = ", ".join(found[:_MAX_LISTED]) + more or "none"
    if digest and digest not in found:
        raise ConfigurationError(
            f"the source has no image {digest} (available: {names})",
            "`skopeo inspect` prints digests, and `docker inspect --format '{{.Id}}' IMAGE` the ID"
            " of an image that `docker save` writes",
        )
    if not digest and len(found) != 1:
        raise ConfigurationError(
            f"the source does not have exactly one image (available: {names})",
            "choose one with --digest",
        )
    return digest or found[0]


def count_docker_images(directory: Path) -> int:
    """Return the number of images of an extracted archive of docker. Raises: ConfigurationError."""
    name = DOCKER_MANIFEST_FILE
    number = len(_decode(list[_DockerImage], name, directory / name))
    if number > _MAX_IMAGES:
        raise ConfigurationError(
            f"the archive has {number} images, more than {_MAX_IMAGES}",
            "save the one to import alone: `docker save IMAGE`",
        )
    return number


def select_image(source: Path, target: Path, digest: str) -> str:
    """Make `target` a layout of one image of the layout `source`, with the blobs of that.

    `digest` is that of a manifest or an index; "" takes the only image. Returns the image's digest.
    Raises: ConfigurationError, OSError.
    """
    listed = [each.digest for each in _decode(_Index, _INDEX_FILE, source / _INDEX_FILE).manifests]
    if digest and (source / _locate_blob(digest)).exists():
        listed.append(digest)  # also of an image that an index of the layout lists
    chosen = choose_digest(listed, digest)
    blob = source / _locate_blob(chosen)
    manifest = _decode(_Manifest, chosen, blob, chosen)
    kind = _MANIFEST_TYPE if manifest.manifests is None else _INDEX_TYPE
    described = {
        "mediaType": manifest.media_type or kind,
        "digest": chosen,
        "size": blob.stat().st_size,
    }
    target.mkdir()
    (target / "blobs").symlink_to(source / "blobs")
    (target / OCI_LAYOUT_FILE).write_text('{"imageLayoutVersion": "1.0.0"}')
    (target / _INDEX_FILE).write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    return chosen


def _locate_blob(digest: str) -> str:
    if _DIGEST.fullmatch(digest) is None:
        raise _broken(f"{digest[:100]!r} is not a digest of SHA-256")
    return f"blobs/{digest.replace(':', '/')}"


def _decode(type_: type[T], name: str, file: Path, digest: str = "") -> T:
    """Return a document of the image, which has this digest unless that is ""."""
    try:
        with open_regular_file(file) as opened:
            data = opened.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise _broken(f"{name} is larger than {format_size(MAX_JSON_BYTES)}")
        if digest and f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise _broken(f"{name} has other content than its digest")
        return msgspec.json.decode(data, type=type_)
    except OSError as error:
        raise _broken(f"{name}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(f"{name}: {error}") from None


def _broken(why: str) -> ConfigurationError:
    return ConfigurationError(f"the image is broken: {why}")
