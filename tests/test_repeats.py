"""`daemon.repeats`: what Twisted says of each connection is said once."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon.repeats import Repeats

# As twisted.internet.tcp has them.
TWISTEDS = (
    "EMFILE encountered; releasing reserved file descriptor.",
    "EMFILE recovery: Closed socket from {address}",
    "Re-reserving EMFILE recovery file descriptor.",
    "Could not accept new connection ({acceptError})",
)


class RepeatsTests(SynchronousTestCase):
    """Events of Twisted's ports, and others."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(7)
        self.repeats = Repeats(self.clock.seconds)

    def hide(self, text: str | None, namespace: str = "twisted.internet.tcp.Port") -> bool:
        """Tell whether such an event is hidden."""
        return self.repeats.hide({"log_format": text, "log_namespace": namespace})

    def test_hidden(self) -> None:
        """All of them are, and once in a minute there is another in their place."""
        for seconds, told in ((0, 1), (59, 0), (2, 1), (1, 0)):
            self.clock.advance(seconds)
            with capturedLogs() as events:
                for text in TWISTEDS:
                    self.assertTrue(self.hide(text), text)
            said = [formatEvent(event) for event in events]
            self.assertEqual(len(said), told)
            self.assertTrue(all("no more file descriptors" in line for line in said))

    def test_others(self) -> None:
        """What else is said is seen, and also what others say in these words."""
        with capturedLogs() as events:
            for text in ("ApiSite starting on 8080", None, ""):
                self.assertFalse(self.hide(text))
            self.assertFalse(self.hide(TWISTEDS[0], "tawebeval.evaluations.evaluation"))
            self.assertFalse(self.repeats.hide({}))
        self.assertEqual(list(events), [])
