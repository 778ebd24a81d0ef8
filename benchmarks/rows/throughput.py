"""Evaluations per second in the sandbox, warm, 64 clients at once, and the daemon's part of it.

Each client begins an evaluation, reads it to its end, and begins the next one. As many run at once
as there are processors, which is the default. The evaluator is `/bin/echo`, so the processor time
is the least that an evaluation takes. What the kernel does in nobody's name, such as removing
namespaces, is not counted.

Tried without success: a slot that becomes free before the daemon reads the usage. Three slots on
two processors: a tenth more, but evaluators share processors. The file system of the state matters:
ext4 without a journal takes a third of all processor time, and with `discard` the removal of a
directory takes up to 4 ms.

By perf, py-spy and the accounts of threads and processes, without cgroups. Of all:

- the daemon's reactor 25 %: requests 19 % of it (Klein 4), reading stdout 17, start 15, end 15,
  waking readers 12, sending to sockets 9, to threads 7, log 6
- the daemon's threads 16 %: work and uploads three quarters, SQLite a fifth. An evaluation changes
  threads eight times, each 25 µs on an idle daemon
- the starter 11 %: page faults, since a fork shares its memory, 30 % of it, messages 25
- bwrap and what it starts 48 %: the starter's child 15 % of it (280 page faults), the first process
  15, the command's shell 12, 9 mounts of the workspace 12, network namespace 10, overlay 8,
  9 mounts of /etc 6, filters 4

Of the daemon's part without the starter 62 % are the interpreter's, 11 futexes and the changes of
threads, 10 the making and removing of 24 files and directories.

Tried and not kept, with the milliseconds of processor time that an evaluation saved:

- `ON CONFLICT DO UPDATE` in place of `INSERT OR REPLACE`, and an exclusively locked database: 0.03
- one mount of a prepared directory in place of those of /etc: 0.2, for copies that have to follow
  the machine's files
- bwrap's own first process in place of the shell: 0.5, but evaluators could read it and write to it
- no files of Python for `/proc/PID/stat` and the user namespace: 10 of the 280 page faults
- removal of a directory by nftw(3), one call without the interpreter's lock in place of some
  hundred: 0.05 of 0.55, and nothing beside a busy thread: the time is the file system's
- no message to the starter for the state of a program that was just started, and none to close
  pipes that are closed: 0.1 together
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.conversations import Conversation, Conversations, identifier, read_to_the_end
from benchmarks.daemon import COMMAND, MANY_CONNECTIONS, Daemon, daemon
from benchmarks.measure import Round, Row, interleave
from benchmarks.running import Server

CLIENTS = 64
EACH = 2
"""Evaluations of each client, one after the other."""

_DAEMON_TARGET, _SANDBOX_TARGET = 4.0, 7.0  # ms
_PATIENCE = 60.0
_WAIT = 30


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon(sandbox="auto", more=MANY_CONNECTIONS) as ours:
        samples = interleave(rounds, {"ours": lambda: _spend(ours)})
    return [
        Row(f"evaluations in the sandbox, {CLIENTS} clients", "1/s", samples["ours.rate"]),
        Row(
            "… the daemon's processor time for one",
            "ms",
            samples["ours.daemon"],
            target=_DAEMON_TARGET,
            higher_is_better=False,
        ),
        Row("… the sandbox's", "ms", samples["ours.rest"], None, _SANDBOX_TARGET, False),
    ]


def _spend(ours: Daemon) -> Round:
    """Return the rate, and the milliseconds of processor time for an evaluation."""
    begun = _own_time(ours), _sandbox_time(ours)
    measured = rush(ours)
    spent = _own_time(ours) - begun[0], _sandbox_time(ours) - begun[1]
    own, rest = (seconds * 1e3 / (CLIENTS * EACH) for seconds in spent)
    return {**measured, "daemon": own, "rest": rest}


def _own_time(ours: Daemon) -> float:
    """Return the seconds that it has spent, with the starter, which lives as long."""
    children = [Server(pid, ours.port) for pid in ours.children()]
    return ours.processor_time() + sum(child.processor_time() for child in children)


def _sandbox_time(ours: Daemon) -> float:
    """Return the seconds of the processes that it and the starter have waited for."""
    waiting = [ours, *(Server(pid, ours.port) for pid in ours.children())]
    return sum(each.descendants_time() for each in waiting)


def rush(ours: Daemon, clients: int = CLIENTS) -> Round:
    """Let all clients do what they do; return evaluations per second."""
    with Conversations(ours.port) as conversations:
        begin = time.perf_counter()
        for _ in range(clients):
            conversations.begin(_evaluations(ours))
        conversations.finish(_PATIENCE)
        return {"rate": clients * EACH / (time.perf_counter() - begin)}


def _evaluations(ours: Daemon) -> Conversation:
    for _ in range(EACH):
        yield from read_to_the_end(identifier((yield ours.request(COMMAND))), _WAIT)
