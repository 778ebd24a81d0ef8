"""The tables of the page's messages: each has all, and nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from unittest import TestCase

import tawebeval.web

WEB = Path(tawebeval.web.__file__).parent
TABLES = {path.stem: json.loads(path.read_text()) for path in (WEB / "messages").glob("*.json")}
MODULES = [
    path for path in (WEB / "static").glob("*.js") if "-" not in path.stem and path.stem != "docs"
]
LITERAL = re.compile(r'"([^"`$\n]*)"')
SAID = re.compile(r'\bsay\(\s*"([^"\n]*)"')
PLACE = re.compile(r"\{(\w+)\}")
BAD = "wrong_answer time_limit memory_limit output_limit runtime_error compile_error judge_error"
VERDICTS = {name.replace("_", " ") for name in (*BAD.split(), "accepted", "partial", "skipped")}
STATES = {"opening", "gone", "unknown", "queued", "fetching", "running", "waiting", "sending"}
MADE = {
    *VERDICTS,
    *(state.capitalize() for state in STATES),
    *(verdict.capitalize() for verdict in VERDICTS - {"partial", "skipped"}),
    *(f"{name.replace('_', ' ').capitalize()} so far" for name in BAD.split()),
    "Stopped",
    "Input",
}
"""Messages that modules make of identifiers of the API."""


class PageTexts(HTMLParser):
    """All texts of a page that a reader sees, unless they are not to be translated."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._open: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag not in ("meta", "link", "img", "input"):
            self._open.append((tag, tag in ("head", "title") or "translate" in given))
        for name in ("aria-label", "data-empty", "placeholder", "title"):
            self.found.add((given.get(name) or "").strip())

    def handle_endtag(self, tag: str) -> None:
        while self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not any(is_kept for _, is_kept in self._open):
            self.found.add(data.strip())


class MessageTests(TestCase):
    def setUp(self) -> None:
        page = PageTexts()
        page.feed((WEB / "static" / "index.html").read_text())
        self.source = "".join(path.read_text().replace(r"\\", "\\") for path in MODULES)
        texts = {text for text in LITERAL.findall(self.source) if PLACE.search(text)}
        said = SAID.findall(self.source)
        self.needed = (page.found | texts | {*said} | MADE) - {""}

    def test_each_translation_is_complete_and_has_no_message_absent_from_the_source(self) -> None:
        for language, table in TABLES.items():
            if language != "en":
                self.assertEqual(self.needed - set(table), set(), language)
            others = {text for text in set(table) - self.needed if f'"{text}"' not in self.source}
            self.assertEqual(others, set(), language)

    def test_translations_use_only_the_placeholders_of_their_message(self) -> None:
        for language, table in TABLES.items():
            for message, given in table.items():
                forms = [given] if isinstance(given, str) else list(given.values())
                for form in forms:
                    places = set(PLACE.findall(message))
                    self.assertLessEqual(set(PLACE.findall(form)), places, f"{language}: {form}")
                last = forms[-1]
                self.assertEqual(set(PLACE.findall(last)), set(PLACE.findall(message)), last)

    def test_plural_messages_have_forms_in_english(self) -> None:
        plural = {text for text in self.needed if re.search(r"(?<!over )\{n\} [a-z]*s\b", text)}
        self.assertGreater(len(plural), 10)
        self.assertEqual(plural - set(TABLES["en"]), set())
