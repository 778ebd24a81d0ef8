"""`sandbox.images`: which image of a layout is imported, and what of it is refused."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import ConfigurationError
from tawebeval.sandbox.images import (
    MAX_JSON_BYTES,
    check_digest,
    choose_digest,
    count_docker_images,
    select_image,
)
from tests.cases.images import DOCKER, OCI, ImageBuilder, pack

ONE, TWO = pack({"a/b": b"first"}), pack({"a/c": b"second" * 1000})
ABSENT = f"sha256:{hashlib.sha256(b'').hexdigest()}"


class LayoutTests(SynchronousTestCase):
    """OCI layouts."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).resolve()
        self.folder.mkdir()
        self.builder = ImageBuilder(self.folder / "image")
        self.count = 0

    def select(self, source: Path, digest: str = "") -> dict[str, Any]:
        """Return the descriptor of the image that is selected."""
        self.count += 1
        target = self.folder / f"target-{self.count}"
        found = select_image(source, target, digest)
        (manifest,) = json.loads((target / "index.json").read_text())["manifests"]
        self.assertEqual(manifest["digest"], found)
        self.assertTrue((target / blob(manifest)).is_file())
        return manifest  # type: ignore[no-any-return]

    def refuse(self, source: Path, digest: str = "") -> str:
        """Return why an image is refused."""
        return str(self.assertRaises(ConfigurationError, self.select, source, digest))

    def test_digest(self) -> None:
        """The image with a digest is taken, whatever the index names; another one is refused."""
        one, two, three = (self.builder.add_image([layer]) for layer in (ONE, TWO, b""))
        source = self.builder.finish(one, two, one)
        for image in (one, two, three):
            self.assertEqual(self.select(source, image["digest"]), image)
        told = self.refuse(source)
        self.assertIn(
            f"exactly one image (available: {one['digest']}, {two['digest']}); choose", told
        )
        self.assertIn("--digest", told)
        told = self.refuse(source, ABSENT)
        self.assertIn(f"no image {ABSENT} (available: {one['digest']}", told)
        self.assertEqual(self.select(self.builder.finish(one, one)), one)
        self.assertIn("(available: none)", self.refuse(self.builder.finish()))

    def test_form(self) -> None:
        """A digest is one of SHA-256, as skopeo prints it."""
        check_digest(ABSENT)
        for wrong in ("sha256:1", "latest", ABSENT.upper(), f"md5:{ABSENT[-32:]}", f"{ABSENT}\n"):
            error = self.assertRaises(ConfigurationError, check_digest, wrong)
            self.assertIn("is not the digest of an image", str(error))

    def test_many(self) -> None:
        """Of many images a few are shown."""
        digests = [f"sha256:{number:064x}" for number in range(9)]
        error = self.assertRaises(ConfigurationError, choose_digest, digests, "")
        self.assertIn(f"{digests[4]}, ...); choose", str(error))

    def test_docker(self) -> None:
        """An archive of docker has a list of a few images."""
        path = self.folder / "manifest.json"
        for number in (0, 16):
            path.write_text(json.dumps([{"Config": "a"}] * number))
            self.assertEqual(count_docker_images(self.folder), number)
        for content, words in (
            (json.dumps([{}] * 17), "the archive has 17 images, more than 16; save"),
            ("{}", "the image is broken: manifest.json: Expected `array`"),
            (" " * (MAX_JSON_BYTES + 1), "manifest.json is larger than 4 MiB"),
        ):
            path.write_text(content)
            error = self.assertRaises(ConfigurationError, count_docker_images, self.folder)
            self.assertIn(words, str(error))

    def test_kinds(self) -> None:
        """A manifest or an index says by its media type, or by its members, which of them it is."""
        manifest = self.builder.add_image([ONE])
        content = json.loads((self.builder.directory / blob(manifest)).read_text())
        index = {"schemaVersion": 2, "manifests": [manifest]}
        old = f"{DOCKER}.distribution.manifest.list.v2+json"
        for document, kind in (
            (content, f"{OCI}.manifest.v1+json"),
            ({**content, "mediaType": ""}, f"{OCI}.manifest.v1+json"),
            (index, f"{OCI}.index.v1+json"),
            ({**index, "mediaType": old}, old),
        ):
            found = self.builder.add_json("text/plain", document)
            selected = self.select(self.builder.finish(found))
            self.assertEqual(selected, {**found, "mediaType": kind})

    def test_broken(self) -> None:
        """What is no document of bounded size with its digest, in the image itself, is refused."""
        manifest = self.builder.add_image([ONE])
        source = self.builder.finish(manifest)
        path, before = source / blob(manifest), (source / blob(manifest)).read_bytes()
        for data, words in (
            (before + b" ", "has other content than its digest"),
            (b" " * (4 * 2**20 + 1), "is larger than 4 MiB"),
        ):
            path.write_bytes(data)
            self.assertIn(f"{manifest['digest']} {words}", self.refuse(source))
        path.rename(self.folder / "outside")
        self.assertIn("No such file", self.refuse(source))
        path.symlink_to(self.folder / "outside")
        self.assertIn("symbolic links", self.refuse(source))
        path.unlink()
        os.mkfifo(path)
        self.assertIn("not a file", self.refuse(source))
        for listed in (b"[" * 100_000, b"{}", b'{"manifests": [7]}', b"\xff"):
            (source / "index.json").write_bytes(listed)
            self.assertIn("the image is broken: index.json: ", self.refuse(source))
        other = self.builder.finish({**manifest, "digest": "sha256:../../x"})
        self.assertIn("'sha256:../../x' is not a digest", self.refuse(other))


def blob(descriptor: dict[str, Any]) -> str:
    """Return the file of a blob."""
    return f"blobs/{descriptor['digest'].replace(':', '/')}"
