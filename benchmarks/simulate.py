"""`python -m benchmarks.simulate [--seed N] [--write]`.

A contest's last five minutes, simulated: the daemon's own registry and queue, on nodes and a clock
that are not real (`benchmarks.simulated`). It prints the tables of docs/scale.md, which are the
same for a seed, and fails if the page has others; `--write` writes them there. A last table has
real costs of the daemon.
"""

from __future__ import annotations

import argparse
import gc
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import msgspec
from twisted.internet.defer import Deferred
from twisted.logger import globalLogBeginner
from twisted.python.failure import Failure

from benchmarks.measure import percentile
from benchmarks.report import markdown, text
from benchmarks.simulated import Costs, EventClock, SimulatedDaemon
from tawebeval.config import Configuration
from tawebeval.core.events import ALL_RECEIVED_CURSOR
from tawebeval.deferreds import FairQueue
from tawebeval.errors import EvaluationExpired, EvaluationNotFound, RequestError, ServerBusy
from tawebeval_client.operations import REQUEST_BACKOFF

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
_BEGIN, _END = (
    "<!-- By `make simulate` from here. -->\n",
    "<!-- By `make simulate` up to here. -->\n",
)

_SETTING = re.compile(r"\(([a-z]+\.[a-z_]+)")
_POLL = 30.0  # seconds that a poll waits
_AGAIN = frozenset({"lost", "shutdown"})  # reasons of ends after which clients submit again
_MOST_FAILURES = 100  # evaluations of one client
_FASTEST, _SLOWEST = 5.0, 15.0  # seconds of an evaluation
_AT_PEAK = 270.0  # seconds: a restart, when the queue is long
_AWAY = 1.1  # seconds of a restart, by `make bench`
_NODE_AWAY = 120.0  # seconds
_COUNTED = 1000  # evaluations of which the memory can be seen
# Seconds of the daemon's processor for a start, by `make bench`; and until srun(1) has started it.
SLURM = Costs(0.012, 0.048)

Table = list[tuple[str, ...]]


@attrs.frozen
class Scenario:
    """One simulation: forms by caller, which arrive in `seconds`, and what goes wrong."""

    name: str
    nodes: int = 200
    daemons: int = 1
    # Forms of each caller; by default each of so many callers has one.
    forms: Mapping[str, int] = attrs.field(
        factory=lambda: {f"caller{number}": 1 for number in range(10_000)}
    )
    seconds: float = 300
    settings: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict)
    lost_nodes: int = 0
    restarts: int = 0
    keeps: bool = True


_LARGE: Mapping[str, Mapping[str, int]] = {
    "evaluations": {"queued": 10_000},
    "http": {"connections": 12_000},
}

RUSH = (
    Scenario("the defaults", settings={}),
    Scenario("`evaluations.queued = 10000`, `http.connections = 12000`", settings=_LARGE),
    Scenario("… 20 nodes are lost, each for 2 minutes", settings=_LARGE, lost_nodes=20),
    Scenario("… a restart at 270 s, with a starter", settings=_LARGE, restarts=1),
    Scenario("… a restart at 270 s, without one", settings=_LARGE, restarts=1, keeps=False),
    Scenario("8 daemons, 25 nodes each, the defaults", daemons=8),
)
FAIRNESS = Scenario(
    "fairness",
    nodes=20,
    forms={"many": 500, **{f"caller{number}": 1 for number in range(500)}},
    seconds=60,
)


@attrs.define
class Outcome:
    """What has become of the clients of a scenario: `waits` are those of served ones, by caller.

    `refusals` are counted by the setting that was full; `first_refusal` is the first, with its
    time in seconds.
    """

    waits: dict[str, list[float]] = attrs.field(factory=dict)
    given_up: Counter[str] = attrs.field(factory=Counter)
    refusals: Counter[str] = attrs.field(factory=Counter)
    repeated: int = 0
    first_refusal: tuple[str, float] | None = None
    most_waiting: int = 0
    ended_at: float = 0.0

    @property
    def all_waits(self) -> list[float]:
        """The waits of all callers."""
        return [wait for waits in self.waits.values() for wait in waits]

    def note_refusal(self, detail: str, now: float) -> None:
        """Count a refusal."""
        found = _SETTING.search(detail)
        setting = found[1] if found else "the restart"
        self.refusals[setting] += 1
        if self.first_refusal is None:
            self.first_refusal = setting, now


