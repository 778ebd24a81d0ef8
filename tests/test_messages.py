"""The messages of the daemon for people: errors, problems, findings, log lines.

The messages are collected from the source: string arguments of exceptions, of the functions that
build messages, and of log calls, also by way of a variable. A placeholder is shown as {}.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import structs
from twisted.trial.unittest import SynchronousTestCase

import tawebeval
from tawebeval import errors
from tawebeval.config import Configuration, Section
from tests.cases.messages import check_words

ROOT = Path(tawebeval.__file__).parent
OTHERS = ("cli", "client")  # whose messages are tested with their commands

# Exceptions and functions that take a message.
BUILDERS = {
    *(name for name, value in vars(errors).items() if isinstance(value, type)),
    *(
        "build_limit_failure",
        "SetupProblem",
        "Finding",
    ),
    *("ValueError", "OSError", "SystemExit", "FileBlockError", "FileRefused", "NotFound"),
    *("UnknownHost", "LookupUnanswered", "AttemptResult", "_forbidden", "_failed", "_give_up"),
    *("_bad_request", "_too_large", "_refuse", "_refuse_handshake", "_check_length", "_matching"),
    *("_emit_error", "_emit_first_error", "refuse_file", "run_in_background"),
    *("attempt", "use_copies", "Allowance", "Remedy"),
    "__init__",
}
# Beginnings of the names of functions that return, or yield, messages; constants with messages.
RETURNED = ("explain", "_explain", "_find_hint", "_describe", "find_disk_fault", "check_", "_notes")
YIELDED = ("_check", "_try", "compare")
TABLES = ("_REMEDIES",)

NAMES = re.compile(r"([A-Z][A-Za-z]*-[A-Za-z-]+|[A-Z]+\b|[A-Za-z]+[:=])")
"""A header, an abbreviation or an option, with which a message may begin in upper case."""


RAW_SIZE = re.compile(r"\{\} ([a-z]+ )?bytes\b|\b(?!65535)[0-9]{5,}\b")
# Messages with a number of bytes that is always small.
SMALL = {
    "the file name has {} bytes; the limit is {}": "NAME_MAX is 255",
    "{} has {} bytes, and a key has {}": "a key has 32",
    "line {}: expected NAME whsec_BASE64, of {} to {} random bytes": "64 at most",
}

SETTING = re.compile(r"(?<![\w./-])([a-z]+)\.([a-z_]+)\b(?!\()")


def join_literal(node: ast.AST) -> str:
    """Return the text of a string expression, {} for what is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(join_literal, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return join_literal(node.left) + join_literal(node.right)
    return "{}"


def takes_message(called: ast.expr) -> bool:
    """Tell whether a call of this takes a message."""
    if isinstance(called, ast.Attribute):
        return called.attr in BUILDERS or getattr(called.value, "id", "") == "log"
    return isinstance(called, ast.Name) and called.id in BUILDERS


class Collector(ast.NodeVisitor):
    """Collects the messages of a module, with their lines."""

    def __init__(self) -> None:
        self.found: set[tuple[int, str]] = set()
        self.function = ""
        self.assigned: dict[str, list[ast.expr]] = {}
        self.names: set[str] = set()  # that stand for messages

    def add(self, node: ast.AST) -> None:
        """Add what of an expression is a message."""
        if isinstance(node, ast.Dict | ast.IfExp | ast.List | ast.Tuple):
            for part in node.values if isinstance(node, ast.Dict) else ast.iter_child_nodes(node):
                self.add(part)
        text = join_literal(node)
        if isinstance(node, ast.expr) and " " in text:
            self.found.add((node.lineno, text))
        if isinstance(node, ast.Name | ast.JoinedStr | ast.BinOp):
            self.names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}

    def visit(self, node: ast.AST) -> None:
        """Add the arguments of calls that take a message, and the results of functions."""
        outer = self.function
        match node:
            case ast.FunctionDef(name=name):
                self.function = name
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                self.assigned.setdefault(name, []).append(value)
            case ast.Return(value=ast.expr() as value) if self.function.startswith(RETURNED):
                self.add(value)
            case ast.Yield(value=ast.expr() as value) if self.function.startswith(YIELDED):
                self.add(value)
            case ast.Call(func=called, args=arguments) if takes_message(called):
                for argument in arguments:
                    self.add(argument)
        self.generic_visit(node)
        self.function = outer

    def resolve(self) -> None:
        """Add the values of the names that stand for messages."""
        for name in (*TABLES, *sorted(self.names)):
            for value in self.assigned.get(name, ()):
                self.add(value)


def list_messages() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each message."""
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        if place.parts[0] not in OTHERS:
            collector = Collector()
            collector.visit(ast.parse(path.read_text(encoding="utf-8")))
            collector.resolve()
            for line, text in sorted(collector.found):
                yield f"{place}:{line}", text


MESSAGES = list(list_messages())


class MessageTests(SynchronousTestCase):
    """What can be checked of every message."""

    def test_collector_sees_messages_of_all_kinds(self) -> None:
        self.assertGreater(len(MESSAGES), 450)
        texts = [text for _, text in MESSAGES]
        for part in (
            *(
                "request body is {}",
                "queue is full",
                "unknown setting",
                "is not a whole commit OID",
            ),
            *(
                "the sandbox has no network",
                "callers need a token",
                "reload refused",
                "ready: {page}",
            ),
        ):
            self.assertTrue(any(part in text for text in texts), part)

    def test_message_is_one_line_in_lower_case(self) -> None:
        for place, text in MESSAGES:
            self.assertNotIn("\n", text, place)
            self.assertFalse(text.endswith("."), f"{place}: {text}")
            self.assertTrue(not text[0].isupper() or NAMES.match(text), f"{place}: {text}")

    def test_large_sizes_have_units(self) -> None:
        for place, text in MESSAGES:
            self.assertTrue(text in SMALL or not RAW_SIZE.search(text), f"{place}: {text}")

    def test_named_settings_exist(self) -> None:
        sections = {
            field.name: field.type.__struct_fields__
            for field in structs.fields(Configuration)
            if isinstance(field.type, type) and issubclass(field.type, Section)
        }
        for place, text in MESSAGES:
            for section, name in SETTING.findall(text):
                self.assertIn(name, sections.get(section, (name,)), f"{place}: {text}")

    def test_words_of_no_message_fail_at_once(self) -> None:
        for words in (
            "connections are limited to 86",
            "callers.tokens: reloaded",
        ):
            check_words(words)
        with self.assertRaisesRegex(AssertionError, "no message has 'connections are bounded to'"):
            check_words("connections are bounded to 86")
