"""Tests of `tawebeval.web.server`."""
