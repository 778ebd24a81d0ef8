"""Fakes: what tests put in place of the world."""
