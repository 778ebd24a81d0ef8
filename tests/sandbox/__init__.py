"""Tests of `tawebeval.sandbox`."""
