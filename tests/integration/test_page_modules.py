"""Modules of the page that only compute, tested by Node.js.

Each file of `page_modules` is a test module of node:test. It finds the page's modules in `static`,
beside it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import TestCase

from tawebeval.web.bundle import make_messages_module

NODE = shutil.which("node")
TESTS = Path(__file__).parent / "page_modules"
WEB = Path(__file__).parents[2] / "tawebeval" / "web"
STATIC, MESSAGES = WEB / "static", WEB / "messages"


class PageModuleTests(TestCase):
    """The tests in `page_modules`, a method for each file."""

    skip = None if NODE else "there is no node"

    def setUp(self) -> None:
        """Copy modules and tests: Node takes `.js` for ES modules by a package.json."""
        self.folder = Path(self.mktemp()).absolute()
        shutil.copytree(TESTS, self.folder)
        shutil.copytree(STATIC, self.folder / "static")
        tables = {path.stem: path.read_text() for path in MESSAGES.glob("*.json")}
        (self.folder / "static" / "messages.js").write_text(make_messages_module(tables))
        (self.folder / "package.json").write_text('{"type": "module"}')

    async def run_tests(self, name: str) -> None:
        file = str(self.folder / name)
        output, errors, status = await getProcessOutputAndValue(str(NODE), ["--test", file], {})
        self.assertEqual(status, 0, (output + errors).decode())
        self.assertNotIn(b"# tests 0\n", output)


def _add_test(path: Path) -> None:
    async def test(self: Any) -> None:
        await self.run_tests(path.name)

    setattr(PageModuleTests, f"test_{path.stem}", test)


for _path in sorted(TESTS.glob("*.mjs")):
    _add_test(_path)
