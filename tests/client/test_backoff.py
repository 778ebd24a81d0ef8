"""`tawebeval_client.backoff`: what an answer means, and when to try again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval_client.backoff import (
    Backoff,
    RequestOutcome,
    classify_http_status,
    parse_retry_after,
)

BACKOFFS = st.builds(
    Backoff,
    max_attempts=st.integers(1, 5000),
    first_delay_seconds=st.floats(1e-6, 1e9),
    max_delay_seconds=st.floats(1e-6, 1e9),
    max_retry_after_seconds=st.floats(0, 1e12),
)
CHANCES = st.floats(0, 1, exclude_max=True)


class VerdictTests(SynchronousTestCase):
    def test_response_statuses_mean_delivered_retry_or_refused(self) -> None:
        for status in (200, 201, 204, 299):
            self.assertIs(classify_http_status(status), RequestOutcome.ACCEPTED, status)
        for status in (408, 429, 500, 501, 503, 599):
            self.assertIs(classify_http_status(status), RequestOutcome.RETRY, status)
        for status in (199, 300, 301, 304, 307, 308, 400, 401, 403, 404, 410, 422, 499):
            self.assertIs(classify_http_status(status), RequestOutcome.REFUSED, status)


class RetryAfterTests(SynchronousTestCase):
    NOW = 784_111_777.0  # of which the dates below are

    def test_retry_after_is_seconds_or_a_date(self) -> None:
        for value, now, expected in (
            ("7", 0, 7),
            (" 07 ", 0, 7),
            ("9" * 9, 0, 999_999_999),
            ("9" * 5000, 0, 0),
            ("Sun, 06 Nov 1994 08:49:37 GMT", self.NOW - 5, 5),
            ("Sunday, 06-Nov-94 08:49:37 GMT", self.NOW - 5, 5),
            ("Sun Nov  6 08:49:37 1994", self.NOW - 5, 5),
            ("Sun, 06 Nov 1994 09:49:37 +0100", self.NOW - 5, 5),
            ("Sun, 06 Nov 1994 08:49:37 GMT", self.NOW + 5, 0),
            *((value, 0, 0) for value in ("", "-7", "1.5", "soon", "\N{SUPERSCRIPT TWO}")),
            ("Sun, 06 Nov 99999999 08:49:37 GMT", 0, 0),
        ):
            self.assertEqual(parse_retry_after(value.encode(), now), expected, value)

    @given(
        st.one_of(
            st.binary(), st.from_regex(r"[A-Z]{3}, [0-9]+ (Jan|Feb) [0-9]+ [0-9:]+ ?[0-9A-Z+-]*")
        )
    )
    def test_any_retry_after_header_becomes_0_or_more_seconds(self, value: str | bytes) -> None:
        header = value if isinstance(value, bytes) else value.encode()
        assert parse_retry_after(header, 0) >= 0


class BackoffTests(SynchronousTestCase):
    def test_delay_range_doubles_up_to_the_maximum_delay(self) -> None:
        backoff = Backoff(6, 5, 30)
        half = [backoff.draw_delay(made, 0.5) for made in range(1, 8)]
        self.assertEqual(half, [2.5, 5, 10, 15, 15, None, None])
        self.assertEqual(backoff.draw_delay(4, 0), 0)
        self.assertIsNone(Backoff(1, 5, 30).draw_delay(1, 0.5))

    def test_retry_after_is_added_to_the_delay_and_ends_the_retries_if_over_its_limit(self) -> None:
        backoff = Backoff(9, 4, 30, max_retry_after_seconds=600)
        self.assertEqual(backoff.draw_delay(1, 0.5, 10), 12)
        self.assertEqual(backoff.draw_delay(1, 0.5, 600), 602)
        self.assertIsNone(backoff.draw_delay(1, 0.5, 601))
        self.assertEqual(backoff.draw_delay(1, 0.5, -10), 2)

    @given(BACKOFFS, st.integers(1, 5000), CHANCES, st.floats(-1e12, 1e12))
    def test_delay_is_in_its_range_and_none_follows_the_last_attempt(
        self, backoff: Backoff, made: int, chance: float, asked: float
    ) -> None:
        delay = backoff.draw_delay(made, chance, asked)
        if made >= backoff.max_attempts or asked > backoff.max_retry_after_seconds:
            assert delay is None
            return
        assert delay is not None
        assert max(asked, 0) <= delay <= max(asked, 0) + backoff.max_delay_seconds

    @given(BACKOFFS, st.integers(1, 98), CHANCES, CHANCES)
    def test_delay_starts_at_0_and_its_range_never_shrinks(
        self, backoff: Backoff, made: int, one: float, other: float
    ) -> None:
        lesser, greater = sorted((one, other))
        delays = [backoff.draw_delay(made, chance) for chance in (0, lesser, greater)]
        if made < backoff.max_attempts:
            assert delays == sorted(delay for delay in delays if delay is not None)
            assert delays[0] == 0
        if made + 1 < backoff.max_attempts:
            assert (backoff.draw_delay(made, one) or 0) <= (backoff.draw_delay(made + 1, one) or 0)
