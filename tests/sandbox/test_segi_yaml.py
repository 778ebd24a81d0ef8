"""The YAML of packages: what is read as PyYAML reads it, and what is refused."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.sandbox.tools.lib.segi_yaml import YamlError, read_yaml

PACKAGE = """\
---
# A comment.
name: {en: "Odd \\"Echo\\"", 'sv': Udda eko}   # another one
source: https://example.org/a#b
limits:
    time_limit: 1.5
    memory: 512
    factor: -1e3
authors:
- Ada <ada@example.org>
-   name: Bob
    keys: [one, 'it''s', "\\u00e9\\x41",
      2, null, {a: [], b}]
-
  - nested
  - - deeper
empty:
"quoted: key": yes
validator_flags: float_tolerance 1e-6
folded: >
  two
  lines

  and one
literal: |-
  a: b
    c
long: goes on
  in the next line
flag: true
infinite: [.inf, -.inf]
...
"""
VALUES: Any = {
    "name": {"en": 'Odd "Echo"', "sv": "Udda eko"},
    "source": "https://example.org/a#b",
    "limits": {"time_limit": 1.5, "memory": 512, "factor": -1000.0},
    "authors": [
        "Ada <ada@example.org>",
        {"name": "Bob", "keys": ["one", "it's", "éA", 2, None, {"a": [], "b": None}]},
        ["nested", ["deeper"]],
    ],
    "empty": None,
    "quoted: key": "yes",
    "validator_flags": "float_tolerance 1e-6",
    "folded": "two lines\n\nand one\n",
    "literal": "a: b\n  c",
    "long": "goes on in the next line",
    "flag": True,
    "infinite": [float("inf"), float("-inf")],
}


class YamlTests(SynchronousTestCase):
    maxDiff = None

    def test_all_syntax_that_packages_use_is_read(self) -> None:
        self.assertEqual(read_yaml(PACKAGE), VALUES)
        for text, value in (("", None), ("# nothing\n", None), ("7", 7), ("[a]", ["a"])):
            self.assertEqual(read_yaml(text), value)

    def test_list_of_10000_lines_is_read_and_errors_have_line_numbers(self) -> None:
        lines = "  1,\n" * 10_000
        self.assertEqual(read_yaml(f"a: [\n{lines}]\nb: 2\n"), {"a": [1] * 10_000, "b": 2})
        with self.assertRaisesRegex(YamlError, "^line 10003: "):
            read_yaml(f"a: [\n{lines}]\nb: *c\n")
        with self.assertRaisesRegex(YamlError, "^line 10003: a bracket"):
            read_yaml(f"a: [\n{lines}")

    def test_unsupported_syntax_is_refused_with_its_line(self) -> None:
        for line in (
            "key: &anchor 1",
            "key: *alias",
            "key: !tag 1",
            "key: [*alias]",
            "key: [a, b",
            "key: [a}",
            "key: {a]",
            'key: "a',
            'key: "\\uzzzz"',
            "key: [a b: c d: e]",
            "key: a: b",
            "key: [a] b",
            "key: |2",
            "? key",
            "\tkey: 1",
            "first: 2",
            "---",
            "a line without a key",
        ):
            with self.assertRaisesRegex(YamlError, "^line [234]: "):
                read_yaml(f"first: 1\n{line}\n")

    @given(
        st.recursive(
            st.integers() | st.booleans() | st.none() | st.text("ab :#-'\"[{,\\\n", max_size=9),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text("ab :", max_size=5), inner, max_size=3)
            ),
            max_leaves=9,
        )
    )
    def test_yaml_reader_reads_any_json_document(self, value: Any) -> None:
        self.assertEqual(read_yaml(json.dumps({"key": value})), {"key": value})

    @given(st.text("ab :#-'\"[]{},\\|>\n\t&", max_size=40))
    def test_any_text_is_read_or_refused(self, text: str) -> None:
        try:
            read_yaml(text)
        except YamlError as error:
            self.assertTrue(str(error).startswith("line "), error)
