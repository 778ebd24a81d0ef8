"""`daemon.endpoints`: who reaches an endpoint, how it is opened, and remedies."""

from __future__ import annotations

import errno
import socket
from typing import Any

from twisted.internet import reactor
from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.error import CannotListenError
from twisted.internet.protocol import Factory
from twisted.trial.unittest import SynchronousTestCase, TestCase

from tawebeval.config import Configuration, HttpSettings
from tawebeval.daemon.endpoints import (
    build_page_url,
    explain_listen_error,
    find_exposed_endpoints,
    is_local_endpoint,
    make_listener,
)
from tawebeval.errors import ConfigurationError
from tests.cases.settings import with_constants


class ExposureTests(SynchronousTestCase):
    def test_loopback_and_unix_endpoints_are_local(self) -> None:
        for endpoint in (
            "tcp:8080:interface=127.0.0.1",
            "tcp:interface=127.1.2.3:port=1",
            "tcp:8080:interface=localhost",
            r"tcp6:8080:interface=\:\:1",
            r"tcp:8080:interface=\:\:1",
            "ssl:443:interface=127.0.0.1:privateKey=/x",
            "tcp:8080:interface=0.0.0.0:interface=127.0.0.1",
            "unix:/run/x",
        ):
            self.assertIs(is_local_endpoint(endpoint), True, endpoint)

    def test_inherited_sockets_are_of_unknown_exposure(self) -> None:
        endpoints = ("unix:/x", "systemd:domain=INET:index=0", "fd:fileno=3")
        found = list(find_exposed_endpoints(Configuration(listen=endpoints)))
        self.assertEqual([str(each).split()[9] for each in found], [*endpoints[1:]])

    def test_other_endpoints_and_lookalikes_are_refused_with_the_remedies(self) -> None:
        for endpoint in (
            "",
            "tcp:8080",
            "tcp:8080:interface=",
            "tcp:8080:interface=0.0.0.0",
            "tcp:8080:interface=10.0.0.1",
            "tcp:8080:interface=127.0.0.1.example.org",
            "tcp:8080:127.0.0.1",
            r"tcp6:8080:interface=\:\:",
            "tcp6:8080",
            "haproxy:tcp:8080:interface=127.0.0.1",
            "tcp:8080:interface=127.0.0.1:interface=0.0.0.0",
            r"tcp:8080:interface=127.0.0.1:inter\face=0.0.0.0",
            r"tcp:8080:interface\=127.0.0.1",
            r"tcp:8080:x=a\:interface=127.0.0.1",
            "onion:80:interface=127.0.0.1",
        ):
            self.assertIs(is_local_endpoint(endpoint), False, endpoint)
            with self.assertRaises(ConfigurationError) as caught:
                list(find_exposed_endpoints(Configuration(listen=("unix:/x", endpoint))))
            error = str(caught.exception)
            self.assertIn(repr(endpoint), error)
            for words in (
                "callers.open = true",
                "callers.tokens",
                "interface=127.0.0.1",
                "token add",
            ):
                self.assertIn(words, error)


class EndpointDescriptionTests(SynchronousTestCase):
    def test_tls_urls_are_https_and_ipv6_addresses_stand_in_brackets(self) -> None:
        for endpoint, address, url in (
            ("ssl:443", IPv4Address("TCP", "192.0.2.1", 443), "https://192.0.2.1:443/"),
            ("tcp6:80", IPv6Address("TCP", "::1", 80), "http://[::1]:80/"),
            ("tcp6:80", IPv6Address("TCP", "::", 80), "http://localhost:80/"),
        ):
            self.assertEqual(build_page_url(endpoint, address, ""), url)

    def test_endpoint_that_cannot_be_opened_has_a_remedy(self) -> None:
        for cause, words in (
            (OSError(errno.EADDRINUSE, "Address already in use"), "Address already in use"),
            (OSError("no such host"), "no such host"),
            ("Cannot acquire lock", "Cannot acquire lock"),
        ):
            said = explain_listen_error(CannotListenError("127.0.0.1", 80, cause))
            self.assertIn(words, said)
            self.assertTrue(said.endswith("by --listen or the setting listen"), said)


class ListenTests(TestCase):
    async def listen(self, endpoint: str, settings: HttpSettings) -> Any:
        listener = make_listener(endpoint, Factory(), reactor, settings)
        port: Any = await listener.endpoint.listen(Factory())
        self.addCleanup(port.stopListening)
        return port

    async def test_socket_without_tcp_is_listened_on(self) -> None:
        endpoint = f"unix:{self.mktemp()}"
        port = await self.listen(endpoint, HttpSettings())
        self.assertIsInstance(port.getHost(), UNIXAddress)

    async def test_kernel_ends_a_silent_connection_after_two_minutes_or_the_time_of_a_slow_upload(
        self,
    ) -> None:
        for settings, seconds in (
            (HttpSettings(), 120),
            (
                with_constants(HttpSettings, rate_window_seconds=10, min_bytes_per_second=1024)(),
                266,
            ),
        ):
            port = await self.listen("tcp:0:interface=127.0.0.1", settings)
            timeout = port.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            self.assertEqual(timeout, seconds * 1000)

    def test_missing_socket_of_systemd_has_a_remedy(self) -> None:
        for endpoint in ("systemd:domain=INET:index=0", "systemd:domain=INET:name=none"):
            said = str(
                self.assertRaises(
                    ConfigurationError, make_listener, endpoint, Factory(), reactor, HttpSettings()
                )
            )
            self.assertTrue(
                said.startswith(f"listen: systemd passes no socket for {endpoint!r}"), said
            )
            self.assertIn("tcp:8080", said)
