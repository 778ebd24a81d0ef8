"""Docstrings of the package name exceptions and things that exist."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Up to the end of the sentence; what stands in parentheses says when, and names no exception.
RAISES = re.compile(r"\bRaises?:?\s((?:[^.(]|\([^)]*\)|\.(?=\w))*)")
EXCEPTION = re.compile(r"\b[A-Z][a-z]+(?:[A-Z]+[a-z]+)*\b(?!:)")
CODE = re.compile(r"`([A-Za-z][\w.]*)(?:\([^`]*\))?`")
# Names of libraries that the code does not mention.
FOREIGN = {"MockTransport", "ReadError", "TimeoutMixin", "spawnProcess"}


def read_docstrings(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, str, str]]:
    """Yield the module, the name and the text of every docstring."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                yield path, getattr(node, "name", "module"), text


def list_names(tree: ast.Module) -> Iterator[str]:
    """Yield what the code of a module names, and the words of its strings but docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if isinstance(value, str) and id(node) not in docstrings:
            yield from re.findall(r"\w+", value)
        for _, field in ast.iter_fields(node):
            for each in field if isinstance(field, list) else [field]:
                if isinstance(each, str):
                    yield from (part.lstrip("_") for part in each.split("."))


@cache
def read_package() -> tuple[dict[Path, ast.Module], dict[Path, set[str]]]:
    """Return the modules of the package, and the names in each."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(ROOT.glob("tawebeval*/**/*.py"))}
    return trees, {
        path: {*list_names(tree), path.stem, path.parent.name} for path, tree in trees.items()
    }


@cache
def list_known(path: Path) -> set[str]:
    """Return the names in a module, and in those that it imports or contains."""
    _, names = read_package()
    found = list_names_in({path.stem, *names[path]})
    if path.stem == "__init__":
        found |= set().union(*(names[other] for other in names if path.parent in other.parents))
    return found


def list_names_in(stems: set[str]) -> set[str]:
    """Return the names in modules."""
    _, names = read_package()
    return set().union(*(found for other, found in names.items() if other.stem in stems))


class DocstringTests(SynchronousTestCase):
    """A renamed thing is renamed where others speak of it."""

    def test_raised_exceptions_exist(self) -> None:
        trees, names = read_package()
        known = set().union(*names.values(), dir(builtins), FOREIGN)
        unknown = [
            f"{path.relative_to(ROOT)}: {owner}: {name}"
            for path, owner, text in read_docstrings(trees)
            for clause in RAISES.findall(text)
            for name in EXCEPTION.findall(re.sub(r"`[^`]*`|\([^)]*\)", "", clause))
            if name not in known
        ]
        self.assertEqual(unknown, [])

    def test_names_in_backticks_exist_near_the_docstring(self) -> None:
        trees, _ = read_package()
        unknown = [
            f"{path.relative_to(ROOT)}: {owner}: {part}"
            for path, owner, text in read_docstrings(trees)
            for code in CODE.findall(text)
            for part in code.split(".")
            if ("_" in part or re.search("[a-z][A-Z]", part)) and part not in FOREIGN
            if part not in list_known(path) and part not in list_names_in({*code.split(".")})
        ]
        self.assertEqual(unknown, [])
