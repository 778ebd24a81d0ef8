"""`cli.interrupting`: what asks a command to end."""

from __future__ import annotations

import signal

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.interrupting import hold_out, interrupted, unwinding

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Inline:
    """A reactor that makes calls at once."""

    def callFromThread(self, call: object) -> None:
        """Make it."""
        assert callable(call)
        call()


class InterruptingTests(SynchronousTestCase):
    """Signals, which this process sends itself."""

    def setUp(self) -> None:
        before = {number: signal.getsignal(number) for number in NUMBERS}
        for number, known in before.items():
            self.addCleanup(signal.signal, number, known)
            signal.signal(number, signal.SIG_DFL)
        self.called: list[str] = []

    def call(self) -> None:
        """Note that it was made."""
        self.called.append("first")

    def again(self) -> None:
        """Note that it was made."""
        self.called.append("again")

    def test_first(self) -> None:
        """Each of the three makes the call, and leaves the next Ctrl-C to end the program."""
        for number, status in ((2, 130), (15, 143), (1, 129)):
            with interrupted(self.call, Inline()) as interruption:
                self.assertEqual(interruption.status(7), 7)
                signal.raise_signal(number)
                self.assertEqual(signal.getsignal(signal.SIGINT), signal.SIG_DFL)
                self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)
                signal.raise_signal(signal.SIGHUP)  # of which there are often two
            self.assertEqual(interruption.status(130), status)
            for each in NUMBERS:
                self.assertEqual(signal.getsignal(each), signal.SIG_DFL)
        self.assertEqual(self.called, ["first"] * 3)

    def test_again(self) -> None:
        """Where something has to be tidied up the next ones make another call."""
        with interrupted(self.call, Inline(), self.again):
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
        self.assertEqual(self.called, ["first", "again", "again"])

    def test_around(self) -> None:
        """What was heard within is known around it, where the call is not made."""
        with interrupted(self.again, Inline()) as outer:
            with interrupted(self.call, Inline()):
                signal.raise_signal(signal.SIGTERM)
            self.assertEqual(self.called, ["first"])
            self.assertEqual(outer.status(0), 143)
            signal.raise_signal(signal.SIGINT)
        self.assertEqual(self.called, ["first", "again"])

    def test_ignored(self) -> None:
        """Under nohup SIGHUP means nothing, before and after."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with unwinding(), interrupted(self.call, Inline()):
            signal.raise_signal(signal.SIGHUP)
        self.assertEqual(self.called, [])
        self.assertEqual(signal.getsignal(signal.SIGHUP), signal.SIG_IGN)

    def test_unwinding(self) -> None:
        """They unwind the stack, until it is time to hold out."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            with self.assertRaises(SystemExit) as caught, unwinding():
                try:
                    signal.raise_signal(number)
                finally:
                    hold_out()
                    for each in NUMBERS:
                        signal.raise_signal(each)
            self.assertEqual(caught.exception.code, 128 + number)
            for each in NUMBERS:
                self.assertEqual(signal.getsignal(each), signal.SIG_DFL)