@attrs.define
class Simulation:
    """The clients of a scenario, which behave as the client library, and the daemons."""

    scenario: Scenario
    seed: int
    clock: EventClock = attrs.field(factory=EventClock)
    outcome: Outcome = attrs.field(factory=Outcome)
    daemons: list[SimulatedDaemon] = attrs.field(init=False)
    _random: random.Random = attrs.field(init=False)
    _begun: dict[int, float] = attrs.field(factory=dict)
    _left: int = 0
    _defects: list[Failure] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        scenario = self.scenario
        self._random = random.Random(self.seed)
        callers = [caller for caller, forms in scenario.forms.items() for _ in range(forms)]
        seconds = {
            number: self._random.uniform(_FASTEST, _SLOWEST) for number in range(len(callers))
        }
        configuration = msgspec.convert(scenario.settings, Configuration)
        self.daemons = [
            SimulatedDaemon(
                self.clock,
                configuration,
                scenario.nodes // scenario.daemons,
                SLURM,
                random.Random(f"{self.seed} {number}"),
                seconds,
                self._note_begun,
            )
            for number in range(scenario.daemons)
        ]
        self._left = len(callers)
        for number, caller in enumerate(callers):
            # More and more clients come until the end of the contest.
            arrival = scenario.seconds * self._random.random() ** 0.5
            self.clock.callLater(arrival, self._begin_client, number, caller)
        for _ in range(scenario.lost_nodes):
            moment, chance = self._random.uniform(60, 300), self._random.random()
            daemon = self._random.choice(self.daemons)
            self.clock.callLater(moment, daemon.cluster.lose_node, chance, _NODE_AWAY)
        if scenario.restarts:
            for daemon in self.daemons:
                self.clock.callLater(_AT_PEAK, self._restart, daemon)

    def run(self) -> Outcome:
        """Return what has become of all clients."""
        self.clock.run_until(lambda: bool(self._defects) or not self._left)
        for failure in self._defects:
            failure.raiseException()
        for daemon in self.daemons:
            daemon.stop()
        self.outcome.ended_at = self.clock.seconds()
        return self.outcome

    def _restart(self, daemon: SimulatedDaemon) -> None:
        self._start(daemon.restart(_AWAY, keeps=self.scenario.keeps))

    def _begin_client(self, number: int, caller: str) -> None:
        self._start(self._run_client(number, caller))

    def _start(self, coroutine: Coroutine[Deferred[Any], Any, None]) -> None:
        Deferred.fromCoroutine(coroutine).addErrback(self._defects.append)

    def _note_begun(self, number: int) -> None:
        self._begun[number] = self.clock.seconds()

    async def _run_client(self, number: int, caller: str) -> None:
        began = self.clock.seconds()
        daemon = self.daemons[random.Random(number).randrange(len(self.daemons))]
        failures = 0
        while identifier := await self._submit(daemon, number, caller):
            if await self._follow(daemon, identifier, caller) in _AGAIN:
                self.outcome.repeated += 1
                failures += 1
                assert failures < _MOST_FAILURES, "no evaluation goes on: a defect, see the log"
                continue
            self.outcome.waits.setdefault(caller, []).append(self._begun[number] - began)
            break
        else:
            self.outcome.given_up[caller] += 1
        self._left -= 1

    async def _submit(self, daemon: SimulatedDaemon, number: int, caller: str) -> str | None:
        """Return the identifier, None after too many attempts."""
        made = 0
        while True:
            made += 1
            asked = 0
            try:
                identifier = daemon.accept(number, caller)
            except ServerBusy as error:
                asked = error.retry_after
                self.outcome.note_refusal(error.detail, self.clock.seconds())
            except ConnectionRefusedError:
                self.outcome.note_refusal("", self.clock.seconds())
            else:
                waiting = sum(each.registry.run_queue.waiter_count for each in self.daemons)
                self.outcome.most_waiting = max(self.outcome.most_waiting, waiting)
                return identifier
            delay = REQUEST_BACKOFF.draw_delay(made, self._random.random(), asked)
            if delay is None:
                return None
            await self.clock.sleep(delay)

    async def _follow(self, daemon: SimulatedDaemon, identifier: str, caller: str) -> str | None:
        """Read all events, and return the reason of a failure."""
        cursor: str | None = None
        while True:
            registry = daemon.registry
            try:
                with daemon.connect():
                    page = registry.events.read_page_now(identifier, cursor, caller)
                    if not page.has_events_or_is_last:
                        page = await registry.events.read_page(
                            identifier, cursor, caller, wait_seconds=_POLL
                        )
            except (EvaluationExpired, EvaluationNotFound):
                return "lost"
            except (RequestError, ConnectionRefusedError) as error:
                detail = error.detail if isinstance(error, RequestError) else ""
                self.outcome.note_refusal(detail, self.clock.seconds())
                await self.clock.sleep(5 + 10 * self._random.random())
                continue
            cursor = page.end_cursor
            if page.is_last_page:
                failure = registry.get_status(identifier, caller)["error"]
                registry.events.read_page_now(identifier, ALL_RECEIVED_CURSOR, caller)
                return None if failure is None else str(failure["reason"])


