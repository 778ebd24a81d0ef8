"""Imports of images of containers, by skopeo and umoci in the sandbox; attacks by images."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tawebeval.errors import ConfigurationError
from tawebeval.linux.filetree import remove_tree
from tawebeval.sandbox.environment_store import EnvironmentStore, StoredRoot
from tests.cases.images import OCI, ImageBuilder, compress_zstd, pack, save
from tests.cases.roots import make_root


class ImageTests(SynchronousTestCase):
    """A store, and the layers of an image with a minimal root."""

    def setUp(self) -> None:
        lacking = [name for name in ("skopeo", "umoci") if shutil.which(name) is None]
        if lacking:
            raise SkipTest(f"without {', '.join(lacking)}")
        self.folder = Path(self.mktemp()).resolve()
        self.folder.mkdir()
        self.addCleanup(remove_tree, self.folder)
        self.store = EnvironmentStore(self.folder / "store")
        self.source = make_root(self.folder / "source")
        # The second layer removes a file, and all others of a directory.
        self.layers = [
            pack({"usr/old": b"old", "opt/tool/old": b"old"}, self.source),
            pack({"usr/.wh.old": b"", "opt/tool/.wh..wh..opq": b"", "opt/tool/new": b"new"}),
        ]

    def builder(self, name: str, kind: str = "oci") -> ImageBuilder:
        """Return a new builder."""
        return ImageBuilder(self.folder / name, kind)

    def check(self, root: StoredRoot, digest: str) -> None:
        """Check what an import of the layers has made."""
        self.assertEqual(root.image_digest, digest)
        self.assertTrue((root.path / "usr/bin/dash").is_file())
        self.assertEqual(os.listdir(root.path / "opt/tool"), ["new"])
        self.assertFalse((root.path / "usr/old").exists())

    def test_kinds(self) -> None:
        """Layouts, archives of them and of docker, of both media types, give the same root."""
        roots = []
        for kind, pack_ in (("oci", None), ("docker", None), ("oci", compress_zstd)):
            builder = self.builder(f"{kind}{len(roots)}", kind)
            words = [] if pack_ is None else [pack_]
            manifest = builder.add_image(self.layers, *words)
            layout, digest = builder.finish(manifest), manifest["digest"]
            archives = [
                builder.archive(self.folder / f"{prefix}{len(roots)}.tar", prefix and "./")
                for prefix in ("", "dotted")
            ]
            for source in (layout, *archives):
                root = self.store.import_root(source, digest)
                self.check(root, digest)
                roots.append(root)
        saved = self.folder / "saved.tar"
        identifier = save(saved, self.layers)
        compressed = self.folder / "saved.tar.gz"
        compressed.write_bytes(gzip.compress(saved.read_bytes()))
        for source in (saved, compressed):
            roots.append(self.store.import_root(source, identifier))
            self.check(roots[-1], identifier)
        self.assertEqual(len({root.path for root in roots}), 1)
        self.assertEqual([root.was_added for root in roots].count(True), 1)
        error = self.assertRaises(
            ConfigurationError, self.store.import_root, saved, f"sha256:{64 * '0'}"
        )
        self.assertIn(f"no image sha256:{64 * '0'} (available: {identifier}", str(error))

    def test_other_programs(self) -> None:
        """Images that skopeo and umoci have written are imported, as each kind of archive."""
        image = self.folder / "image"
        for command in (
            f"umoci init --layout {image}",
            f"umoci new --image {image}:a",
            f"umoci insert --rootless --image {image}:a {self.source} /",
            f"skopeo --insecure-policy copy -q oci:{image}:a docker-archive:{image}.tar:a:latest",
            f"skopeo --insecure-policy copy -q oci:{image}:a oci-archive:{image}.oci.tar:a",
        ):
            subprocess.run(command.split(), check=True, capture_output=True)
        sources = (image, image.with_suffix(".tar"), image.with_suffix(".oci.tar"))
        roots = [self.store.import_root(source) for source in sources]
        self.assertEqual(len({root.path for root in roots}), 1)

    def test_docker_lists(self) -> None:
        """Of several images the wanted one is imported, unless one of them is broken."""
        saved, other = self.folder / "saved.tar", self.folder / "other.tar"
        save(other, [self.layers[0]])
        identifier = save(saved, self.layers)
        content = self.folder / "content"
        content.mkdir()
        listed = []
        for archive in (other, saved):
            subprocess.run(("tar", "--extract", f"--file={archive}", "-C", content), check=True)
            listed += json.loads((content / "manifest.json").read_text())

        def import_images(*images: object) -> StoredRoot:
            (content / "manifest.json").write_text(json.dumps(images))
            shutil.make_archive(str(self.folder / "several"), "tar", content)
            return self.store.import_root(self.folder / "several.tar", identifier)

        self.check(import_images(*listed), identifier)
        for images, told in (
            ([*listed, listed[0] | {"Config": "missing"}], "skopeo failed: "),
            ([], "(available: none)"),
        ):
            error = self.assertRaises(ConfigurationError, import_images, *images)
            self.assertIn(told, str(error))

    def test_docker_disk(self) -> None:
        """An archive of docker that grows without end stops when the disk is nearly full."""
        content, source = self.folder / "content", self.folder / "large.tar.gz"
        content.mkdir()
        (content / "manifest.json").write_text("[{}]")
        with (content / "layer").open("wb") as file:
            file.truncate(2**40)
        command = ("tar", "--create", "--sparse", "--gzip", f"--file={source}", "-C", content, ".")
        subprocess.run(command, check=True)
        self.store = EnvironmentStore(self.folder / "store", 2**60)
        error = self.assertRaises(ConfigurationError, self.store.import_root, source)
        self.assertIn("does not fit on the disk", str(error))

    def test_whiteouts_outside(self) -> None:
        """A whiteout of the directory above fails; nothing outside is removed, nothing is left."""
        outside = self.folder / "store" / "kept"
        outside.parent.mkdir()
        outside.touch()
        for name in (".wh...", ".wh..", "./.wh.../.", "usr/../.wh...", "usr/.wh.."):
            builder = self.builder(f"image{len(list(self.folder.iterdir()))}")
            layout = builder.finish(builder.add_image([self.layers[0], pack({name: b""})]))
            error = self.assertRaises(ConfigurationError, self.store.import_root, layout)
            self.assertIn("umoci failed: ", str(error))
            self.assertEqual(os.listdir(self.store.directory), ["kept"])

    def test_layers_outside(self) -> None:
        """No path and no link of a layer leads out of the root."""
        outside = self.folder / "outside"
        outside.mkdir()
        link = self.folder / "link.tar"
        with tarfile.open(link, "w") as archive:
            member = tarfile.TarInfo("out")
            member.type, member.linkname = tarfile.SYMTYPE, str(outside)
            archive.addfile(member)
        members = {"../../../up": b"x", "out/through": b"x", "out/.wh.other": b""}
        layers = [self.layers[0], link.read_bytes(), pack(members)]
        builder = self.builder("image")
        layout = builder.finish(builder.add_image(layers))
        try:
            self.store.import_root(layout)
        except ConfigurationError as error:
            self.assertIn("umoci failed: ", str(error))
        self.assertEqual(os.listdir(outside), [])
        self.assertFalse((self.folder / "up").exists())

    def test_changed(self) -> None:
        """A blob with other content than its digest is refused, of an image in an index, too."""
        builder = self.builder("image")
        manifest = builder.add_image(self.layers[:1])
        index = builder.add_json(
            f"{OCI}.index.v1+json", {"schemaVersion": 2, "manifests": [manifest]}
        )
        layout = builder.finish(index)
        for path in sorted((layout / "blobs" / "sha256").iterdir()):
            before = path.read_bytes()
            path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
            self.assertRaises(ConfigurationError, self.store.import_root, layout)
            path.write_bytes(before)
        self.assertEqual(self.store.import_root(layout).image_digest, index["digest"])

    def test_links(self) -> None:
        """No blob of an image is a file of the machine's."""
        builder = self.builder("image")
        layout = builder.finish(builder.add_image(self.layers[:1]))
        for number, path in enumerate(sorted((layout / "blobs" / "sha256").iterdir())):
            outside = self.folder / f"outside{number}"
            path.rename(outside)
            path.symlink_to(outside)
            self.assertRaises(ConfigurationError, self.store.import_root, layout)
            path.unlink()
            outside.rename(path)

    def test_no_archive(self) -> None:
        """A layer that is no archive is refused."""
        builder = self.builder("image")
        layout = builder.finish(builder.add_image([b"no archive " * 100]))
        error = self.assertRaises(ConfigurationError, self.store.import_root, layout)
        self.assertIn("umoci failed: ", str(error))
