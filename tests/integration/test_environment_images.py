"""Imports of images of containers, which skopeo and umoci have made."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tawebeval.linux.filetree import remove_tree
from tawebeval.sandbox.environment_store import EnvironmentStore
from tests.cases.roots import make_root


class ImageTests(SynchronousTestCase):
    """A store, and an image with a minimal root."""

    def test_image(self) -> None:
        """An OCI layout and an archive of docker give the same root."""
        lacking = [name for name in ("skopeo", "umoci") if shutil.which(name) is None]
        if lacking:
            raise SkipTest(f"without {', '.join(lacking)}")
        folder = Path(self.mktemp()).resolve()
        folder.mkdir()
        self.addCleanup(remove_tree, folder)
        source, image = make_root(folder / "source"), folder / "image"
        for command in (
            f"umoci init --layout {image}",
            f"umoci new --image {image}:a",
            f"umoci insert --rootless --image {image}:a {source} /",
            f"skopeo --insecure-policy copy -q oci:{image}:a docker-archive:{image}.tar:a:latest",
        ):
            subprocess.run(command.split(), check=True, capture_output=True)
        store = EnvironmentStore(folder / "store")
        one = store.import_root(image)
        other = store.import_root(image.with_suffix(".tar"))
        self.assertEqual((one.path, other.is_new), (other.path, False))
        self.assertTrue((one.path / "usr/bin/dash").is_file())
