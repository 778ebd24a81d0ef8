"""Cold start: a commit that is not known yet, of a repository that is not, over smart HTTP.

From `POST /evaluate` to the first event, beside `git fetch --depth 1` by hand into a new bare
repository, and a check-out of its 250 files. Each is another URL of one repository, so another
place in the cache, and another commit. By hand `git init` is not counted and nothing is run. The
fetch alone has no row: nobody could run what it brings.

Tried without success: `core.fsync=none`, no reverse index, one thread for the index, no check of
objects, `checkout.workers`. After 1,000 fetches into one repository the next one takes 334 ms of
processor time in place of 42, so the cache drops repositories of about a hundred.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks import repositories
from benchmarks.client import Client
from benchmarks.daemon import COMMAND, LARGE, Daemon, daemon
from benchmarks.measure import Round, Row, interleave
from benchmarks.rows.start import time_evaluation
from benchmarks.running import server

_COMMITS = 1365
_STARTS = 3  # in each round
_WHAT = f"cold start, {_COMMITS:,} commits over smart HTTP"
_BY_HAND = "to `git fetch` and `git read-tree -u` by hand"

Places = Iterator[tuple[str, str]]
"""URLs and commits, each of them once."""


def measure(rounds: int) -> Sequence[Row]:
    """Return the row. Raises CannotRun."""
    with _places() as places, daemon(sandbox="auto") as ours, Client(ours.port) as client:
        ways = {
            "ours": partial(_ours, ours, client, places),
            "hand": partial(_by_hand, places),
        }
        samples = interleave(rounds, ways)
    times, hand = samples["ours.time"], samples["hand.time"]
    what = f"{_WHAT}, in the sandbox, {_BY_HAND}"
    return [Row(what, "ms", times, hand, higher_is_better=False)]


@contextmanager
def _places() -> Iterator[Places]:
    with TemporaryDirectory(prefix="tawebeval-benchmark-") as root:
        commits = repositories.make(Path(root, "evaluator"), repositories.history(_COMMITS, LARGE))
        with server("git_server", root) as site:
            yield (
                (f"http://127.0.0.1:{site.port}/{number}/evaluator", commits[-1 - number])
                for number in itertools.count()
            )


def _ours(ours: Daemon, client: Client, places: Places) -> Round:
    times = []
    for url, commit in itertools.islice(places, _STARTS):
        evaluate = partial(client.evaluate, url, commit, COMMAND)
        times.append(time_evaluation(ours, client, evaluate))
    return {"time": median(times) * 1e3}


def _by_hand(places: Places) -> Round:
    times = []
    for url, commit in itertools.islice(places, _STARTS):
        with TemporaryDirectory(prefix="tawebeval-benchmark-") as name:
            bare, tree = f"--git-dir={name}/bare", f"--work-tree={name}/tree"
            Path(name, "tree").mkdir()
            subprocess.run(["git", "init", "--quiet", "--bare", f"{name}/bare"], check=True)
            begin = time.perf_counter()
            subprocess.run(
                ["git", bare, "fetch", "--quiet", "--depth", "1", url, commit], check=True
            )
            subprocess.run(["git", bare, tree, "read-tree", "-u", "--reset", commit], check=True)
            times.append(time.perf_counter() - begin)
    return {"time": median(times) * 1e3}
