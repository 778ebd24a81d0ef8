"""All settings by name, the example configuration, and a valid credential."""

from __future__ import annotations

from collections.abc import Iterator
from types import new_class
from typing import Any, TypeVar

import msgspec

from tawebeval.config import Section
from tests.run import ROOT

EXAMPLE = ROOT / "etc" / "tawebeval.toml"

Table = TypeVar("Table", bound=Section)

CREDENTIAL = "[[repositories.credentials]]\nhost = 'h'\nusername = 'u'\npassword_file = '/p'\n"


def list_settings(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the path of every setting, those of a table after the table's own name."""
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from list_settings(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def with_constants(section: type[Table], **constants: Any) -> type[Table]:
    """Return a section of the configuration with other values of its constants."""
    return new_class(
        section.__name__, (section,), {"frozen": True}, lambda names: names.update(constants)
    )


def read_setting(section: Section, path: str) -> Any:
    """Return the value of the setting at a path."""
    found: Any = section
    for key in path.split("."):
        found = getattr(found, key)
    return found
