"""Arguments that a server is to be sent."""

from __future__ import annotations

from typing import Any

import click


class Text(click.ParamType[str]):
    """Text that is UTF-8, which what a shell passes on need not be."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return it, or end with what is wrong."""
        try:
            str(value).encode()
        except UnicodeEncodeError:
            self.fail("must be UTF-8", param, ctx)
        return str(value)


TEXT = Text()