def make_rush_table(outcomes: Mapping[str, Outcome]) -> Table:
    """Return what has become of 10,000 forms, in each of several scenarios."""
    rows: Table = [
        (
            "10,000 people, 200 nodes",
            "wait, median, s",
            "p95, s",
            "p99, s",
            "longest, s",
            "served",
            "gave up",
            "refused",
            "refused first by",
        )
    ]
    for name, outcome in outcomes.items():
        waits = outcome.all_waits
        first = outcome.first_refusal
        rows.append(
            (
                name,
                *_list_waits(waits),
                f"{len(waits):,}",
                f"{outcome.given_up.total():,}",
                f"{outcome.refusals.total():,}",
                f"{_quote(first[0])} at {first[1]:.0f} s" if first else "nothing",
            )
        )
    return rows


def make_fairness_table(outcome: Outcome) -> Table:
    """Return what has become of a caller with many forms, beside many callers with one each."""
    rows: Table = [
        ("caller", "wait, median, s", "p95, s", "p99, s", "longest, s", "served", "gave up")
    ]
    many = outcome.waits.get("many", [])
    others = [wait for name, waits in outcome.waits.items() if name != "many" for wait in waits]
    given_up = outcome.given_up["many"]
    for name, waits, lost in (
        ("500 callers with one form each", others, outcome.given_up.total() - given_up),
        ("one caller with 500 forms", many, given_up),
    ):
        rows.append((name, *_list_waits(waits), f"{len(waits):,}", f"{lost:,}"))
    return rows


def _list_waits(waits: Sequence[float]) -> tuple[str, str, str, str]:
    if not waits:
        return ("", "", "", "")
    median_, p95, p99 = (f"{percentile(waits, percent):.0f}" for percent in (50, 95, 99))
    return median_, p95, p99, f"{max(waits):.0f}"


def _quote(name: str) -> str:
    return f"`{name}`" if "." in name else name


