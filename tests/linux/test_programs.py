"""`starter_client.pack_program`: archives of modules."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux import kernel_files, starter
from tawebeval.linux.starter_client import pack_program


class ProgramTests(SynchronousTestCase):
    def test_program_runs_without_tawebeval(self) -> None:
        program = Path(self.mktemp())
        program.write_bytes(pack_program(starter, kernel_files))
        argv = [sys.executable, "-I", "-S", str(program), starter.PROCESS_NAME, "/none/socket"]
        done = subprocess.run(argv, env={}, capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("tawebeval-starter: /none/socket: cannot listen there", done.stderr)

    def test_same_modules_make_the_same_bytes_at_any_time(self) -> None:
        archive = ZipFile(io.BytesIO(pack_program(kernel_files)))
        self.assertEqual({each.date_time[:3] for each in archive.infolist()}, {(1980, 1, 1)})
