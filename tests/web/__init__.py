"""Tests of `tawebeval.web`."""
