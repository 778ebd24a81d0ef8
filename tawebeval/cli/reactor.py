"""The reactor of `tawebeval try`, which signals interrupt."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, NoReturn

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from tawebeval.cli.output import OutputError, Screen
from tawebeval.cli.runtime import Interrupted, compute_exit_status, handle_signals, report_failure
from tawebeval.daemon.process_setup import reset_inherited_signals, use_monotonic_clock


def run_reactor(screen: Screen, work: Callable[[Any], Awaitable[int]]) -> NoReturn:
    """Run the reactor for `work(reactor)`, and exit with the status that it returns.

    Exceptions other than those of `await_exit_status` are raised.
    """
    # Imported late: it installs the reactor.
    from twisted.internet import reactor as installed

    reactor: Any = installed
    results: list[int | Failure] = []

    def begin() -> None:
        done = Deferred.fromCoroutine(await_exit_status(screen, work(reactor), reactor))
        done.addBoth(results.append).addBoth(lambda _: reactor.stop())

    use_monotonic_clock(reactor)
    reset_inherited_signals()
    reactor.callWhenRunning(begin)
    reactor.run(installSignalHandlers=False)
    (result,) = results
    if isinstance(result, Failure):
        result.raiseException()
    raise SystemExit(result)


async def await_exit_status(screen: Screen, work: Awaitable[int], reactor: Any) -> int:
    """Return the exit status of `work`; print why it failed.

    Each SIGINT, SIGTERM and SIGHUP cancels `work`, but a SIGHUP after another signal: the shell and
    the kernel may both send one.
    """
    received: list[int] = []

    async def whole() -> int:
        return await work

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number != signal.SIGHUP or len(received) == 1:
            reactor.callFromThread(lambda: deferred.cancel())

    with handle_signals(handle):
        deferred = Deferred.fromCoroutine(whole())
        try:
            status = await deferred
        except CancelledError:
            status = report_failure(Interrupted(), screen)
        except (OutputError, OSError) as error:
            status = report_failure(error, screen)
    return compute_exit_status(status, received)
