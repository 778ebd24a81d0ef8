"""A resolver of names whose answers a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from twisted.internet.defer import Deferred

from tawebeval.core.hosts import IPAddress


class FakeResolver:
    """Answers each look-up with the next of `answers`, of which the last stays.

    With `silent` it does not answer at all. `asked` are the names that were looked up.
    """

    def __init__(self, *answers: list[str] | Exception) -> None:
        self.answers = list(answers) or [["8.8.8.8"]]
        self.asked: list[str] = []
        self.silent = False

    async def look_up_host(self, host: str, caller: str = "") -> Sequence[IPAddress]:
        self.asked.append(host)
        if self.silent:
            await Deferred()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return [ip_address(address) for address in answer]
