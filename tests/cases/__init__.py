"""Test cases, and their fakes, that several test modules share."""
