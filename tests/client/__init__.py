"""Tests of `tawebeval_client`."""
