"""`cli.scratch`: nothing is left behind for ever."""

from __future__ import annotations

import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.scratch import scratch


class ScratchTests(SynchronousTestCase):
    """A directory for temporary files."""

    def setUp(self) -> None:
        self.around = Path(self.mktemp()).resolve()
        self.around.mkdir()
        self.patch(tempfile, "tempdir", str(self.around))

    def test_removed(self) -> None:
        """One goes with its trial."""
        with scratch() as place:
            (place / "a").mkdir()
            self.assertEqual(list(self.around.iterdir()), [place])
        self.assertEqual(list(self.around.iterdir()), [])

    def test_swept(self) -> None:
        """Those that were left go, those of others who work in them stay, and so does all else."""
        left = self.around / "tawebeval-try-x"
        (left / "a").mkdir(parents=True)
        (left / "a").chmod(0)
        kept = self.around / "kept"
        kept.mkdir()
        (self.around / "tawebeval-try-link").symlink_to(kept)
        (self.around / "tawebeval-try-file").touch()
        with scratch() as one, scratch() as other:
            self.assertFalse(left.exists())
            self.assertEqual(
                {path.name for path in self.around.iterdir()},
                {one.name, other.name, "kept", "tawebeval-try-link", "tawebeval-try-file"},
            )
