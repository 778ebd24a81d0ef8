"""`web.server.limits`: who asks, over a connection of his own or a proxy's."""

from __future__ import annotations

from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.interfaces import IAddress
from twisted.logger import LogEvent, capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, HttpSettings, LogSettings
from tawebeval.errors import Unauthorized
from tawebeval.web.server.limits import ClientAddressResolver
from tests.cases.web import PROXY, SETTINGS, RawTestCase
from tests.fakes.clients import MULTIPART, Connection, form, parts

STRANGER = IPv4Address("TCP", "192.0.2.1", 1)


class PeerTests(SynchronousTestCase):
    """Who is at the other end of a connection."""

    def test_strangers(self) -> None:
        """Who is trusted by nobody counts by its address, which is the client's."""
        clients = ClientAddressResolver.from_settings(SETTINGS)
        for address, name, group in (
            (STRANGER, "192.0.2.1", "192.0.2.1"),
            (IPv6Address("TCP", "2001:db8::1%eth0", 1), "2001:db8::1", "2001:db8::"),
            (UNIXAddress("/run/x"), "", ""),
            (None, "", ""),
        ):
            peer = clients.identify_peer(address)
            self.assertEqual((peer.address, peer.address_group), (name, group))
            assert peer.direct_client is not None
            self.assertEqual(
                (peer.direct_client.address, peer.direct_client.address_group), (name, "")
            )

    def test_proxies(self) -> None:
        """Who is trusted counts for nobody, and says itself for whom it asks."""
        unix = ClientAddressResolver.from_settings(HttpSettings(trusted_proxies=("unix",)))
        mapped = IPv6Address("TCP", "::ffff:10.0.0.1", 1)
        for clients, address in (
            (ClientAddressResolver.from_settings(SETTINGS), PROXY),
            (ClientAddressResolver.from_settings(SETTINGS), mapped),
            (unix, UNIXAddress(None)),
        ):
            peer = clients.identify_peer(address)
            self.assertIsNone(peer.direct_client)
            self.assertEqual(peer.address_group, "")
        for address in (None, PROXY):
            self.assertIsNotNone(unix.identify_peer(address).direct_client)


class ProxiedTestCase(RawTestCase):
    """A service with a proxy before it."""

    configuration = Configuration(http=SETTINGS, log=LogSettings(access=True))

    def setUp(self) -> None:
        super().setUp()
        self.service.context.request_log.is_enabled = True
        self.identifier = self.evaluate()

    def from_(self, address: IAddress) -> Connection:
        """Return a connection from there."""
        return self.service.connect(address)

    def send(self, connection: Connection, query: str = "", **headers: str) -> None:
        """Ask for a page."""
        fields = "".join(
            f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()
        )
        path = f"/evaluation/{self.identifier}/events{query}"
        connection.send(f"GET {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n".encode())

    def logged(self, *asked: Any, **headers: str) -> list[str]:
        """Return which clients the access log has of a request."""
        events: list[LogEvent]
        with capturedLogs() as events:
            self.send(*asked, **headers)
        return [event["client"] for event in events if "took" in event]


class LogTests(ProxiedTestCase):
    """Whose address is in the access log."""

    def test_believed(self) -> None:
        """A proxy's word counts, on both roads; that of its client does not."""
        for said, client in (
            ("192.0.2.7", "192.0.2.7"),
            ("198.51.100.1, 192.0.2.7", "192.0.2.7"),
            ("192.0.2.7, 10.0.0.1", "192.0.2.7"),
            ("unknown", "-"),
            ("_hidden", "_hidden"),
        ):
            connection = self.from_(PROXY)
            asked = self.logged(connection, X_Forwarded_For=said)
            self.assertEqual(asked, [client], said)
            self.assertEqual(connection.answer().status, 200)
            connection.lose()

    def test_not_believed(self) -> None:
        """Nobody else is believed, nor is a header that the proxy does not write."""
        for address, header, client in (
            (STRANGER, "X_Forwarded_For", "192.0.2.1"),
            (STRANGER, "Forwarded", "192.0.2.1"),
            (PROXY, "Forwarded", "10.0.0.1"),
            (PROXY, "X_Real_IP", "10.0.0.1"),
            (UNIXAddress(None), "X_Forwarded_For", "-"),
        ):
            connection = self.from_(address)
            self.assertEqual(self.logged(connection, **{header: "192.0.2.9"}), [client])
            connection.lose()

    def test_each_request(self) -> None:
        """On one connection of a proxy each request may be another client's."""
        connection = self.from_(PROXY)
        for client in ("192.0.2.7", "192.0.2.8", "192.0.2.8", "192.0.2.7"):
            self.assertEqual(self.logged(connection, X_Forwarded_For=client), [client])
        connection.lose()

    def test_broken(self) -> None:
        """What a proxy should not write is refused, in its own name."""
        connection = self.from_(PROXY)
        self.assertEqual(self.logged(connection, X_Forwarded_For="me"), ["10.0.0.1"])
        problem = self.check_raw(connection.answer(), 400).json()
        self.assertTrue(problem["detail"].startswith("X-Forwarded-For: 'me' is not an IP address"))


