"""`web.server.limits`: how many connections there may be."""

from __future__ import annotations

from twisted.internet.address import IPv4Address, UNIXAddress
from twisted.internet.interfaces import IAddress

from tawebeval.config import Configuration, HttpSettings
from tests.cases.web import RawTestCase
from tests.fakes.clients import Connection

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def ipv4(last: int) -> IPv4Address:
    """Return an address."""
    return IPv4Address("TCP", f"192.0.2.{last}", 1)


class ConnectionsTestCase(RawTestCase):
    configuration = Configuration(http=HttpSettings(connections=5, connections_per_address=2))

    def connect_from(self, address: IAddress) -> Connection:
        return self.service.connect(address)

    def check_open(self, connection: Connection) -> None:
        connection.send(HEALTH)
        self.assertEqual(connection.answer().status, 200)

    def check_turned_away(self, connection: Connection) -> None:
        self.assertEqual(connection.received, b"")
        connection.send(HEALTH)
        answer = connection.answer()
        self.check_raw(answer, 503)
        self.assertEqual(answer.headers["Retry-After"], "5")
        self.assertTrue(connection.closed)
        connection.lose()


class ConnectionsTests(ConnectionsTestCase):
    def test_each_address_has_its_own_connections(self) -> None:
        first = [self.connect_from(ipv4(1)) for _ in range(2)]
        self.check_turned_away(self.connect_from(ipv4(1)))
        self.check_open(self.connect_from(ipv4(2)))
        for connection in first:
            self.check_open(connection)
        first[0].lose()
        self.check_open(self.connect_from(ipv4(1)))
        self.check_turned_away(self.connect_from(ipv4(1)))

    def test_connections_are_bounded_in_all_with_unix_sockets(self) -> None:
        unix = UNIXAddress("/run/x")
        connections = [self.connect_from(unix) for _ in range(4)]
        connections.append(self.connect_from(ipv4(1)))
        for address in (unix, ipv4(1), ipv4(2)):
            self.check_turned_away(self.connect_from(address))
        connections[0].lose()
        self.check_open(self.connect_from(ipv4(2)))

    def test_silent_connection_over_the_limit_is_ended_soon(self) -> None:
        for _ in range(2):
            self.connect_from(ipv4(1))
        connection = self.connect_from(ipv4(1))
        self.service.reactor.advance(5)
        self.assertTrue(connection.aborted)

    def test_many_connections_over_the_limit_are_ended_at_once(self) -> None:
        for _ in range(2):
            self.connect_from(ipv4(1))
        waiting = [self.connect_from(ipv4(1)) for _ in range(64)]
        self.assertFalse(any(connection.aborted for connection in waiting))
        connection = self.connect_from(ipv4(1))
        self.assertTrue(connection.aborted)
        connection.lose()
        for connection in waiting:
            connection.lose()
        self.check_turned_away(self.connect_from(ipv4(1)))

    def test_clients_that_have_gone_leave_nothing(self) -> None:
        for last in range(50):
            connection = self.connect_from(ipv4(last))
            self.check_open(connection)
            connection.lose()
        self.assertEqual(self.service.site.connection_limits.connections_by_address_group, {})
        self.assertEqual(self.service.reactor.getDelayedCalls(), [])


class UnlimitedTests(ConnectionsTestCase):
    configuration = Configuration(http=HttpSettings(connections=5, connections_per_address=0))

    def test_all_clients_may_come_from_one_proxy(self) -> None:
        for _ in range(5):
            self.check_open(self.connect_from(ipv4(1)))
        self.check_turned_away(self.connect_from(ipv4(1)))
