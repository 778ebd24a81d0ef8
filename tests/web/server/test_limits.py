"""`web.server.channel`: connections, and the addresses that they count for."""

from __future__ import annotations

from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.interfaces import IAddress
from twisted.logger import LogEvent, capturedLogs

from tawebeval.config import Configuration, HttpSettings, LogSettings
from tawebeval.core.hosts import TrustedProxies
from tawebeval.errors import Unauthorized
from tests.cases.web import PROXY, SETTINGS, RawTestCase, WebTestCase
from tests.fakes.clients import MULTIPART, Connection, form, parts

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def ipv4(last: int) -> IPv4Address:
    """Return an address."""
    return IPv4Address("TCP", f"192.0.2.{last}", 1)


class ConnectionsTestCase(RawTestCase):
    configuration = Configuration(http=HttpSettings(connections=5, connections_per_address=2))

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
        first = [self.service.connect(ipv4(1)) for _ in range(2)]
        self.check_turned_away(self.service.connect(ipv4(1)))
        self.check_open(self.service.connect(ipv4(2)))
        for connection in first:
            self.check_open(connection)
        first[0].lose()
        self.check_open(self.service.connect(ipv4(1)))
        self.check_turned_away(self.service.connect(ipv4(1)))

    def test_unix_socket_connections_count_towards_the_total_limit(self) -> None:
        unix = UNIXAddress("/run/x")
        connections = [self.service.connect(unix) for _ in range(4)]
        connections.append(self.service.connect(ipv4(1)))
        for address in (unix, ipv4(1), ipv4(2)):
            self.check_turned_away(self.service.connect(address))
        connections[0].lose()
        self.check_open(self.service.connect(ipv4(2)))

    def test_silent_connection_over_the_limit_is_ended_soon(self) -> None:
        for _ in range(2):
            self.service.connect(ipv4(1))
        connection = self.service.connect(ipv4(1))
        self.service.reactor.advance(5)
        self.assertTrue(connection.aborted)

    def test_many_connections_over_the_limit_are_ended_at_once(self) -> None:
        for _ in range(2):
            self.service.connect(ipv4(1))
        waiting = [self.service.connect(ipv4(1)) for _ in range(64)]
        self.assertFalse(any(connection.aborted for connection in waiting))
        connection = self.service.connect(ipv4(1))
        self.assertTrue(connection.aborted)
        connection.lose()
        for connection in waiting:
            connection.lose()
        self.check_turned_away(self.service.connect(ipv4(1)))

    def test_closed_connections_leave_no_count_and_no_timer(self) -> None:
        for last in range(50):
            connection = self.service.connect(ipv4(last))
            self.check_open(connection)
            connection.lose()
        self.assertEqual(self.service.site.counts_by_address, {})
        self.assertEqual(self.service.reactor.getDelayedCalls(), [])


class UnlimitedTests(ConnectionsTestCase):
    configuration = Configuration(http=HttpSettings(connections=5, connections_per_address=0))

    def test_limit_of_0_per_address_allows_all_connections_from_one_address(self) -> None:
        for _ in range(5):
            self.check_open(self.service.connect(ipv4(1)))
        self.check_turned_away(self.service.connect(ipv4(1)))


STRANGER = IPv4Address("TCP", "192.0.2.1", 1)


class PeerTests(WebTestCase):
    def test_peer_is_identified_with_its_address_and_as_a_proxy_if_trusted(self) -> None:
        for trusted, address, peer in (
            ("10.0.0.1", STRANGER, ("192.0.2.1", False)),
            ("10.0.0.1", IPv6Address("TCP", "2001:db8::1%eth0", 1), ("2001:db8::1", False)),
            ("10.0.0.1", UNIXAddress("/run/x"), ("", False)),
            ("10.0.0.1", None, ("", False)),
            ("10.0.0.1", IPv4Address("TCP", "10.0.0.1", 1), ("10.0.0.1", True)),
            ("10.0.0.1", IPv6Address("TCP", "::ffff:10.0.0.1", 1), ("10.0.0.1", True)),
            ("unix", UNIXAddress(None), ("", True)),
            ("unix", None, ("", False)),
            ("unix", STRANGER, ("192.0.2.1", False)),
        ):
            self.service.site.proxies = TrustedProxies.parse((trusted,))
            self.assertEqual(self.service.site.identify_peer(address), peer)


class ProxiedTestCase(RawTestCase):
    configuration = Configuration(http=SETTINGS, log=LogSettings(access=True))

    def setUp(self) -> None:
        super().setUp()
        self.service.site.request_log.is_enabled = True
        self.identifier = self.evaluate()

    def send(self, connection: Connection, query: str = "", **headers: str) -> None:
        connection.request(f"GET /evaluation/{self.identifier}/events{query}", **headers)

    def logged(self, *asked: Any, **headers: str) -> list[str]:
        """Return which clients the access log has of a request."""
        events: list[LogEvent]
        with capturedLogs() as events:
            self.send(*asked, **headers)
        return [event["client"] for event in events if "took" in event]


