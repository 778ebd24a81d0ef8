"""`web.auth`: who may be able to ask a daemon without tokens."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase
from twisted.web.http_headers import Headers

from tawebeval.errors import ConfigurationError, ForeignOrigin
from tawebeval.web.auth import (
    CANNOT_READ,
    CANNOT_WRITE,
    check_origin,
    find_endpoints_of_unknown_exposure,
    is_local_endpoint,
)


class EndpointTests(SynchronousTestCase):
    def test_loopback_and_unix_endpoints_are_local(self) -> None:
        for endpoint in (
            "tcp:8080:interface=127.0.0.1",
            "tcp:interface=127.1.2.3:port=1",
            "tcp:8080:interface=localhost",
            r"tcp6:8080:interface=\:\:1",
            r"tcp:8080:interface=\:\:1",
            "ssl:443:interface=127.0.0.1:privateKey=/x",
            "haproxy:tcp:8080:interface=127.0.0.1",
            "tcp:8080:interface=0.0.0.0:interface=127.0.0.1",
            "unix:/run/x",
        ):
            self.assertIs(is_local_endpoint(endpoint), True, endpoint)

    def test_inherited_sockets_are_of_unknown_exposure(self) -> None:
        endpoints = ["unix:/x", "systemd:domain=INET:index=0", "fd:fileno=3"]
        self.assertEqual(find_endpoints_of_unknown_exposure(endpoints), endpoints[1:])

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
            "haproxy:tcp:8080",
            "tcp:8080:interface=127.0.0.1:interface=0.0.0.0",
            r"tcp:8080:interface=127.0.0.1:inter\face=0.0.0.0",
            r"tcp:8080:interface\=127.0.0.1",
            r"tcp:8080:x=a\:interface=127.0.0.1",
            "onion:80:interface=127.0.0.1",
        ):
            self.assertIs(is_local_endpoint(endpoint), False, endpoint)
            error = str(
                self.assertRaises(
                    ConfigurationError, find_endpoints_of_unknown_exposure, ["unix:/x", endpoint]
                )
            )
            self.assertIn(repr(endpoint), error)
            for words in (
                "callers.open = true",
                "callers.tokens",
                "interface=127.0.0.1",
                "token new",
            ):
                self.assertIn(words, error)


class PageTests(SynchronousTestCase):
    origins = ("*", "https://judge.example.org")

    def make_headers(self, origin: str | None, host: str | None) -> Headers:
        given = {"Origin": origin, "Host": host}
        return Headers({name: [value] for name, value in given.items() if value is not None})

    def change(self, origin: str | None, host: str | None) -> None:
        check_origin(self.make_headers(origin, host), self.origins, CANNOT_WRITE)

    def read(self, origin: str | None, host: str | None) -> None:
        check_origin(self.make_headers(origin, host), self.origins, CANNOT_READ)

    def test_own_pages_named_origins_and_programs_are_allowed(self) -> None:
        for origin, host in (
            (None, "localhost:8080"),
            (None, "anything"),
            (None, None),
            ("http://localhost:8080", "localhost:8080"),
            ("http://localhost:8080", "LOCALHOST:8080"),
            ("http://127.0.0.1", "127.0.0.1"),
            ("http://[::1]:8080", "[::1]:8080"),
            ("https://judge.example.org", "localhost:8080"),
        ):
            self.change(origin, host)
            self.read(origin, host)

    def test_other_pages_and_ambiguous_names_are_refused(self) -> None:
        for origin, host in (
            ("https://example.org", "localhost:8080"),
            ("http://localhost:8081", "localhost:8080"),
            ("http://localhost", "localhost:8080"),
            ("http://localhost:8080", None),
            ("http://example.org:8080", "example.org:8080"),  # a name that leads here
            ("http://127.0.0.1.example.org:8080", "127.0.0.1.example.org:8080"),
            ("null", "localhost:8080"),
            ("", ""),
        ):
            error = self.assertRaises(ForeignOrigin, self.change, origin, host)
            self.assertIn("cannot submit or cancel", str(error))
            error = self.assertRaises(ForeignOrigin, self.read, origin, host)
            self.assertIn("cannot read this", str(error))
            self.assertNotIn("tokens", str(error), "that holds with them, too")
