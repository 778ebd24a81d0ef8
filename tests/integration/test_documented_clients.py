"""The client that docs/api.md shows in Python does what is said there."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from twisted.internet import reactor
from twisted.internet.utils import getProcessOutputAndValue

from tests.integration.harness import DaemonTestCase

ROOT = Path(__file__).resolve().parent.parent.parent
WORD_COUNT = ROOT / "examples" / "problems" / "word_count"
SOLUTION = WORD_COUNT / "solutions" / "wrong_order.awk"


def documented(language: str, words: str) -> str:
    """Return the one program of docs/api.md in that language in which there are these words."""
    text = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    (source,) = (block for block in blocks if words in block)
    return source


class DocumentedClientTests(DaemonTestCase):
    """The programs as they stand in the text, and the problem of which they speak."""

    async def run_program(self, file: Path, *arguments: str) -> str:
        """Return what a program prints, which must succeed."""
        output, errors, status = await getProcessOutputAndValue(
            sys.executable, [str(file), *arguments], path=str(self.folder), reactor=reactor
        )
        self.assertEqual(status, 0, errors.decode())
        return output.decode()

    async def test_python(self) -> None:
        """A submission is sent, and its events are shown to the last, as in the text."""
        (self.folder / "client.py").write_text(documented("python", "def evaluate("))
        use = self.folder / "use.py"
        use.write_text(documented("python", "from client import"))
        shutil.copytree(WORD_COUNT, self.repository.folder / "word_count")
        commit = self.repository.commit()
        shown = await self.run_program(
            use, self.daemon.url, self.repository.url, commit, str(SOLUTION)
        )
        expected = documented("console", "python3 use.py").splitlines()[1:]
        self.assertEqual(_lasting(shown).splitlines(), _lasting("\n".join(expected)).splitlines())


def _lasting(text: str) -> str:
    """Return what each run prints, without times and without words that were drawn."""
    return re.sub(r"\([0-9.]+ s\)|(?:expected|printed): +[0-9]+ [a-z]+", "...", text)
