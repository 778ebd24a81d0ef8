"""Tests of `tawebeval.archive`."""
