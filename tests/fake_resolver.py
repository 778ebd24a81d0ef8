"""A resolver of names whose answers a test chooses."""

from __future__ import annotations

from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.interfaces import IHostnameResolver
from zope.interface import implementer


@implementer(IHostnameResolver)
class FakeResolver:
    """Answers each look-up with the next of `answers`, of which the last stays.

    With `silent` it does not answer at all. `asked` are the names that were looked up.
    """

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers) or [["8.8.8.8"]]
        self.asked: list[str] = []
        self.silent = False

    def resolveHostName(
        self, resolutionReceiver: Any, hostName: str, portNumber: int = 0, *_: Any, **__: Any
    ) -> Any:
        """Answer at once."""
        self.asked.append(hostName)
        if self.silent:
            return
        resolutionReceiver.resolutionBegan(None)
        for address in self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]:
            kind = IPv6Address if ":" in address else IPv4Address
            resolutionReceiver.addressResolved(kind("TCP", address, portNumber))
        resolutionReceiver.resolutionComplete()
