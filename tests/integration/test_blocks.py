"""Blocks: data and files that real evaluators send, and what becomes of broken ones."""

from __future__ import annotations

from tests.integration.wire import blocks


class BlockTests(blocks.BlockCase):
    """Evaluators on this machine."""
