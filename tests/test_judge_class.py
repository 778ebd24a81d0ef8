"""`examples/integrations/judge_class.py`: what it prints of the names of folders."""

from __future__ import annotations

import io
import os
import runpy
from contextlib import redirect_stdout
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

EXAMPLE = Path(__file__).parent.parent / "examples" / "integrations" / "judge_class.py"


class NamesTests(SynchronousTestCase):
    """Names of folders, which students choose."""

    def test_names_are_printed_in_one_line(self) -> None:
        self.patch(os, "environ", {"TAWEBEVAL_SERVER": "http://a"})
        main = runpy.run_path(str(EXAMPLE))["main"]
        students = Path(self.mktemp())
        for name in (b"::add-mask::x", b"a\n::stop-commands::x", b"\xff"):
            os.makedirs(os.fsencode(students) + b"/" + name)
        stdout = io.TextIOWrapper(io.BytesIO(), "utf-8")
        with redirect_stdout(stdout):
            self.assertEqual(main("judged", str(students)), 1)
        stdout.seek(0)
        failed = "FAILED: 0 files instead of one"
        self.assertEqual(
            stdout.read().splitlines(),
            [
                f"student ::add-mask::x: {failed}",
                f"student a ::stop-commands::x: {failed}",
                f"student \\udcff: {failed}",
                "0 of 3 passed",
            ],
        )
