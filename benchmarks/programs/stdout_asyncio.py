"""Baseline: a straightforward asyncio program. A dict and `json.dumps` for each event."""

from __future__ import annotations

import asyncio
import json

from benchmarks.programs.stopwatch import Stopwatch, arguments

_CAPACITY = 4 * 1024 * 1024
_LINE = 1024 * 1024


async def store(argv: list[str], stopwatch: Stopwatch) -> None:
    """Run the writer and store the same events that we do, with a reader who keeps up."""
    process = await asyncio.create_subprocess_exec(
        *argv, env={}, stdout=asyncio.subprocess.PIPE, limit=_LINE
    )
    assert process.stdout is not None
    events: list[str] = []
    size = 0
    async for line in process.stdout:
        stopwatch.count(len(line))
        text = line.decode("utf-8", "replace")
        payloads = (text[:-1], "\n") if text.endswith("\n") else (text,)
        for payload in payloads:
            if payload:
                event = json.dumps({"type": "text", "payload": payload})
                events.append(event)
                size += len(event)
        if size >= _CAPACITY / 2:
            events.clear()
            size = 0
    await process.wait()


def main() -> None:
    """Store, and report."""
    argv, total = arguments()
    stopwatch = Stopwatch()
    asyncio.run(store(argv, stopwatch))
    stopwatch.report(total)


if __name__ == "__main__":
    main()
