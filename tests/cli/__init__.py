"""Tests of `tawebeval.cli`."""
