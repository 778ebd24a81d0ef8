"""The documented programs in Python pass mypy, strict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.cases.documented import find_blocks
from tests.cases.patience import LONG_PATIENCE
from tests.run import ROOT

DOCUMENTS = ("README.md", "docs/clients.md", "tawebeval_client/README.md")
INTEGRATIONS = ROOT / "examples" / "integrations"

# Django has no types.
CONFIGURATION = """\
[tool.mypy]
strict = true

[[tool.mypy.overrides]]
module = "django.*"
ignore_missing_imports = true

[[tool.mypy.overrides]]
module = "django_view"
disallow_subclassing_any = false
disallow_untyped_decorators = false
"""


class TypeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()
        (self.folder / "pyproject.toml").write_text(CONFIGURATION)
        # Not by a path: beside it is a folder named as the package Twisted.
        (self.folder / "tawebeval_client").symlink_to(ROOT / "tawebeval_client")
        for document in DOCUMENTS:
            name = document.replace("/", "_").removesuffix(".md").lower()
            for number, block in enumerate(find_blocks(ROOT / document, "python")):
                (self.folder / f"{name}_{number}.py").write_text(block)
        for path in INTEGRATIONS.glob("*.py"):
            (self.folder / path.name).write_text(path.read_text())
        self.programs = sorted(path.name for path in self.folder.glob("*.py"))
        self.assertGreaterEqual(len(self.programs), 5)

    def test_documented_python_passes_mypy(self) -> None:
        options = ("--config-file", "pyproject.toml", "--no-error-summary")
        done = subprocess.run(
            [sys.executable, "-m", "mypy", *options, *self.programs],
            cwd=self.folder,
            env={"PATH": os.defpath, "HOME": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=LONG_PATIENCE,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