def measure_costs(waiting: int) -> dict[str, float]:
    """Return the real costs with so many waiting callers: seconds of processor time, and bytes.

    By name; the daemon has 200 slots.
    """
    clock, slots = EventClock(), 200
    configuration = msgspec.convert(
        {"evaluations": {"queued": 10**6}, "http": {"connections": 10**6}}, Configuration
    )
    numbers = range(slots + waiting)
    daemon = SimulatedDaemon(
        clock, configuration, slots, SLURM, random.Random(1), dict.fromkeys(numbers, 1e6)
    )
    for number in range(slots):
        daemon.accept(number, str(number))
    clock.run_until(lambda: not clock.getDelayedCalls(), 60)
    gc.collect()
    resident = _read_resident_bytes()
    names: list[str] = []
    accepting = _time(
        lambda: names.append(daemon.accept(slots + len(names), str(len(names)))), waiting
    )
    gc.collect()
    resident = _read_resident_bytes() - resident
    registry = daemon.registry
    indexes = [number * waiting // 100 for number in range(100)]
    asked = iter([(names[index], str(index)) for index in indexes])
    positions = _time(lambda: registry.run_queue.find_waiter_position(next(asked)[0]), 100)
    asked = iter([(names[index], str(index)) for index in indexes])
    statuses = _time(lambda: registry.get_status(*next(asked)), 100)
    housekeeping = _time(registry.expire_evaluations, 5)
    daemon.stop()
    queue = FairQueue(slots, 10**6)
    for number in numbers:
        queue.acquire_slot(str(number), str(number))
    holders = iter(range(min(slots, waiting)))
    return {
        "accept a form": accepting,
        "release a slot, and give it to the next": _time(
            lambda: queue.release_slot(str(next(holders))), min(slots, waiting)
        ),
        "find a position in the queue": positions,
        "make a status": statuses,
        "look for what has expired, once a second": housekeeping,
        "memory of an evaluation that waits": resident / waiting,
    }


def _time(call: Callable[[], object], times: int) -> float:
    """Return the processor time of a call in seconds, the median of some."""
    took = []
    for _ in range(times):
        began = time.process_time()
        call()
        took.append(time.process_time() - began)
    return median(took)


def _read_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def make_costs_table(measured: Mapping[int, Mapping[str, float]]) -> Table:
    """Return the real costs by numbers of waiting callers."""
    rows: Table = [
        ("cost, with so many waiting callers", *(f"{count:,}" for count in measured), "")
    ]
    first, *_ = measured.values()
    for name in first:
        is_memory = name.startswith("memory")
        unit, factor = ("KiB", 1 / 1024) if is_memory else ("µs", 1e6)
        cells = (
            "" if is_memory and count < _COUNTED else f"{each[name] * factor:.1f}"
            for count, each in measured.items()
        )
        rows.append((name, *cells, unit))
    return rows


def find_tables(page: str) -> str:
    """Return what the page has from this program."""
    return page.partition(_BEGIN)[2].partition(_END)[0]


def main() -> None:
    """Simulate, print, and compare with the page or write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description="Simulate.")
    parser.add_argument("--seed", type=int, default=1, help="default: 1, the page's")
    parser.add_argument(
        "--write", action="store_true", help=f"write the tables into {DOCUMENT.name}"
    )
    options = parser.parse_args()
    globalLogBeginner.beginLoggingTo([], discardBuffer=True, redirectStandardIO=False)
    outcomes = {}
    for scenario in RUSH:
        outcomes[scenario.name] = _simulate(scenario, options.seed)
    simulated = [make_rush_table(outcomes), make_fairness_table(_simulate(FAIRNESS, options.seed))]
    costs = make_costs_table({count: measure_costs(count) for count in (100, 10_000)})
    for table in (*simulated, costs):
        print(text(table), end="\n\n")
    if options.seed != 1:
        return
    page = DOCUMENT.read_text("utf-8")
    written = "".join(f"\n{_render(table)}\n" for table in simulated) + "\n"
    if options.write:
        before, after = page.partition(_BEGIN)[0], page.partition(_END)[2]
        DOCUMENT.write_text(before + _BEGIN + written + _END + after, "utf-8")
    elif any(_render(table) not in page for table in simulated):
        sys.exit(f"{DOCUMENT} has other figures; write these by: make simulate WRITE=1")


def _render(table: Table) -> str:
    """Return a table in Markdown; its second column has figures."""
    return markdown(table).replace("| --- | --- |", "| --- | ---: |", 1)


def _simulate(scenario: Scenario, seed: int) -> Outcome:
    began = time.monotonic()
    outcome = Simulation(scenario, seed).run()
    print(
        f"{scenario.name}: at most {outcome.most_waiting:,} waited, {outcome.repeated:,} submitted"
        f" again, refused {dict(outcome.refusals)}, over after {outcome.ended_at:.0f} s;"
        f" simulated in {time.monotonic() - began:.0f} s",
        file=sys.stderr,
    )
    return outcome


if __name__ == "__main__":
    main()
