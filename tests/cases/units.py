"""The units of systemd as they are shipped."""

from __future__ import annotations

import configparser

from tests.run import ROOT

UNITS = ROOT / "systemd"


def read_unit(name: str) -> configparser.ConfigParser:
    """Return the sections of a unit; of a repeated key the last value."""
    unit = configparser.ConfigParser(
        delimiters="=", comment_prefixes="#", interpolation=None, strict=False
    )
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((UNITS / name).read_text().replace("\\\n", " "))
    return unit
