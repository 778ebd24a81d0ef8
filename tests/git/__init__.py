"""Tests of `tawebeval.git`."""
