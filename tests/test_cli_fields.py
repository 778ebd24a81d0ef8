"""`cli.fields`: submissions as arguments."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.fields import parse_fields


class FieldTests(SynchronousTestCase):
    """Arguments, in a directory with a few files."""

    def setUp(self) -> None:
        folder = Path(self.mktemp())
        folder.mkdir()
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(folder)
        for name in ("a.py", "b.txt", "x=y", "C:z", os.fsdecode(b"\xff")):
            Path(name).touch()

    def test_kinds(self) -> None:
        """Texts, files of a field, files of the default field, in any order."""
        for arguments, expected in (
            (["a.py"], {"source": Path("a.py")}),
            (["source:a.py"], {"source": Path("a.py")}),
            (["language=c++", "a.py"], {"language": "c++", "source": Path("a.py")}),
            (["a.py", "data:b.txt"], {"data": Path("b.txt"), "source": Path("a.py")}),
            (["x="], {"x": ""}),
            (["x=y"], {"x": "y"}),
            (["x=a:b=c\n"], {"x": "a:b=c\n"}),
            (["./x=y"], {"source": Path("./x=y")}),
            (["C:z"], {"source": Path("C:z")}),  # no field has a capital letter
        ):
            self.assertEqual(parse_fields(arguments), expected)

    def test_wrong(self) -> None:
        """What is wrong is named."""
        for arguments, words in (
            ([], "nothing to evaluate"),
            (["none.py"], "no file none.py"),
            (["source:none.py"], "no file none.py"),
            (["source:."], "no file ."),
            (["a.py", "b.txt"], "which field is it? Write NAME:b.txt"),
            (["source=x", "a.py"], "NAME:a.py"),
            (["x=1", "x=2"], "the field x stands there twice"),
            (["x=1", "x:a.py"], "twice"),
            ([os.fsdecode(b"\xff")], "must be UTF-8"),
            ([os.fsdecode(b"x=\xff")], "x: must be UTF-8"),
            (["x" * 5000], f"{'x' * 100}: File name too long"),
        ):
            with self.assertRaises(ValueError) as caught:
                parse_fields(arguments)
            self.assertIn(words, str(caught.exception))
