"""docs/gallery.md: what commands show in a terminal."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.cases.patience import PATIENCE
from tests.run import ROOT

GALLERY = ROOT / "docs" / "gallery.md"


class GalleryTests(SynchronousTestCase):
    maxDiff = None

    def test_gallery_shows_what_the_commands_print(self) -> None:
        copy = Path(self.mktemp())
        shutil.copy(GALLERY, copy)
        script = [sys.executable, str(ROOT / "scripts" / "recordings"), str(copy)]
        subprocess.run(script, check=True, timeout=PATIENCE)
        self.assertEqual(copy.read_text(), GALLERY.read_text())
