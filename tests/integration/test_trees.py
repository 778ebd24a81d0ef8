"""What an evaluator finds in its working directory, and what becomes of what it leaves there."""

from __future__ import annotations

import os

from tests.integration.client import text
from tests.integration.harness import DaemonTestCase


class TreeTests(DaemonTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.binary = bytes(range(256)) * 17
        self.repository.write("bin/run", "#!/bin/sh\necho run in $(basename $PWD)\n", 0o755)
        self.repository.write("bin/data", self.binary)
        self.repository.write("dos.txt", "one\r\ntwo\r\n")
        self.repository.write("città/ñ ü.txt", "far\n")
        self.repository.write(".gitattributes", "*.txt text eol=crlf\n")
        self.repository.link("to-run", "bin/run")
        self.repository.link("to-bin", "bin")
        self.repository.link("dangling", "no/such/place")
        self.repository.link("out", "/etc")
        self.repository.link("up", "../..")
        self.commit = self.repository.commit()

    async def test_modes_links_bytes_and_names_are_those_of_a_checkout(self) -> None:
        events = await self.run_command(
            "stat -c '%a %n' bin/run bin/data README; readlink to-run to-bin dangling out up;"
            " ./bin/run; ./to-run; cat città/*.txt; od -An -v -tx1 bin/data | tr -d ' \\n'"
        )
        self.assertEqual(
            text(events),
            "755 bin/run\n644 bin/data\n644 README\n"
            "bin/run\nbin\nno/such/place\n/etc\n../..\n"
            f"run in tree\nrun in tree\nfar\r\n{self.binary.hex()}",
        )

    async def test_history_and_git_are_not_there(self) -> None:
        events = await self.run_command("ls -A1 | LC_ALL=C sort | tr '\\n' ' '")
        names = sorted({*os.listdir(self.repository.folder)} - {".git"})
        self.assertEqual(text(events), " ".join(names) + " ")
