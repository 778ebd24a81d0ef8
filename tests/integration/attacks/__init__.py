"""Attacks on the sandbox and its limits: the programs, and what must hold after each of them.

The programs are run by the system's Python, inside. Each prints what it came to, so that a test
of the product sees it fail, and a test of the product without one of its defences sees it
succeed.
"""
