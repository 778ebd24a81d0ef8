"""Tests of `tawebeval.core`."""
