"""The tests of tawebeval; `python -m twisted.trial tests` runs them."""

import os
import signal

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("TAWEBEVAL_EXAMPLES", "100"))
"""How many examples a property is tried on, unless it says otherwise."""

# No deadline: a slow machine is no defect. The same examples every time for the whole suite.
settings.register_profile(
    "tawebeval",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=EXAMPLES,
    derandomize="TAWEBEVAL_SAME_EXAMPLES" in os.environ,
    database=None,
)
settings.load_profile("tawebeval")

# Debian 13 gives ordinary users 002: others of their group could write to what tests make.
os.umask(0o022)

# A shell ignores SIGINT and SIGQUIT for what it starts by `&`, and `nohup` ignores SIGHUP; programs
# that tests start would inherit that. A handler goes on ignoring them here, and is not inherited.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)
