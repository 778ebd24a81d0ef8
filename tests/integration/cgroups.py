"""What tests of cgroups need of this machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tawebeval.linux.cgroups.filesystem import parse_cgroups_of_process


def reason_to_skip() -> str | None:
    """Tell why this machine's cgroups cannot be tested; None where they can."""
    if os.geteuid() != 0:
        return "only root can give cgroups to another user"
    texts = (Path(f"/proc/self/{name}").read_text() for name in ("mountinfo", "cgroup"))
    found = parse_cgroups_of_process(*texts)
    for own in (
        found.controller_paths.get("memory"),
        found.controller_paths.get("pids"),
        found.unified_path,
    ):
        if own is not None:
            try:
                os.rmdir(tempfile.mkdtemp(prefix="tawebeval-test-", dir=own))
            except OSError as error:
                return f"cgroups cannot be made here: {error}"
    if not {"memory", "pids"} <= found.controller_paths.keys() and found.unified_path is None:
        return "there are no cgroups for memory and processes here"
    return None
