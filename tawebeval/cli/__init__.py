"""The command `tawebeval`."""

from tawebeval.cli.group import main

__all__ = ["main"]
