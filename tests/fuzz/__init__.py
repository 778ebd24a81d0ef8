"""Property tests of what strangers send, and `make fuzz`, which tries them for longer.

Each `test_*.py` is a target: a class of hypothesis tests that the suite runs on some examples.
"""
