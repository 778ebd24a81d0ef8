"""`cli.try_command`: the directory in place of a repository."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli import main


class DirectoryTests(SynchronousTestCase):
    def test_path_that_is_no_directory_is_named(self) -> None:
        root = Path(self.mktemp())
        root.mkdir()
        (root / "loop").symlink_to("loop")
        (root / "file").touch()
        for name, words in (
            ("loop", "too many levels of symbolic links"),
            ("file", "not a directory"),
            ("none", "no such file or directory"),
        ):
            arguments = ["try", str(root / name), "--evaluator", "true", "x=1"]
            result = CliRunner().invoke(main, arguments)
            self.assertEqual(result.exit_code, 2, result.exception)
            self.assertIn(f"{name}: {words}", " ".join(result.output.split()))
