"""`daemon.live`: which settings change while the daemon runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, CredentialSettings, Metrics
from tawebeval.daemon.live import LIVE, adopt, differences
from tests.test_config import settings_of

OPERATIONS = Path(__file__).resolve().parent.parent / "docs" / "operations.md"

SETTINGS = tuple(settings_of(Configuration))
BEFORE = Configuration(metrics=Metrics("tokens"))

# Where not any value of the same type will do.
OTHERS: dict[str, Any] = {
    "repositories.credentials": (CredentialSettings("h", "u", password_file="/p"),),
    "repositories.private_networks": ("10.0.0.0/8",),
    "callbacks.private_networks": ("10.0.0.0/8",),
    "http.base_path": "/judge",
    "http.trusted_proxies": ("10.0.0.1",),
    "metrics.readers": "nobody",
    "evaluations.environment": {"A": "b"},
}


def value(configuration: Configuration, path: str) -> Any:
    """Return what a setting is."""
    found: Any = configuration
    for name in path.split("."):
        found = getattr(found, name)
    return found


def changed(path: str) -> Configuration:
    """Return a configuration with another value of this setting."""
    before = value(BEFORE, path)
    if isinstance(before, bool):
        other: Any = not before
    elif isinstance(before, int | float):
        other = before + 1
    else:
        other = ("other",) if isinstance(before, tuple) else "other"
    section, _, key = path.rpartition(".")
    change = {key: OTHERS.get(path, other)}
    if section:
        change = {section: msgspec.structs.replace(value(BEFORE, section), **change)}
    return msgspec.structs.replace(BEFORE, **change)


class LiveTests(SynchronousTestCase):
    """What is taken of a file that was read again."""

    def test_settings(self) -> None:
        """Each change is found by its path; what is live is taken, and nothing else is."""
        taken = set()
        for path in SETTINGS:
            wanted = changed(path)
            self.assertEqual(list(differences(BEFORE, wanted)), [path])
            found = adopt(BEFORE, wanted)
            self.assertIn(found, (BEFORE, wanted))
            if found == wanted:
                taken.add(path)
        self.assertEqual(taken, LIVE)

    def test_documented(self) -> None:
        """The operator is told of the same ones."""
        head = "settings that count at once |\n| --- | --- |\n"
        _, _, below = OPERATIONS.read_text().partition(head)
        told = set()
        for row in below.partition("\n\n")[0].splitlines():
            _, sections, settings, _ = row.split("|")
            for section in re.findall(r"`\[(\w+)\]`", sections):
                every = [path for path in SETTINGS if path.startswith(f"{section}.")]
                named = [f"{section}.{key}" for key in re.findall(r"`(\w+)`", settings)]
                told.update(every if settings.strip() == "all" else named)
        self.assertEqual(told, LIVE)

    def test_several(self) -> None:
        """Of several changes in a section some are taken; what is only running stays."""
        wanted = msgspec.structs.replace(BEFORE, log=changed("log.level").log, listen=("tcp:1",))
        running = changed("http.connections")
        self.assertEqual(list(differences(BEFORE, wanted)), ["listen", "log.level"])
        found = adopt(running, wanted)
        self.assertEqual(found, msgspec.structs.replace(running, log=wanted.log))
