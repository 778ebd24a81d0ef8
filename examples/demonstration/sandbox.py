"""What evaluators run in here: the sandbox where it works, and otherwise none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

USUAL_PATH = "/usr/local/bin:/usr/bin:/bin"

NONE = """
# bubblewrap does not work on this machine.
[sandbox]
kind = "none"
"""

ELSEWHERE = """
# There is no python3 in /usr, which evaluators see: they are given the one of the demonstration.
[evaluations.environment]
PATH = {path}
"""

READABLE = """
[sandbox]
readable = [{prefix}]
"""


def why_none(tawebeval: Path, configuration: Path, environment: Mapping[str, str]) -> str | None:
    """Ask ``tawebeval doctor`` why the sandbox does not work; ``None`` where it does."""
    asked = subprocess.run(
        [str(tawebeval), "doctor", "--json", "--config", str(configuration)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    try:
        found = json.loads(asked.stdout)
    except ValueError:
        return None  # whatever it is, the daemon will say so
    for each in found:
        if each["part"] == "sandbox" and each["health"] == "broken":
            return f"{each['what']} ({each['remedy']})" if each["remedy"] else each["what"]
    return None


def settings_for_python(sandboxed: bool) -> str:
    """Let evaluators find a ``python3``; nothing need be said where there is one in /usr."""
    found = shutil.which("python3", path=USUAL_PATH)
    if found and os.path.realpath(found).startswith("/usr/"):
        return ""
    prefix = os.path.realpath(sys.base_prefix)
    settings = ELSEWHERE.format(path=quoted(f"{prefix}/bin:{USUAL_PATH}"))
    return settings + (READABLE.format(prefix=quoted(prefix)) if sandboxed else "")


def quoted(text: str) -> str:
    """Write a string as TOML does: JSON without escapes for what is not ASCII is that, too."""
    return json.dumps(text, ensure_ascii=False)
