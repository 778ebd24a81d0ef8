"""`cli.try_run`: the end of work in a reactor that signals interrupt."""

from __future__ import annotations

import signal

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.try_run import await_exit_status
from tests.cases.screen import Shown

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InlineReactor:
    """A reactor that makes calls at once."""

    def callFromThread(self, call: object) -> None:
        """Make the call."""
        assert callable(call)
        call()


class ExitStatusTests(SynchronousTestCase):
    """Work that signals of this process cancel."""

    def setUp(self) -> None:
        for number in NUMBERS:
            self.addCleanup(signal.signal, number, signal.getsignal(number))
            signal.signal(number, signal.SIG_DFL)

    def test_each_signal_cancels_again_and_the_first_decides_the_status(self) -> None:
        for first, status in ((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)):
            cancelled = 0

            async def work() -> int:
                nonlocal cancelled
                while cancelled < 3:
                    try:
                        await Deferred()
                    except CancelledError:
                        cancelled += 1
                return 0

            ending = Deferred.fromCoroutine(
                await_exit_status(Shown().screen, work(), InlineReactor())
            )
            for number in (first, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
            self.assertEqual(self.successResultOf(ending), status)
            for number in NUMBERS:
                self.assertEqual(signal.getsignal(number), signal.SIG_DFL)

    def test_interruption_and_unreadable_file_are_reported(self) -> None:
        async def wait() -> int:
            await Deferred()
            return 0

        async def read() -> int:
            raise PermissionError(13, "Permission denied", "a.py")

        shown = Shown()
        ending = Deferred.fromCoroutine(await_exit_status(shown.screen, wait(), InlineReactor()))
        signal.raise_signal(signal.SIGINT)
        self.assertEqual(self.successResultOf(ending), 130)
        ending = Deferred.fromCoroutine(await_exit_status(shown.screen, read(), InlineReactor()))
        self.assertEqual(self.successResultOf(ending), 2)
        self.assertEqual(shown.notes.getvalue(), "interrupted\na.py: Permission denied\n")
