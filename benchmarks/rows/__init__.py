"""The benchmarks by name. Each measures a number of rounds and returns rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.measure import NotMeasured, Row
from benchmarks.rows import (
    aging,
    cold,
    commands,
    commits,
    crowd,
    delivery,
    floods,
    growth,
    idle,
    jsonl,
    lasting,
    latency,
    memory,
    peers,
    polls,
    restart,
    roots,
    sandbox,
    shares,
    slurm,
    start,
    stdout,
    throughput,
    turns,
    upload,
    workers,
)

Benchmark = Callable[[int], Sequence[Row | NotMeasured]]
"""Measures so many rounds. Raises CannotRun where something is missing for all of its rows."""

BENCHMARKS: dict[str, Benchmark] = {
    "stdout": stdout.measure,
    "floods": floods.measure,
    "delivery": delivery.measure,
    "jsonl": jsonl.measure,
    "polls": polls.measure,
    "latency": latency.measure,
    "turns": turns.measure,
    "start": start.measure,
    "sandbox": sandbox.measure,
    "shares": shares.measure,
    "throughput": throughput.measure,
    "peers": peers.measure,
    "cold": cold.measure,
    "aging": aging.measure,
    "growth": growth.measure,
    "commits": commits.measure,
    "roots": roots.measure,
    "memory": memory.measure,
    "idle": idle.measure,
    "crowd": crowd.measure,
    "upload": upload.measure,
    "workers": workers.measure,
    "commands": commands.measure,
    "restart": restart.measure,
    "lasting": lasting.measure,
    "slurm": slurm.measure,
}
