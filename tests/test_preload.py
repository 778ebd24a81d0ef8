"""`daemon.preload`: what is loaded while Python can still be read."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import tawebeval
from tawebeval.daemon import preload as module
from tawebeval.daemon.preload import COMMAND, LATER, find_unreadable
from tests.own_python import printed_by

LOOK = "import sys; from tawebeval.daemon.preload import preload; preload(); print(*sys.modules)"


class PreloadTests(SynchronousTestCase):
    """Imports before the drop."""

    def test_all(self) -> None:
        """Every module that the daemon may need is loaded, and what others load late."""
        package = Path(tawebeval.__file__).parent
        loaded = printed_by(LOOK).split()
        for file in package.rglob("*.py"):
            name = ".".join(file.relative_to(package.parent).with_suffix("").parts)
            known = loaded.count(name.removesuffix(".__init__"))
            self.assertEqual(known, not name.startswith(COMMAND), name)
        self.assertEqual(set(LATER) - set(loaded), set())

    def test_readable(self) -> None:
        """Where all can be read there is nothing to tell."""
        self.assertEqual(list(find_unreadable()), [])

    def test_unreadable(self) -> None:
        """Python and packages that cannot be read are named."""
        package = Path(tawebeval.__file__).parent
        self.patch(module.os, "access", lambda path, mode, effective_ids: path != package)
        (problem,) = find_unreadable()
        self.assertTrue(problem.what.startswith(f"{package} cannot be read"), problem)
        self.patch(module.os, "access", lambda path, mode, effective_ids: False)
        self.assertIn(str(Path(os.__file__).parent), str(list(find_unreadable())))
