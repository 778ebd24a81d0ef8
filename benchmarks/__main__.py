"""`python -m benchmarks [NAME...] [--rounds N] [--write]`."""

from __future__ import annotations

import argparse
import compileall
import resource
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import disk, machine, report
from benchmarks.measure import CannotRun, NotMeasured, Row
from benchmarks.rows import BENCHMARKS

_ROUNDS = 5


def main() -> None:
    """Measure, print, and write if that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which ones: {', '.join(BENCHMARKS)}"
    )
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help=f"default: {_ROUNDS}")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write {report.DOCUMENT.name}; with NAME only its rows",
    )
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}")
    if options.rounds < 1 or (options.write and options.rounds < _ROUNDS):
        parser.error(f"too few rounds; --write takes {_ROUNDS}")
    old = report.read() if options.write and options.names else None
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # what is started inherits it
    for package in ("tawebeval", "tawebeval_client"):  # as where they are installed
        compileall.compile_dir(Path(__file__).parent.parent / package, quiet=1)
    before = machine.load()
    with disk.fresh() as where:
        described = [*machine.describe(), where]
        print(*described, sep="\n", end="\n\n")
        results = _measure(options.names or BENCHMARKS, options.rounds)
    described.append(f"load average {before:.1f} before, {machine.load():.1f} after")
    table = report.table(results)
    print(report.text(table))
    print(f"\n{described[-1]}")
    if options.write:
        new = report.Page([*described, f"{options.rounds} rounds"], table[1:])
        report.write(new if old is None else report.renew(old, new, BENCHMARKS))


def _measure(names: Iterable[str], rounds: int) -> report.Results:
    results: dict[str, Sequence[Row | NotMeasured]] = {}
    for name in names:
        begin = time.monotonic()
        try:
            results[name] = BENCHMARKS[name](rounds)
        except CannotRun as error:
            results[name] = [NotMeasured(name, str(error))]
        except Exception as error:  # noqa: BLE001  (the others took half an hour)
            traceback.print_exc()
            results[name] = [NotMeasured(name, f"defect: {error!r}")]
        print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return results


if __name__ == "__main__":
    main()
