"""The sandbox settings of the demo: bubblewrap, or none where it does not work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from demonstration.unprivileged import user_options

USUAL_PATH = "/usr/local/bin:/usr/bin:/bin"

NONE = """
# bubblewrap does not work on this machine.
[sandbox]
kind = "none"
"""

ELSEWHERE = """
# Evaluators see only /usr, which has no python3 here: use the python3 of the demo.
[evaluations.environment]
PATH = {path}
"""

READABLE = """
[sandbox]
readable = [{prefix}]
"""


def why_none(tawebeval: Path, configuration: Path, environment: Mapping[str, str]) -> str | None:
    """Return why the sandbox does not work, by ``tawebeval doctor``; None if it works."""
    asked = subprocess.run(
        [tawebeval, "doctor", "--json", *user_options(), "--config", configuration],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    try:
        found = json.loads(asked.stdout)
    except ValueError:
        return None  # the daemon will report the fault
    for each in found:
        if each["part"] == "sandbox" and each["health"] == "broken":
            return f"{each['what']} ({each['remedy']})" if each["remedy"] else each["what"]
    return None


def settings_for_python(sandboxed: bool) -> str:
    """Return settings with which evaluators find a ``python3``; none if /usr has one."""
    found = shutil.which("python3", path=USUAL_PATH)
    if found and os.path.realpath(found).startswith("/usr/"):
        return ""
    prefix = os.path.realpath(sys.base_prefix)
    settings = ELSEWHERE.format(path=quoted(f"{prefix}/bin:{USUAL_PATH}"))
    return settings + (READABLE.format(prefix=quoted(prefix)) if sandboxed else "")


def quoted(text: str) -> str:
    """Return a TOML string: JSON without escapes of non-ASCII characters is one."""
    return json.dumps(text, ensure_ascii=False)
