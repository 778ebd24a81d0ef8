"""Images of containers for tests: OCI layouts, and archives of docker."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"
TYPES = {
    "oci": (f"{OCI}.manifest.v1+json", f"{OCI}.config.v1+json", f"{OCI}.layer.v1.tar+gzip"),
    "docker": (
        f"{DOCKER}.distribution.manifest.v2+json",
        f"{DOCKER}.container.image.v1+json",
        f"{DOCKER}.image.rootfs.diff.tar.gzip",
    ),
}


def pack(members: Mapping[str, bytes | None], source: Path | None = None) -> bytes:
    """Return a layer of the files of a directory and of these; None stands for a directory."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        if source is not None:
            archive.add(source, ".")
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.mode, member.size = 0o755, len(content or b"")
            archive.addfile(member, io.BytesIO(content or b""))
    return target.getvalue()


class ImageBuilder:
    """A directory that becomes an OCI layout."""

    def __init__(self, directory: Path, kind: str = "oci") -> None:
        self.directory = directory
        self.types = TYPES[kind]
        (directory / "blobs" / "sha256").mkdir(parents=True)
        (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def add(self, media_type: str, data: bytes) -> dict[str, Any]:
        """Add a blob; return its descriptor."""
        name = hashlib.sha256(data).hexdigest()
        (self.directory / "blobs" / "sha256" / name).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{name}", "size": len(data)}

    def add_json(self, media_type: str, content: object) -> dict[str, Any]:
        """Add a document; return its descriptor."""
        return self.add(media_type, json.dumps(content).encode())

    def add_image(self, layers: Sequence[bytes], pack_: Any = gzip.compress) -> dict[str, Any]:
        """Add an image of these layers, compressed by `pack_`; return its manifest's descriptor."""
        manifest_type, config_type, layer_type = self.types
        names = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
        rootfs = {"type": "layers", "diff_ids": names}
        config = self.add_json(
            config_type, {"architecture": "any", "os": "linux", "rootfs": rootfs}
        )
        manifest = {
            "schemaVersion": 2,
            "mediaType": manifest_type,
            "config": config,
            "layers": [self.add(layer_type, pack_(layer)) for layer in layers],
        }
        return self.add_json(manifest_type, manifest)

    def finish(self, *manifests: Mapping[str, Any]) -> Path:
        """Write the index; return the directory."""
        index = {"schemaVersion": 2, "manifests": manifests}
        (self.directory / "index.json").write_text(json.dumps(index))
        return self.directory

    def archive(self, path: Path, prefix: str = "") -> Path:
        """Return an archive of the layout, whose names have a prefix."""
        with tarfile.open(path, "w") as archive:
            for name in ("blobs", "index.json", "oci-layout"):
                archive.add(self.directory / name, f"{prefix}{name}")
        return path


def save(path: Path, layers: Sequence[bytes]) -> str:
    """Write an archive as older versions of docker do; return the ID of the image."""
    names = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    config = json.dumps({"rootfs": {"type": "layers", "diff_ids": names}}).encode()
    identifier = hashlib.sha256(config).hexdigest()
    files = {f"{number}/layer.tar": layer for number, layer in enumerate(layers)}
    listed = [{"Config": f"{identifier}.json", "RepoTags": None, "Layers": list(files)}]
    files |= {f"{identifier}.json": config, "manifest.json": json.dumps(listed).encode()}
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return f"sha256:{identifier}"


def compress_zstd(data: bytes) -> bytes:
    """Return data as several frames of zstd, as some programs write them."""
    half = len(data) // 2
    return zstandard.compress(data[:half]) + zstandard.compress(data[half:])
