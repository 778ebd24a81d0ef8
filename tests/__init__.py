"""The tests of tawebeval; `python -m twisted.trial tests` runs them."""

import os

from hypothesis import settings

# No deadline: a slow machine is no defect. The same examples every time where nobody
# is there to keep one that failed.
settings.register_profile(
    "tawebeval", deadline=None, max_examples=150, derandomize="CI" in os.environ, database=None
)
settings.load_profile("tawebeval")