class LogTests(ProxiedTestCase):
    def test_logged_client_is_the_last_untrusted_address_in_x_forwarded_for_of_a_proxy(
        self,
    ) -> None:
        proxied = self.service.connect(PROXY)
        for address, header, said, client in (
            (PROXY, "X_Forwarded_For", "192.0.2.7", "192.0.2.7"),
            (PROXY, "X_Forwarded_For", "198.51.100.1, 192.0.2.8", "192.0.2.8"),
            (PROXY, "X_Forwarded_For", "192.0.2.7, 10.0.0.1", "192.0.2.7"),
            (PROXY, "X_Forwarded_For", "unknown", "-"),
            (PROXY, "Forwarded", "192.0.2.9", "10.0.0.1"),
            (PROXY, "X_Real_IP", "192.0.2.9", "10.0.0.1"),
            (STRANGER, "X_Forwarded_For", "192.0.2.9", "192.0.2.1"),
            (STRANGER, "Forwarded", "192.0.2.9", "192.0.2.1"),
            (UNIXAddress(None), "X_Forwarded_For", "192.0.2.9", "-"),
        ):
            connection = proxied if address is PROXY else self.service.connect(address)
            self.assertEqual(self.logged(connection, **{header: said}), [client], said)
            self.assertEqual(connection.answer().status, 200)

    def test_malformed_x_forwarded_for_is_400_and_logged_with_the_proxy_address(self) -> None:
        connection = self.service.connect(PROXY)
        self.assertEqual(self.logged(connection, X_Forwarded_For="me"), ["10.0.0.1"])
        problem = self.check_raw(connection.answer(), 400).json()
        self.assertTrue(problem["detail"].startswith("X-Forwarded-For: 'me' is not an IP address"))


class LimitTests(ProxiedTestCase):
    """How many requests a client behind a proxy may have at once."""

    def wait(self, client: str, address: IAddress = PROXY) -> Connection:
        """Return a connection on which a client waits for events."""
        connection = self.service.connect(address)
        self.send(connection, "?wait=20", X_Forwarded_For=client)
        return connection

    def test_each_client_of_a_proxy_has_two_requests_at_once(self) -> None:
        first = [self.wait("192.0.2.7") for _ in range(2)]
        other = self.wait("192.0.2.8")
        for connection in (*first, other):
            self.assertEqual(connection.received, b"")
        third = self.wait("192.0.2.7")
        answer = third.answer()
        self.check_raw(answer, 503)
        self.assertEqual(answer.headers["Retry-After"], "5")
        first.pop().lose()
        self.send(third, "?wait=20", X_Forwarded_For="192.0.2.7")
        self.assertEqual(third.received, b"")
        self.child.print(b"a\n")
        for connection in (*first, other, third):
            self.assertEqual(connection.answer().status, 200)
            connection.lose()
        self.identifier = self.evaluate()
        self.assertEqual(self.service.site.counts_by_address, {})

    def test_connections_through_a_proxy_are_bounded_in_all(self) -> None:
        for number in range(6):
            self.wait(f"192.0.2.{number}", True)
        connection = self.wait("192.0.2.99", True)
        self.check_raw(connection.answer(), 503)

    def test_form_counts_as_a_concurrent_request_until_answered_or_aborted(self) -> None:
        for fails in ("", "no", "gone"):
            connection = self.service.connect(PROXY)
            body = form(parts(commit_oid=b"x") if fails == "no" else parts())
            connection.request(
                "POST /evaluate",
                body[: -1 if fails == "gone" else None],
                Content_Type=MULTIPART,
                Content_Length=str(len(body)),
                X_Forwarded_For="192.0.2.7",
            )
            if fails == "gone":
                self.assertEqual(self.service.site.counts_by_address, {"192.0.2.7": 1})
            connection.lose()
            self.assertEqual(self.service.site.counts_by_address, {})

    def test_request_refused_with_401_does_not_count_as_concurrent(self) -> None:
        def refuse(*_: object) -> str:
            raise Unauthorized("no")

        self.patch(type(self.service.context.authenticator), "authenticate_request", refuse)
        connection = self.wait("192.0.2.7")
        self.check_raw(connection.answer(), 401)
        self.assertEqual(self.service.site.counts_by_address, {})

    def test_request_over_the_concurrent_request_limit_uses_up_no_rate(self) -> None:
        asked: list[object] = []
        access = self.service.context.authenticator
        admit = type(access).authenticate_request

        def count(self: Any, *arguments: Any) -> str:
            asked.append(arguments)
            return admit(self, *arguments)

        self.patch(type(access), "authenticate_request", count)
        held = [self.wait("192.0.2.7") for _ in range(3)]
        self.assertEqual(len(asked), 2)
        asked.clear()
        for connection in held:
            connection.lose()
