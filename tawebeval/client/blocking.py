"""The former name of `Client`."""

from tawebeval.client.sync_client import Client as BlockingClient

__all__ = ["BlockingClient"]
