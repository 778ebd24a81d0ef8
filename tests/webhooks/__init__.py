"""Tests of `tawebeval.webhooks`."""
