"""Tests of `tawebeval.linux`."""
