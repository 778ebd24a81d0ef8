"""Tests of `tawebeval.client`."""
