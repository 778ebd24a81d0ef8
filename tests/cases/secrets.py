"""Webhook secrets in the format of the secrets file."""

from __future__ import annotations

from base64 import b64encode

OLD, NEW = b"o" * 24, b"n" * 64


def format_secret(secret: bytes) -> str:
    """Format a secret for the secrets file."""
    return f"whsec_{b64encode(secret).decode()}"
