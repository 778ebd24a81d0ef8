"""The messages of the daemon for people: errors, problems, findings, log lines."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from msgspec import structs
from twisted.trial.unittest import SynchronousTestCase

import tawebeval
from tawebeval.config import Configuration, Section

ROOT = Path(tawebeval.__file__).parent
SETTING = re.compile(r"(?<![`\w./-])([a-z]+)\.([a-z_]+)\b(?!\()")


class MessageTests(SynchronousTestCase):
    def test_named_settings_exist(self) -> None:
        sections = {
            field.name: field.type.__struct_fields__
            for field in structs.fields(Configuration)
            if isinstance(field.type, type) and issubclass(field.type, Section)
        }
        named = 0
        for path in sorted(ROOT.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                text = getattr(node, "value", "")
                # A name of a file has no spaces, and a docstring may have several lines.
                if not isinstance(text, str) or " " not in text or "\n" in text:
                    continue
                for section, name in SETTING.findall(text):
                    named += section in sections
                    self.assertIn(name, sections.get(section, (name,)), f"{path}: {text}")
        self.assertGreater(named, 50)
