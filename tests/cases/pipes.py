"""A pipe, and a reactor for those that write to it."""

from __future__ import annotations

import os
from typing import Any

from twisted.trial.unittest import SynchronousTestCase


class FakeReactor:
    """A reactor that has the writers of a test."""

    def __init__(self) -> None:
        self.writers: set[Any] = set()

    def addWriter(self, writer: Any) -> None:
        """Note a writer."""
        self.writers.add(writer)

    def removeWriter(self, writer: Any) -> None:
        """Forget a writer."""
        self.writers.discard(writer)

    def removeReader(self, reader: Any) -> None:
        """Do nothing: nothing is read."""

    def write(self) -> None:
        """Let all writers write once."""
        for writer in list(self.writers):
            if reason := writer.doWrite():
                writer.connectionLost(reason)


class PipeCase(SynchronousTestCase):
    """A pipe whose write end does not block."""

    def setUp(self) -> None:
        self.reactor = FakeReactor()
        self.reading, self.writing = os.pipe()
        self.addCleanup(os.close, self.reading)
        os.set_blocking(self.reading, False)
        os.set_blocking(self.writing, False)

    def pump(self) -> bytes:
        """Let writers write, and return what has arrived."""
        arrived = bytearray()
        while self.reactor.writers:
            self.reactor.write()
            try:
                arrived += os.read(self.reading, 2**20)
            except BlockingIOError:
                break
        return bytes(arrived)
