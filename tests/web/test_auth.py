"""`web.auth`: tokens and rates, origins."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.http_headers import Headers

from tawebeval.config import CallerSettings, MetricsSettings
from tawebeval.core.tokens import Token, generate_token
from tawebeval.errors import (
    AccessDenied,
    CallerQuotaExceeded,
    ConfigurationError,
    ForeignOrigin,
    Unauthorized,
)
from tawebeval.web.auth import (
    CROSS_ORIGIN_READ_REFUSAL,
    CROSS_ORIGIN_WRITE_REFUSAL,
    Authenticator,
    RateLimit,
    check_origin,
    find_metrics_token_file,
    find_token_file,
    read_token_file,
)
from tests.fakes.world import read_again


def token(caller: str, per_minute: int | None = None) -> Token:
    """Return a token, the same for the same arguments."""
    return Token(caller.encode(), caller, requests_per_minute=per_minute)


class ClosedPath(type(Path())):  # type: ignore[misc]
    """A file that this user cannot read, also if the user is root."""

    def read_text(self, *_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


class RateTests(SynchronousTestCase):
    def test_requests_of_a_token_with_its_own_rate_are_counted_separately(self) -> None:
        for limit in (0, 2):
            rate = RateLimit(limit, Clock().seconds)
            own = token("a", 1)
            rate.count_request(own)
            error = self.assertRaises(CallerQuotaExceeded, rate.count_request, own)
            self.assertIn("the limit is 1 per minute (rate of the token)", str(error))
            for _ in range(2):
                rate.count_request(token("a"))

    @given(st.integers(1, 1000), st.lists(st.floats(0, 90), max_size=60))
    def test_caller_that_waits_for_retry_after_is_admitted(
        self, per_minute: int, pauses: list[float]
    ) -> None:
        clock = Clock()
        rate = RateLimit(per_minute, clock.seconds)
        for _ in range(per_minute):
            rate.count_request(token("a"))
        for taken, pause in enumerate(pauses, 1):
            clock.advance(pause)
            try:
                rate.count_request(token("a"))
            except CallerQuotaExceeded as error:
                self.assertGreaterEqual(error.retry_after, 1)
                clock.advance(error.retry_after)
                rate.count_request(token("a"))
            self.assertLessEqual(taken, clock.seconds() * per_minute / 60 + 1e-6)


class AccessTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp()).absolute()
        self.alice, line = generate_token("alice", os.urandom)
        self.path.write_text(line)
        self.access = Authenticator(RateLimit(0, Clock().seconds), self.path)
        self.logged: list[str] = []

    def admit(self, token: str) -> str:
        return self.access.authenticate_request([b"Bearer " + token.encode()]).caller

    def reload(self) -> None:
        found = [(one.name, one.paths) for one in self.access.list_reloadable_files()]
        self.assertEqual(found, [("callers.tokens", (self.path,))])
        read_again(self.access)

    def test_read_only_token_permits_get_and_head_alone(self) -> None:
        reading, line = generate_token("alice", os.urandom, is_read_only=True)
        self.path.write_text(f"{self.path.read_text()}\n{line}")
        self.reload()
        headers = [b"Bearer " + reading.encode()]
        for method in (b"GET", b"HEAD"):
            self.assertEqual(self.access.authenticate_request(headers, method).caller, "alice")
        for method in (b"POST", b"DELETE"):
            self.assertRaises(AccessDenied, self.access.authenticate_request, headers, method)

    def test_every_caller_is_nameless_and_unlimited_without_a_token_file(self) -> None:
        access = Authenticator(RateLimit(1, Clock().seconds))
        self.assertTrue(access.is_token_optional)
        for headers in ([], [b"Bearer x"], [b"nonsense"]):
            self.assertEqual(access.authenticate_request(headers).caller, "")
        self.assertEqual(list(access.list_reloadable_files()), [])

    def test_reloaded_tokens_are_valid_only_once_applied(self) -> None:
        bob, line = generate_token("bob", os.urandom)
        self.path.write_text(line)
        (reloadable,) = self.access.list_reloadable_files()
        read = reloadable.read_files()
        self.assertRaises(Unauthorized, self.admit, bob)
        reloadable.apply_content(read)
        self.assertEqual(self.admit(bob), "bob")

    def test_broken_or_missing_file_changes_nothing_and_names_its_setting(self) -> None:
        self.path.write_text(f"# x\n{self.alice}\n")
        said = str(self.assertRaises(ConfigurationError, self.reload))
        self.assertTrue(said.startswith(f"callers.tokens: {self.path}: line 2"), said)
        self.assertNotIn(self.alice, said)
        self.path.write_bytes(b"\xff")
        self.assertIn("UTF-8", str(self.assertRaises(ConfigurationError, self.reload)))
        self.path.unlink()
        self.assertIn("No such file", str(self.assertRaises(ConfigurationError, self.reload)))
        self.assertEqual(self.admit(self.alice), "alice")
        self.assertFalse(self.access.is_token_optional)

    def test_broken_file_at_the_start_is_an_error_with_its_name(self) -> None:
        self.path.write_text("nonsense")
        error = self.assertRaises(
            ConfigurationError, Authenticator, RateLimit(0, Clock().seconds), self.path
        )
        self.assertIn(f"{self.path}: line 1", str(error))

    def test_requests_without_a_token_use_up_no_rate(self) -> None:
        self.access = Authenticator(RateLimit(1, Clock().seconds), self.path)
        for _ in range(3):
            self.assertRaises(Unauthorized, self.admit, "x")
        self.admit(self.alice)
        self.assertRaises(CallerQuotaExceeded, self.admit, self.alice)

    def test_configured_token_file_takes_precedence_over_the_systemd_credential(self) -> None:
        credentials = {"CREDENTIALS_DIRECTORY": str(self.path.parent)}
        for find, settings, name in (
            (find_token_file, CallerSettings, "tokens"),
            (find_metrics_token_file, MetricsSettings, "metrics-tokens"),
        ):
            given = self.path.parent / name
            for environment in ({}, credentials):
                self.assertIsNone(find(settings(), environment))
            given.touch()
            self.addCleanup(given.unlink)
            self.assertEqual(find(settings(), credentials), given)
            self.assertEqual(find(settings(tokens="/x"), credentials), Path("/x"))
            self.assertEqual(find(settings(tokens="x"), {}), Path.cwd() / "x")

    def test_unreadable_token_file_is_reported_with_a_remedy_for_its_source(self) -> None:
        closed = ClosedPath(self.path)
        with self.assertRaises(ConfigurationError) as caught:
            read_token_file(closed)
        self.assertIn("Permission denied; let the user ", str(caught.exception))
        self.patch(os, "environ", {"CREDENTIALS_DIRECTORY": str(closed.parent)})
        with self.assertRaises(ConfigurationError) as caught:
            read_token_file(closed)
        what, remedy = caught.exception.problem
        self.assertIn(f"systemd's copy (LoadCredential={closed.name}:FILE)", what)
        self.assertIn("name FILE in the configuration instead, and let the user ", remedy)

    def test_credential_directory_that_cannot_be_searched_is_an_error(self) -> None:
        self.path.touch()
        with self.assertRaises(ConfigurationError) as caught:
            find_token_file(CallerSettings(), {"CREDENTIALS_DIRECTORY": f"{self.path}{'x' * 300}"})
        self.assertIn("/tokens: cannot read the file: File name too long", str(caught.exception))


class OriginTests(SynchronousTestCase):
    def test_only_own_pages_named_origins_and_programs_are_allowed(self) -> None:
        origins = ("*", "https://judge.example.org")
        for origin, host, is_allowed in (
            (None, "localhost:8080", True),
            (None, "anything", True),
            (None, None, True),
            ("http://localhost:8080", "localhost:8080", True),
            ("http://localhost:8080", "LOCALHOST:8080", True),
            ("http://127.0.0.1", "127.0.0.1", True),
            ("http://[::1]:8080", "[::1]:8080", True),
            ("https://judge.example.org", "localhost:8080", True),
            ("https://example.org", "localhost:8080", False),
            ("http://localhost:8081", "localhost:8080", False),
            ("http://localhost", "localhost:8080", False),
            ("http://localhost:8080", None, False),
            ("http://example.org:8080", "example.org:8080", False),  # a name that leads here
            ("http://127.0.0.1.example.org:8080", "127.0.0.1.example.org:8080", False),
            ("null", "localhost:8080", False),
            ("", "", False),
        ):
            given = {"Origin": origin, "Host": host}
            headers = Headers({name: [value] for name, value in given.items() if value is not None})
            for refusal, words in (
                (CROSS_ORIGIN_WRITE_REFUSAL, "cannot submit or cancel"),
                (CROSS_ORIGIN_READ_REFUSAL, "cannot read this"),
            ):
                if is_allowed:
                    check_origin(headers, origins, refusal)
                else:
                    arguments = headers, origins, refusal
                    error = self.assertRaises(ForeignOrigin, check_origin, *arguments)
                    self.assertIn(words, str(error), given)
