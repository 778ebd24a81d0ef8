"""The YAML of packages: every text is read, or refused with its line."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

import tawebeval

LIBRARY = Path(tawebeval.__file__).parent / "sandbox" / "tools" / "lib"
WORDS = (
    "a",
    "1",
    "1e1",
    "no",
    "~",
    "2020-01-01",
    "2020-13-01",
    "&x 1",
    "*x",
    "!!int ''",
    "<<",
    "?",
)
VALUES = st.recursive(
    st.sampled_from((*WORDS, "!!timestamp x", "!!binary a", "!!set {a}", "'", '"\\x"', "&x [*x]")),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda all_: f"[{', '.join(all_)}]")
        | st.lists(st.tuples(inner, inner), max_size=3).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
        )
    ),
    max_leaves=8,
)


class YamlTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(sys, "path", [str(LIBRARY), *sys.path])
        self.path = Path(self.mktemp())
        self.error: Any = import_module("segi_judge").PackageError
        self.module = import_module("segi_yaml")

    def read(self, text: str) -> Any:
        self.path.write_text(text)
        return self.module.read_yaml(self.path)

    def check(self, text: str) -> None:
        try:
            self.read(text)
        except self.error as error:
            self.assertRegex(str(error), rf"^{self.path.name}: line \d+: .")

    @given(st.text("ab :#-'\"[]{},\\|>\n\t&*!?<.~019", max_size=40))
    def test_any_text_is_read_or_refused_with_its_line(self, text: str) -> None:
        self.check(text)

    @given(VALUES, VALUES)
    def test_any_value_is_read_or_refused_with_its_line(self, key: str, value: str) -> None:
        self.check(f"first: {value}\n{key}: {value}\n")

    def test_key_is_text_as_it_stands_and_not_repeated(self) -> None:
        self.assertEqual(self.read("no: 1\n010: {on: yes}"), {"no": 1, "010": {"on": True}})
        merged = self.read("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}")
        self.assertEqual(merged["b"], {"x": 3, "y": 2})
        self.assertEqual(self.read('<<: {no: 1}\n"<<": 2'), {"no": 1, "<<": 2})
        with self.assertRaisesRegex(self.error, "line 2: the key '1' is repeated"):
            self.read("1: a\n1: b")