class ForwardedTests(ProxiedTestCase):
    """A proxy that writes `Forwarded`."""

    configuration = Configuration(
        http=HttpSettings(trusted_proxies=("unix",), client_header="Forwarded"),
        log=LogSettings(access=True),
    )

    def test_believed(self) -> None:
        """It counts, over a UNIX socket here, and the other header does not."""
        connection = self.from_(UNIXAddress(None))
        headers = {"Forwarded": 'for="[2001:db8::7]:80"', "X_Forwarded_For": "192.0.2.9"}
        self.assertEqual(self.logged(connection, **headers), ["2001:db8::7"])
        connection.lose()


class LimitTests(ProxiedTestCase):
    """How many requests a client behind a proxy may have at once."""

    def wait(self, client: str, address: IAddress = PROXY) -> Connection:
        """Return a connection on which a client waits for events."""
        connection = self.from_(address)
        self.send(connection, "?wait=20", X_Forwarded_For=client)
        return connection

    def test_each_client(self) -> None:
        """The proxy has as many connections as it likes, and each client two requests at once."""
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
        self.assertEqual(self.service.site.connection_limits.connections_by_address_group, {})

    def test_in_all(self) -> None:
        """There are so many connections in all, the proxy's among them."""
        for number in range(6):
            self.wait(f"192.0.2.{number}", True)
        connection = self.wait("192.0.2.99", True)
        self.check_raw(connection.answer(), 503)

    def test_upload(self) -> None:
        """A form counts until it is answered, also one that is refused or broken off."""
        for fails in ("", "no", "gone"):
            connection = self.from_(PROXY)
            body = form(parts(commit_oid=b"x") if fails == "no" else parts())
            connection.request(
                "POST /evaluate",
                body[: -1 if fails == "gone" else None],
                Content_Type=MULTIPART,
                Content_Length=str(len(body)),
                X_Forwarded_For="192.0.2.7",
            )
            if fails == "gone":
                self.assertEqual(
                    self.service.site.connection_limits.connections_by_address_group,
                    {"192.0.2.7": 1},
                )
            connection.lose()
            self.assertEqual(self.service.site.connection_limits.connections_by_address_group, {})

    def test_refused(self) -> None:
        """Whoever is refused for want of a token counts no longer."""

        def refuse(*_: object) -> str:
            raise Unauthorized("no")

        self.patch(type(self.service.context.authentication), "authenticate_token", refuse)
        connection = self.wait("192.0.2.7")
        self.check_raw(connection.answer(), 401)
        self.assertEqual(self.service.site.connection_limits.connections_by_address_group, {})

    def test_tokens_come_later(self) -> None:
        """Whoever has too many requests does not use up a share by it."""
        asked: list[object] = []
        access = self.service.context.authentication
        admit = type(access).authenticate_token

        def count(self: Any, *arguments: Any) -> str:
            asked.append(arguments)
            return admit(self, *arguments)

        self.patch(type(access), "authenticate_token", count)
        held = [self.wait("192.0.2.7") for _ in range(3)]
        self.assertEqual(len(asked), 2)
        asked.clear()
        for connection in held:
            connection.lose()
