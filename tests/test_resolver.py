"""`resolver`: names are looked up in threads, and not for ever."""

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
from tawebeval.resolver import CheckedResolver, LookupUnanswered, SystemResolver, UnknownHost
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
        return Deferred.fromCoroutine(addresses.find_addresses(target))

    def test_all_addresses_may_be_connected_to(self) -> None:
        found = self.successResultOf(self.find(["8.8.8.8", "8.8.4.4"]))
        self.assertEqual(found, (ip_address("8.8.8.8"), ip_address("8.8.4.4")))

    def test_missing_name_alone_is_a_fault_of_the_name(self) -> None:
        unknown = {"EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY"}
        for name, number in ERRORS.items():
            expected = UnknownHost if name in unknown else LookupUnanswered
            error = self.failureResultOf(self.find(gaierror(number, "said so"))).value
            self.assertIs(type(error), expected, name)
            self.assertEqual("said so" in str(error), expected is LookupUnanswered)
        error = self.failureResultOf(self.find(OSError(24, "Too many open files"))).value
        self.assertIsInstance(error, LookupUnanswered)
        self.assertIn("Too many open files", str(error))

    def test_invalid_name_is_refused(self) -> None:
        error = UnicodeError("label empty or too long")
        self.failureResultOf(self.find(error), UnknownHost)


class SystemResolverTests(SynchronousTestCase):
    """Look-ups by the system, which is a fake."""

    def setUp(self) -> None:
        self.threads: Any = SlowThreads()
        self.resolver = SystemResolver(self.threads)
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

    def look_up(self, host: str = "a.example") -> Deferred[Any]:
        """Look a host up."""
        return Deferred.fromCoroutine(self.resolver.look_up_host(host))

    def test_addresses_are_in_the_order_of_the_system(self) -> None:
        asked = self.look_up()
        self.assertNoResult(asked)
        self.threads.finish()
        expected = [ip_address("8.8.8.8"), ip_address("fe80::1%eth0")]
        self.assertEqual(self.successResultOf(asked), expected)

    def test_error_of_the_system_is_raised(self) -> None:
        self.error = gaierror(socket.EAI_AGAIN, "later")
        asked = self.look_up()
        self.threads.finish()
        self.failureResultOf(asked, gaierror)

    def test_cancelled_lookup_ends_before_its_thread(self) -> None:
        asked = self.look_up()
        asked.addErrback(lambda failure: failure.trap(CancelledError))

        def cancel(host: str, port: None, *, type: int) -> list[Any]:  # noqa: A002
            asked.cancel()
            self.successResultOf(asked)
            return self.getaddrinfo(host, port, type=type)

        self.patch(socket, "getaddrinfo", cancel)
        self.threads.finish()
        self.assertEqual(self.asked, ["a.example"])

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
