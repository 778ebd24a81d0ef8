"""How long tests wait for what has to happen, on machines that are slow or stand still for a while.

Nobody waits as long where all is well: these are what a defect costs.
"""

import os

PATIENCE = float(os.environ.get("TAWEBEVAL_PATIENCE", "120"))
"""Seconds for one thing: an answer, a program's start or its end."""

# CI ends after less than an hour, without a word of what it waited for.
LONG_PATIENCE = 600.0 if "CI" in os.environ else 1800.0
"""Seconds for many things: a whole test, an installation."""
