"""All settings by name, the example configuration, and a valid credential."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tawebeval.config import Section
from tests.run import ROOT

EXAMPLE = ROOT / "etc" / "tawebeval.toml"

CREDENTIAL = "[[repositories.credentials]]\nhost = 'h'\nusername = 'u'\npassword_file = '/p'\n"


def list_settings(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the path of every setting, those of a table after the table's own name."""
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from list_settings(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name
