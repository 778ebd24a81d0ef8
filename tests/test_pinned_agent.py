"""`pinned_agent`: names are looked up in threads, each once, and not for ever."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address
from socket import AF_INET, AF_INET6, SOCK_STREAM, gaierror
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.hosts import HostPolicy, IPAddress, parse_server_address
from tawebeval.deferreds import FairQueue
from tawebeval.pinned_agent import CheckedResolver, LookupFailed, SystemResolver, UnknownHost
from tests.fakes.resolver import FakeResolver
from tests.fakes.world import SlowThreads

ERRORS = {name: getattr(socket, name) for name in dir(socket) if name.startswith("EAI_")}


class AddressesTests(SynchronousTestCase):
    """What becomes of the answers."""

    def find(self, answer: list[str] | Exception) -> Deferred[Sequence[IPAddress]]:
        """Look a host up, which is answered so."""
        target = parse_server_address("https://example.org/x")
        assert target is not None
        addresses = CheckedResolver(HostPolicy(), FakeResolver(answer), Clock())
        return Deferred.fromCoroutine(addresses.find_permitted_addresses(target))

    def test_all_public_addresses_of_a_name_are_returned(self) -> None:
        found = self.successResultOf(self.find(["8.8.8.8", "8.8.4.4"]))
        self.assertEqual(found, (ip_address("8.8.8.8"), ip_address("8.8.4.4")))

    def test_host_is_unknown_only_if_the_resolver_finds_no_such_name(self) -> None:
        unknown = {"EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY"}
        for name, number in ERRORS.items():
            expected = UnknownHost if name in unknown else LookupFailed
            error = self.failureResultOf(self.find(gaierror(number, "said so"))).value
            self.assertIs(type(error), expected, name)
            self.assertEqual("said so" in str(error), expected is LookupFailed)
        error = self.failureResultOf(self.find(OSError(24, "Too many open files"))).value
        self.assertIsInstance(error, LookupFailed)
        self.assertIn("Too many open files", str(error))

    def test_invalid_name_is_refused(self) -> None:
        error = UnicodeError("label empty or too long")
        self.failureResultOf(self.find(error), UnknownHost)


class SystemResolverTests(SynchronousTestCase):
    """Look-ups by the system, which is a fake."""

    def setUp(self) -> None:
        self.threads: Any = SlowThreads()
        self.resolver = SystemResolver(self.threads, FairQueue(8))
        self.asked: list[str] = []
        self.error: OSError | None = None
        self.patch(socket, "getaddrinfo", self.getaddrinfo)

    def getaddrinfo(self, host: str, port: None, *, type: int) -> list[Any]:  # noqa: A002
        """Answer as the system does."""
        self.assertEqual(type, SOCK_STREAM)
        self.asked.append(host)
        if self.error is not None:
            raise self.error
        return [
            (AF_INET, type, 6, "", ("8.8.8.8", 0)),
            (AF_INET6, type, 6, "", ("fe80::1%eth0", 0, 0, 2)),
        ]

    def look_up(self, host: str = "a.example", caller: str = "alice") -> Deferred[Any]:
        """Look a host up."""
        return Deferred.fromCoroutine(self.resolver.look_up_host(host, caller))

    def test_addresses_are_in_the_order_of_the_system(self) -> None:
        asked = self.look_up()
        self.assertNoResult(asked)
        self.threads.finish()
        expected = [ip_address("8.8.8.8"), ip_address("fe80::1%eth0")]
        self.assertEqual(self.successResultOf(asked), expected)

    def test_lookup_error_reaches_all_waiters(self) -> None:
        self.error = gaierror(socket.EAI_AGAIN, "later")
        asked = [self.look_up() for _ in range(2)]
        self.threads.finish()
        for one in asked:
            self.failureResultOf(one, gaierror)

    def test_simultaneous_lookups_of_one_name_call_the_resolver_once(self) -> None:
        asked = [self.look_up() for _ in range(3)]
        other = self.look_up("b.example")
        self.threads.finish()
        for one in (*asked, other):
            self.successResultOf(one)
        self.assertEqual(self.asked, ["a.example", "b.example"])
        self.look_up()
        self.threads.finish()
        self.assertEqual(len(self.asked), 3)

    def test_lookup_does_not_join_a_queued_lookup_of_another_caller(self) -> None:
        self.resolver = SystemResolver(self.threads, FairQueue(2, running_per_caller=1))
        self.look_up("silent.example")
        waiting = self.look_up()
        other = self.look_up(caller="bob")
        self.threads.waiting.pop()()
        self.successResultOf(other)
        self.assertNoResult(waiting)
        self.threads.finish()
        self.successResultOf(waiting)

    def test_cancelled_lookup_leaves_the_answer_to_others(self) -> None:
        first, second = self.look_up(), self.look_up()
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.threads.finish()
        self.successResultOf(second)

    def test_abandoned_lookup_is_not_made(self) -> None:
        asked = self.look_up()
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        again = self.look_up()
        self.threads.step()
        self.assertEqual(self.asked, [])
        self.threads.step()
        self.assertEqual(self.asked, ["a.example"])
        self.successResultOf(again)

    def test_slow_lookup_is_not_begun_twice(self) -> None:
        asked = [self.look_up()]
        asked[0].addErrback(lambda failure: failure.trap(CancelledError))

        def slow(host: str, port: None, *, type: int) -> list[Any]:  # noqa: A002
            asked[0].cancel()
            asked.append(self.look_up())
            return self.getaddrinfo(host, port, type=type)

        self.patch(socket, "getaddrinfo", slow)
        self.threads.finish()
        self.assertEqual(self.asked, ["a.example"])
        self.successResultOf(asked[1])
