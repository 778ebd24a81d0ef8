"""The 1,000th commit of a repository, beside the first one.

From `POST /evaluate` to the first event, of a commit that has to be fetched over smart HTTP. The
baseline is the first commit that is fetched by a new URL, so into a new place of the cache. Without
a sandbox, which would only add the same time to both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import repositories
from benchmarks.client import Client
from benchmarks.daemon import COMMAND, Daemon, daemon
from benchmarks.measure import Round, Row, interleave, percentile
from benchmarks.rows.start import time_evaluation
from benchmarks.running import server

_AGE = 1000
_FILES = 20
_STARTS = 9  # in each round
_TARGET = 1.5
_WHAT = f"cold start, commit {_AGE:,} of a repository to commit 1, p50"


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    more = _STARTS * rounds
    count = _AGE + more
    with TemporaryDirectory(prefix="tawebeval-benchmark-") as root:
        history = repositories.history(count, _FILES)
        commits = iter(repositories.make(Path(root, "evaluator"), history))
        with (
            server("git_server", root) as site,
            daemon() as ours,
            Client(ours.port) as client,
        ):
            urls = (f"http://127.0.0.1:{site.port}/{n}/evaluator" for n in itertools.count())
            aged = next(urls)
            for commit in itertools.islice(commits, _AGE - 1):
                _start(ours, client, aged, commit)
            later = list(itertools.islice(commits, more))
            ways = {
                "first": partial(_round, ours, client, zip(urls, itertools.cycle(later))),
                "later": partial(_round, ours, client, zip(itertools.repeat(aged), later)),
            }
            samples = interleave(rounds, ways)
    times, first = samples["later.p50"], samples["first.p50"]
    return [Row(_WHAT, "ms", times, first, _TARGET, higher_is_better=False)]


def _round(ours: Daemon, client: Client, places: Iterator[tuple[str, str]]) -> Round:
    times = [_start(ours, client, *place) for place in itertools.islice(places, _STARTS)]
    return {"p50": percentile(times, 50) * 1e3}


def _start(ours: Daemon, client: Client, url: str, commit: str) -> float:
    """Evaluate a commit; return the seconds to the first event."""
    return time_evaluation(ours, client, lambda: client.evaluate(url, commit, COMMAND))
