"""The private names of Twisted that the web server uses."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from twisted.protocols.basic import LineReceiver
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.http import HTTPChannel, Request

from tawebeval import web
from tawebeval.web.server.channel import TWISTED_PRIVATE_NAMES
from twisted import version  # type: ignore[attr-defined]

TESTED = (26, 10)
"""The newest version whose names were compared; the next one is excluded in pyproject.toml."""

ROOT = Path(__file__).resolve().parents[3]
_NAME = re.compile(r"(?<=\.)_[a-z]\w*|(?<=def )_[a-z]\w*")


def find_names(*texts: str) -> set[str]:
    """Return the private names of attributes and methods in Python code."""
    return {name for text in texts for name in _NAME.findall(text) if not name.endswith("__")}


class PrivateNameTests(SynchronousTestCase):
    """What an upgrade of Twisted may break."""

    def setUp(self) -> None:
        self.twisted = find_names(*map(inspect.getsource, (LineReceiver, HTTPChannel, Request)))

    def test_this_version_of_twisted_has_all_names(self) -> None:
        self.assertLessEqual(
            (version.major, version.minor), TESTED, "compare the names, then raise the bound"
        )
        self.assertEqual(set(TWISTED_PRIVATE_NAMES) - self.twisted, set())

    def test_pyproject_excludes_the_next_version(self) -> None:
        bound = f'<{TESTED[0]}.{TESTED[1] + 1}"'
        self.assertIn(bound, (ROOT / "pyproject.toml").read_text())

    def test_only_the_channel_uses_them(self) -> None:
        used = {}
        for path in Path(web.__file__).parent.rglob("*.py"):
            names = find_names(path.read_text()) & self.twisted
            if names:
                used[path.name] = names
        self.assertEqual(used, {"channel.py": set(TWISTED_PRIVATE_NAMES)})
