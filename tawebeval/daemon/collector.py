"""Python's collector of garbage, told not to look at what stays as long as the daemon.

It looks for objects that only refer to one another, and now and then at all that there are: tens
of thousands from modules alone, which takes as long as a start of an evaluation, and nothing else
is done meanwhile. What is there when the daemon begins is none of it.
"""

from __future__ import annotations

import gc


def pass_over_what_is_there() -> None:
    """Let it look only at objects that are made from now on. Blocks for some 30 ms."""
    gc.collect()  # what is garbage already would stay, too
    gc.freeze()
