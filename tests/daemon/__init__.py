"""Tests of `tawebeval.daemon`."""
