"""Commands as documents show them, for tests that hold them to be true."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import attrs

from tests.run import ROOT

CONFIGURE = ROOT / "docs" / "configure.md"
INSTALL = ROOT / "docs" / "install.md"
OPERATE = ROOT / "docs" / "operate.md"

_BLOCK = re.compile(r"^ *```(sh|console)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_PROMPT = re.compile(r"^[#$] ", re.MULTILINE)
_CONTINUED = re.compile(r"\\\n *")


def find_blocks(document: Path, language: str) -> list[str]:
    """Return the blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", document.read_text("utf-8"), re.DOTALL)


def find_block(document: Path, language: str, words: str) -> str:
    """Return the one block of code in a language that has these words."""
    (found,) = (block for block in find_blocks(document, language) if words in block)
    return found


def run_script(script: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Return what a shell prints of a script of a document, which must succeed. Blocks."""
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@attrs.frozen
class Example:
    """A command, in words, and the lines that it is shown to print."""

    command: list[str]
    printed: list[str]


def examples(document: Path, program: str) -> list[Example]:
    """Return each command of a program's in the blocks of a document."""
    return [each for each in _examples(document) if each.command[:1] == [program]]


def doctors() -> list[Example]:
    """Return the documented commands that run the doctor as the service would."""
    return [each for each in examples(INSTALL, "systemd-run") if "doctor" in each.command]


def scripts(document: Path, heading: str) -> list[str]:
    """Return the `sh` blocks below a heading, up to the next heading."""
    _, _, below = document.read_text("utf-8").partition(f"# {heading}\n")
    section, *_ = re.split(r"^#{2,} ", below, maxsplit=1, flags=re.MULTILINE)
    return [block for kind, block in _BLOCK.findall(section) if kind == "sh"]


def drop_ins(document: Path) -> list[str]:
    """Return the `ini` blocks: changes of units."""
    found = re.findall(r"^( *)```ini\n(.*?)^ *```$", document.read_text("utf-8"), re.S | re.M)
    return [dedent(block) for _, block in found]


def _examples(document: Path) -> Iterator[Example]:
    for kind, block in _BLOCK.findall(document.read_text("utf-8")):
        whole = _CONTINUED.sub("", block)
        # In a shell's script each line is a command; at a console those behind a prompt are.
        for text in _PROMPT.split(whole)[1:] if kind == "console" else whole.splitlines():
            first, *printed = text.splitlines() or [""]
            yield Example(shlex.split(first, comments=True), printed)


def properties(command: list[str]) -> list[str]:
    """Return what a command of `systemd-run` sets: the words after each `-p`."""
    return [word for option, word in pairwise(command) if option == "-p"]
