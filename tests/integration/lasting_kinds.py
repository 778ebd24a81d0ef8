"""Kinds of evaluations for tests of a daemon that ends and starts again."""

from __future__ import annotations

import base64
from typing import Any

import attrs

from tests.integration.client import joined, python

KIB, MIB = 2**10, 2**20

_NUMBERS = """
import sys, time
for block in range({blocks}):
    sys.stdout.write("".join(f"{{block}} {{n}}\\n" for n in range({lines})))
    sys.stdout.flush()
    time.sleep({pause})
"""
_VALUES = """
import json, os, time
begin, end = os.environ["EVALUATION_DATA_BEGIN"], os.environ["EVALUATION_DATA_END"]
for n in range({count}):
    print("line", n, end="", flush=True)
    time.sleep({pause})
    print("\\n" + begin, flush=True)
    time.sleep({pause})
    print(json.dumps({{"type": "case", "case": str(n), "verdict": "accepted"}}))
    print(end, flush=True)
"""
_FILES = """
import os, time
begin, end = os.environ["EVALUATION_FILE_BEGIN"], os.environ["EVALUATION_FILE_END"]
for n in range({count}):
    with open(f"file-{{n}}", "w") as file:
        file.write(f"{{n}} " * {repeats})
    print(begin, "X-SEGI-As: path", "", f"file-{{n}}", sep="\\n", flush=True)
    time.sleep({pause})
    print(end, flush=True)
"""
_MEMORY = "import time\nprint('ready')\ntime.sleep(0.3)\nx = bytearray(b'x') * (200 * 2**20)"
_RUNS = "for n in $(seq {}); do tawebeval-run -- sh -c 'sleep 0.1; echo yes'; done; echo end"


@attrs.frozen
class Kind:
    """What an evaluator does, and what clients have to see of that.

    - `printed`: as `joined` has it, without the final event.
    - `reasons`: the possible ones of the final event, empty if there is none.
    - `fields`: more fields of the form.
    - `is_cancelled`, `is_called_back`: whether the test does so. `is_read_late`: whether the reader
      begins after some more kills.
    - `has_own_repository`: whether its repository is fetched, slowly.
    """

    name: str
    command: str
    printed: list[Any]
    reasons: tuple[str, ...] = ()
    fields: dict[str, str] = attrs.field(factory=dict)
    is_cancelled: bool = False
    is_called_back: bool = False
    is_read_late: bool = False
    has_own_repository: bool = False

    @property
    def state(self) -> str:
        """The state after the end."""
        if not self.reasons:
            return "finished"
        return "cancelled" if self.is_cancelled else "failed"


def make_numbers(blocks: int, lines: int, pause: float = 0) -> tuple[str, str]:
    """Return a command that prints numbers, and what it prints; `pause` in seconds."""
    command = python(_NUMBERS.format(blocks=blocks, lines=lines, pause=pause))
    return command, "".join(f"{b} {n}\n" for b in range(blocks) for n in range(lines))


def make_values(count: int, pause: float = 0) -> tuple[str, list[Any]]:
    """Return a command that prints text and values, and what `joined` has of it."""
    printed: list[Any] = []
    for n in range(count):
        printed += [f"line {n}", [{"type": "case", "case": str(n), "verdict": "accepted"}]]
    return python(_VALUES.format(count=count, pause=pause)), printed


def make_kinds() -> list[Kind]:
    """Return a kind of each sort."""
    fast, fast_text = make_numbers(10, 5000)
    slow, slow_text = make_numbers(100, 20, 0.02)
    much, much_text = make_numbers(1, 40_000)
    values, values_printed = make_values(30, 0.04)
    files = [
        [
            {
                "type": "file",
                "filename": f"file-{n}",
                "content_type": "application/octet-stream",
                "content_base64": base64.b64encode(f"{n} ".encode() * 20_000).decode(),
            }
        ]
        for n in range(8)
    ]
    return [
        Kind("fast", fast, [fast_text]),
        Kind("slow", slow, [slow_text]),
        Kind("silent", "sleep 3; echo late; echo no >&2; exit 3", ["late\n"], ("exit",)),
        Kind("full", much, [much_text], is_read_late=True),
        Kind("values", values, values_printed),
        Kind("files", python(_FILES.format(count=8, repeats=20_000, pause=0.2)), files),
        Kind("unread", "cat $SUBMISSION_FILE_SOLUTION", ["42\n"], is_read_late=True),
        Kind("submissions", _RUNS.format(10), ["yes\n" * 10 + "end\n"]),
        Kind(
            *("cancelled", "echo ready; exec sleep 600", ["ready\n"], ("cancelled",)),
            is_cancelled=True,
        ),
        Kind("fetched", "cat README", ["an evaluator\n"], has_own_repository=True),
        Kind(
            *("called back", "echo one; sleep 0.5; exit 3", ["one\n"], ("exit",)),
            is_called_back=True,
        ),
        Kind(
            *("over its time", "echo ready; exec sleep 600", ["ready\n"], ("timeout",)),
            {"limits[wall_clock]": "2"},
        ),
        Kind(
            *("over its output", fast, [fast_text[: 100 * KIB]], ("output",)),
            {"limits[output]": str(100 * KIB)},
        ),
        Kind(
            *("over its memory", python(_MEMORY), ["ready\n"], ("memory", "exit")),
            {"limits[memory]": str(64 * MIB)},
        ),
        Kind("partial", "printf a; sleep 1; printf b; sleep 1; echo; echo c", ["ab\nc\n"]),
    ]


def check_events(kind: Kind, events: list[dict[str, Any]]) -> None:
    """Fail unless these are all events of a kind, in order."""
    found = joined(events)
    if kind.reasons:
        (error,) = found.pop()
        assert error["type"] == "evaluation_error", (kind.name, error)
        assert error["reason"] in kind.reasons, (kind.name, error)
    same = found == kind.printed
    assert same, (kind.name, _describe(found, kind.printed))


def _describe(found: list[Any], printed: list[Any]) -> Any:
    """Return the first difference."""
    if len(found) != len(printed):
        return len(found), len(printed), [str(each)[:200] for each in found]
    one, other = next(pair for pair in zip(found, printed, strict=True) if pair[0] != pair[1])
    if not isinstance(one, str) or not isinstance(other, str):
        return str(one)[:200], str(other)[:200]
    at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), -1)
    return (
        len(one),
        len(other),
        at,
        one[max(0, at - 50) : at + 50],
        other[max(0, at - 50) : at + 50],
    )
