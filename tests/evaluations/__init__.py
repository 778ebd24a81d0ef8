"""Tests of `tawebeval.evaluations`."""
