"""Settings of the configuration: the paths of all, and a sample of a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tawebeval.config import Section

EXAMPLE = Path(__file__).resolve().parents[2] / "etc" / "tawebeval.toml"

CREDENTIAL = "[[repositories.credentials]]\nhost = 'h'\nusername = 'u'\npassword_file = '/p'\n"


def list_settings(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the path of every setting, those of a table after the table's own name."""
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from list_settings(field.type, f"{field.name}.")
        else:
            yield prefix + field.name
