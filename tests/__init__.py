"""The tests of tawebeval; `python -m twisted.trial tests` runs them."""

import os

from hypothesis import settings

# No deadline: a slow machine is no defect. The same examples every time for the whole suite.
settings.register_profile(
    "tawebeval",
    deadline=None,
    max_examples=150,
    derandomize="TAWEBEVAL_SAME_EXAMPLES" in os.environ,
    database=None,
)
settings.load_profile("tawebeval")
