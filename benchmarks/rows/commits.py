"""What 100,000 cached commits cost, 10,000 of them checked out, beside a hundredth and a tenth.

To fetch so many would take hours, so the cache is made:
packs with the objects of all commits, and for each commit its marker; and checkouts, of six small
files each. The usual `repositories.cache` has room for 10,000 checkouts of half a MiB. Memory is
the slope between the two caches. A start of the daemon counts until its first answer. A cold start
is that of a commit which neither cache has.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks import repositories
from benchmarks.client import Client
from benchmarks.daemon import COMMAND, SMALL, Daemon, daemon, give
from benchmarks.measure import Round, Row, interleave
from benchmarks.rows.lasting import measure_restart
from benchmarks.rows.start import WHAT, in_turn, start_row, time_evaluation

_FEW, _MANY = 1000, 100_000
_FEW_TREES, _MANY_TREES = 1000, 10_000
_COLD = 6  # in each round
_TARGETS = {"warm": 1.1, "cold": 1.1, "restart": 2.0}
_MEMORY_TARGET = 1.0  # KiB


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with _caches(rounds * _COLD) as (few, many, fresh):
        caches = {"few": few, "many": many}
        samples = interleave(
            rounds, {way: partial(measure_restart, one.ours) for way, one in caches.items()}
        )
        with ExitStack() as stack:
            clients = {way: stack.enter_context(Client(caches[way].ours.port)) for way in caches}
            warm = {way: partial(caches[way].start, clients[way]) for way in caches}
            ways = {
                "warm": partial(in_turn, warm),
                "cold": lambda: _start_cold(caches, clients, itertools.islice(fresh, _COLD)),
            }
            samples |= interleave(rounds, ways)
    what = f"{_MANY:,} commits cached, to {_FEW:,}"
    taken = zip(samples["many.memory"], samples["few.memory"], strict=True)
    trees = _MANY_TREES - _FEW_TREES
    return [
        Row(
            f"memory for each of {_MANY_TREES:,} checkouts, {_MANY:,} commits cached",
            "KiB",
            [(more - less) * 1024 / trees for more, less in taken],
            target=_MEMORY_TARGET,
            higher_is_better=False,
        ),
        Row(
            f"processor time of a start, {what}",
            "s",
            samples["many.time"],
            samples["few.time"],
            _TARGETS["restart"],
            higher_is_better=False,
        ),
        start_row(
            f"{WHAT}, no sandbox, {what}", samples, "warm.many", "warm.few", _TARGETS["warm"]
        ),
        start_row(f"cold start, {what}", samples, "cold.many", "cold.few", _TARGETS["cold"]),
    ]


class _Cache:
    """A daemon with a full cache; `known` is the commit that it has fetched itself."""

    def __init__(self, ours: Daemon, url: str, known: str) -> None:
        self.ours = ours
        self._url = url
        self._known = known
        with Client(ours.port) as client:
            self.start(client)
        (marker,) = ours.cache.glob(f"repositories/*/commits/{known}")
        self._markers = marker.parent
        self._repository = marker.parent.parent

    def start(self, client: Client, commit: str = "") -> float:
        """Evaluate a commit, the known one by default; return the seconds to the first event."""
        wanted = commit or self._known
        return time_evaluation(
            self.ours, client, lambda: client.evaluate(self._url, wanted, COMMAND)
        )

    def fill(self, packs: Iterable[Path], commits: Iterable[str], trees: int) -> None:
        """Add the objects, the commits (`OID TREE`), and checkouts of so many of these."""
        for pack in packs:
            shutil.copy(pack, self._repository / "objects" / "pack")
        # The trees differ in one file of a fixed size.
        marker = json.loads((self._markers / self._known).read_bytes())
        root = self._repository.parent
        (known,) = root.glob(f"{self._repository.stem}-{marker['tree_oid']}-*.tree")
        for number, commit in enumerate(commits):
            oid, tree = commit.split()
            changed = {**marker, "oid": oid, "tree_oid": tree}
            (self._markers / oid).write_text(json.dumps(changed))
            checkout = root / known.name.replace(marker["tree_oid"], tree)
            if number < trees and checkout != known:
                shutil.copytree(known, checkout)
        give(root)


@contextmanager
def _caches(cold: int) -> Iterator[tuple[_Cache, _Cache, Iterator[str]]]:
    """Yield the two caches, and commits that neither has."""
    with (
        TemporaryDirectory(prefix="tawebeval-benchmark-") as name,
        daemon() as one,
        daemon() as other,
    ):
        path = Path(name, "evaluator")
        path.parent.chmod(0o755)
        first = repositories.make(path, [_files(0), *map(_step, range(1, _FEW))])
        packs = [_packs(path)]
        more = repositories.add(path, map(_step, range(_FEW, _MANY)), first[-1])
        packs.append(_packs(path))
        url = f"file://{path}"
        few, many = (_Cache(ours, url, first[-1]) for ours in (one, other))
        history = ["git", "log", "--reverse", "--format=%H %T", "main"]
        commits = subprocess.check_output(history, cwd=path, text=True).splitlines()
        few.fill(packs[0], commits[:_FEW], _FEW_TREES)
        many.fill(packs[1], commits, _MANY_TREES)
        fresh = repositories.add(path, map(_step, range(_MANY, _MANY + cold)), more[-1])
        yield few, many, iter(fresh)


def _files(number: int) -> repositories.Files:
    return [*repositories.tree(SMALL), *_step(number)]


def _step(number: int) -> repositories.Files:
    return [("step", f"{number:09}")]


def _packs(path: Path) -> Sequence[Path]:
    return list(path.glob("objects/pack/pack-*"))


def _start_cold(
    caches: dict[str, _Cache], clients: dict[str, Client], commits: Iterator[str]
) -> Round:
    times: dict[str, list[float]] = {way: [] for way in caches}
    for number, commit in enumerate(commits):
        order = list(caches.items())
        # The second one finds the commit in the kernel's memory.
        for way, cache in order if number % 2 == 0 else reversed(order):
            times[way].append(cache.start(clients[way], commit) * 1e3)
    return {way: median(taken) for way, taken in times.items()}
