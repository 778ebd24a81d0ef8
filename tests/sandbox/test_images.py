"""`sandbox.images`: what is read of an image, and what of it is refused."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import os
import tarfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import ConfigurationError
from tawebeval.sandbox import images
from tawebeval.sandbox.images import check_digest, is_path_escape, rewrite_image
from tests.cases.images import DOCKER, OCI, TYPES, ImageBuilder, compress_zstd, pack, save

ONE, TWO = pack({"a/b": b"first"}), pack({"a/c": b"second" * 1000})
MACHINE = {"os": "linux", "architecture": images._architecture()}
OTHER = {"os": "linux", "architecture": "other"}


def digest_of(data: bytes) -> str:
    """Return the digest of data."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class ImageTestCase(SynchronousTestCase):
    """A directory for an image, and one for what is made of it."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).resolve()
        self.folder.mkdir()
        self.builder = ImageBuilder(self.folder / "image")
        self.count = 0
        self.looks = 0

    def look(self) -> None:
        """Count the looks at the disk."""
        self.looks += 1

    def rewrite(self, source: Path, digest: str = "") -> tuple[str, list[bytes]]:
        """Return the digest and the layers of an image."""
        self.count += 1
        target = self.folder / f"target-{self.count}"
        found, files = rewrite_image(source, target, digest, self.look)
        index = json.loads((target / "index.json").read_text())
        self.assertEqual(len(index["manifests"]), 1)
        for file in (target / "blobs" / "sha256").iterdir():
            self.assertEqual(digest_of(file.read_bytes()), f"sha256:{file.name}")
        return found, [file.read_bytes() for file in files]

    def refuse(self, source: Path, digest: str = "") -> str:
        """Return why an image is refused."""
        return str(self.assertRaises(ConfigurationError, self.rewrite, source, digest))

    def extract(self, archive: Path) -> Path:
        """Return a directory with the content of an archive."""
        self.count += 1
        target = self.folder / f"extracted-{self.count}"
        with tarfile.open(archive) as source:
            # Python 3.11.2, Debian's, extracts everything, and knows no argument for that.
            source.extraction_filter = lambda member, path: member
            source.extractall(target)
        return target


class LayoutTests(ImageTestCase):
    """OCI layouts."""

    def test_compressions(self) -> None:
        """Layers of both media types, plain or compressed, are the same when they are rewritten."""
        for kind in TYPES:
            for number, pack_ in enumerate((gzip.compress, compress_zstd, lambda data: data)):
                builder = ImageBuilder(self.folder / f"{kind}{number}", kind)
                manifest = builder.add_image([ONE, TWO, ONE], pack_)
                found = self.rewrite(builder.finish(manifest))
                self.assertEqual(found, (manifest["digest"], [ONE, TWO, ONE]))
        self.assertGreater(self.looks, 0)

    def test_other_compression(self) -> None:
        """What cannot be decompressed is named."""
        source = self.builder.finish(self.builder.add_image([ONE], bz2.compress))
        self.assertIn("is compressed by bzip2; layers can be", self.refuse(source))

    def test_platforms(self) -> None:
        """Of an index the image for this machine is taken, also of an index in it."""
        mine, other = self.builder.add_image([ONE]), self.builder.add_image([TWO])
        for kind in (f"{OCI}.index.v1+json", f"{DOCKER}.distribution.manifest.list.v2+json"):
            listed = [{**other, "platform": OTHER}, {**mine, "platform": MACHINE}]
            content = {"schemaVersion": 2, "mediaType": kind, "manifests": listed}
            index = self.builder.add_json(kind, content)
            self.assertEqual(self.rewrite(self.builder.finish(index)), (index["digest"], [ONE]))
        source = self.builder.finish({**other, "platform": OTHER})
        self.assertIn("has nothing for linux/", self.refuse(source))

    def test_digest(self) -> None:
        """The image with a digest is taken, whatever the index names; another one is refused."""
        one, two = self.builder.add_image([ONE]), self.builder.add_image([TWO])
        source = self.builder.finish(one, two)
        self.assertEqual(self.rewrite(source, two["digest"]), (two["digest"], [TWO]))
        self.assertEqual(self.rewrite(source, one["digest"]), (one["digest"], [ONE]))
        told = self.refuse(source)
        self.assertIn(f"exactly one image: it has {one['digest']}, {two['digest']}", told)
        self.assertIn("--digest", told)
        absent = digest_of(b"")
        self.assertIn(f"no image {absent}: it has {one['digest']}", self.refuse(source, absent))
        for wrong in ("sha256:1", "latest", absent.upper(), f"md5:{absent[-32:]}", f"{absent}\n"):
            self.assertIn("is not the digest of an image", self.refuse(source, wrong))
            self.assertRaises(ConfigurationError, check_digest, wrong)

    def test_changed(self) -> None:
        """A blob with other content than its digest is refused: manifest, configuration, layer."""
        manifest = self.builder.add_image([ONE])
        source = self.builder.finish(manifest)
        for path in sorted((source / "blobs" / "sha256").iterdir()):
            before = path.read_bytes()
            for changed in (before[:-1] + bytes([before[-1] ^ 1]), before[:-1], before + b" "):
                path.write_bytes(changed)
                self.assertIn("the image is broken: ", self.refuse(source, manifest["digest"]))
            path.unlink()
            self.assertIn(path.name, self.refuse(source, manifest["digest"]))
            path.write_bytes(before)

    def test_content_digest(self) -> None:
        """A layer whose content is not that of the configuration is refused."""
        manifest = self.builder.add_image([ONE])
        first = json.loads((self.builder.directory / blob(manifest)).read_text())
        first["layers"] = [self.builder.add(TYPES["oci"][2], gzip.compress(TWO))]
        source = self.builder.finish(self.builder.add_json(TYPES["oci"][0], first))
        self.assertIn(f"is {digest_of(TWO)}, not {digest_of(ONE)}", self.refuse(source))

    def test_manifests(self) -> None:
        """What is no image, or two things at once, is refused with the reason."""
        manifest = self.builder.add_image([ONE])
        content = json.loads((self.builder.directory / blob(manifest)).read_text())
        layer = content["layers"][0]
        deep = b"[" * 100_000
        for change, words in (
            ({"manifests": [manifest]}, "both an index and a manifest"),
            ({"mediaType": "text/plain"}, "the media type 'text/plain'"),
            ({"layers": None}, "is not the manifest of an image"),
            ({"layers": [{**layer, "mediaType": "a/b+encrypted"}]}, "'a/b+encrypted'"),
            ({"layers": [layer, layer]}, "it has 2 layers, and 1 in its configuration"),
            ({"layers": [{**layer, "size": 1}]}, "is larger than its manifest says"),
            ({"layers": [{**layer, "size": 10**9}]}, "is smaller than its manifest says"),
            ({"layers": [{**layer, "digest": "sha256:../../x"}]}, "is not a digest"),
            ({"layers": 7}, "Expected `array | null`"),
            ({"config": {**content["config"], "size": 1}}, "bytes, not 1"),
        ):
            other = self.builder.add_json(TYPES["oci"][0], {**content, **change})
            self.assertIn(words, self.refuse(self.builder.finish(other)))
        for data, words in ((deep, "broken"), (b" " * (4 * 2**20 + 1), "larger than 4 MiB")):
            self.builder.finish()
            (self.builder.directory / "index.json").write_bytes(data)
            self.assertIn(words, self.refuse(self.builder.directory))

    def test_nested(self) -> None:
        """Indexes in indexes end."""
        inner = self.builder.add_image([ONE])
        for _ in range(6):
            inner = self.builder.add_json(f"{OCI}.index.v1+json", {"manifests": [inner]})
        self.assertIn("indexes in one another", self.refuse(self.builder.finish(inner)))

    def test_many_layers(self) -> None:
        """There is a limit of layers."""
        source = self.builder.finish(self.builder.add_image([b""] * 501))
        self.assertIn("it has 501 layers; the limit is 500", self.refuse(source))

    def test_files(self) -> None:
        """Nothing is read that is not a regular file of the image."""
        manifest = self.builder.add_image([ONE])
        source = self.builder.finish(manifest)
        path = source / blob(manifest)
        outside = self.folder / "outside"
        path.rename(outside)
        path.symlink_to(outside)
        self.assertIn("leads out of it", self.refuse(source))
        path.unlink()
        os.mkfifo(path)
        self.assertIn("is not a regular file", self.refuse(source))

    def test_disk(self) -> None:
        """The look at the disk ends the work in the middle of a layer."""

        def fail() -> None:
            raise ConfigurationError("full")

        source = self.builder.finish(self.builder.add_image([ONE]))
        target = self.folder / "target"
        self.assertRaises(ConfigurationError, rewrite_image, source, target, "", fail)

    def test_version(self) -> None:
        """A layout of another version is refused."""
        source = self.builder.finish(self.builder.add_image([ONE]))
        (source / "oci-layout").write_text('{"imageLayoutVersion": "2.0.0"}')
        self.assertIn("has the version '2.0.0'", self.refuse(source))


class DockerArchiveTests(ImageTestCase):
    """Archives without an OCI layout, extracted."""

    def test_identifier(self) -> None:
        """The digest is the ID of the image."""
        archive = self.folder / "saved.tar"
        identifier = save(archive, [ONE, TWO])
        source = self.extract(archive)
        self.assertEqual(self.rewrite(source), (identifier, [ONE, TWO]))
        self.assertEqual(self.rewrite(source, identifier), (identifier, [ONE, TWO]))
        told = self.refuse(source, digest_of(b""))
        self.assertIn(f"no image with the ID {digest_of(b'')}: it has {identifier}", told)

    def test_links(self) -> None:
        """A link leads to another layer, and not out of the archive."""
        archive = self.folder / "saved.tar"
        save(archive, [TWO, TWO], linked="../1/layer.tar")
        self.assertEqual(self.rewrite(self.extract(archive))[1], [TWO, TWO])
        for target in ("/etc/hostname", "../../outside"):
            save(archive, [TWO, TWO], linked=target)
            self.assertIn("leads out of it", self.refuse(self.extract(archive)))

    def test_changed(self) -> None:
        """A layer that is not the configuration's is refused; so is a document that is none."""
        archive = self.folder / "saved.tar"
        save(archive, [ONE])
        source = self.extract(archive)
        (source / "0/layer.tar").write_bytes(TWO)
        self.assertIn(f"not {digest_of(ONE)}", self.refuse(source))
        for content in ("{}", "[]", '[{"Config": "/etc/passwd", "Layers": []}]', "[7]"):
            (source / "manifest.json").write_text(content)
            self.assertNotEqual(self.refuse(source), "")


class WhiteoutTests(SynchronousTestCase):
    """Names of whiteouts."""

    def test_escapes(self) -> None:
        """Those of the directory itself and of the one above are found, however written."""
        for name in (
            ".wh...",
            "./.wh...",
            "a/.wh..",
            "a/b/.wh.",
            ".wh.../",
            "a/.wh.../.",
            ".wh..././",
        ):
            self.assertTrue(is_path_escape(name), name)
        for name in (".wh.a", "a/.wh..wh..opq", "a/..wh...", ".wh.....", "wh...", ".", "a/.wh.b/c"):
            self.assertFalse(is_path_escape(name), name)

    @given(st.text(alphabet="./wha", max_size=12))
    def test_names(self, name: str) -> None:
        """No other name can lead out of its directory."""
        base = os.path.basename(os.path.normpath(name))
        if base.startswith(".wh.") and not is_path_escape(name):
            removed = os.path.normpath(os.path.join("/top/here", base.removeprefix(".wh.")))
            self.assertTrue(removed.startswith("/top/here/"), name)


def blob(descriptor: dict[str, Any]) -> str:
    """Return the file of a blob."""
    return f"blobs/{descriptor['digest'].replace(':', '/')}"
