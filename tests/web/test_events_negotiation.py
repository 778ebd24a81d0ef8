"""`web.events`: which media type a client is given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.http_headers import Headers

from tawebeval.errors import NotAcceptable
from tawebeval.web.events import PAGE_MEDIA_TYPE, STREAM_FRAMINGS, negotiate_media_type

OFFERED = [PAGE_MEDIA_TYPE, *STREAM_FRAMINGS]
JSON, EVENTS, LINES, ND = OFFERED


def accept(*values: str) -> Headers:
    """Return headers in which these are accepted."""
    return Headers({b"Accept": [value.encode("latin-1") for value in values]} if values else {})


class NegotiationTests(SynchronousTestCase):
    def check(self, expected: str, *values: str) -> None:
        self.assertEqual(negotiate_media_type(accept(*values), OFFERED), expected, values)

    def test_without_a_preference_it_is_json(self) -> None:
        self.check(JSON)
        self.check(JSON, "")
        self.check(JSON, "*/*")
        self.check(JSON, "application/*")
        self.check(JSON, "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8")
        self.check(JSON, "application/json, text/plain, */*")
        self.check(JSON, "text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2")  # of Java
        self.check(JSON, "text/html, */*; q=.2")
        self.check(JSON, "*")

    def test_named_type_is_given_in_any_case_with_any_parameters(self) -> None:
        for offered in OFFERED:
            self.check(offered, offered)
            self.check(offered, offered.upper())
            self.check(offered, f"text/html, {offered}")
            self.check(offered, "text/html", offered)
            self.check(offered, f"{offered}; charset=utf-8")
            self.check(offered, f"{offered};charset=utf-8;q=0.1")

    def test_higher_quality_wins_in_any_order(self) -> None:
        self.check(EVENTS, f"{JSON};q=0.5, {EVENTS};q=0.6")
        self.check(EVENTS, f"{EVENTS};q=0.6, {JSON};q=0.5")
        self.check(JSON, f"{EVENTS};q=0.999, {JSON}")
        self.check(LINES, f"*/*;q=0.1, {LINES};q=0.2")

    def test_most_specific_range_counts(self) -> None:
        self.check(JSON, f"{EVENTS};q=0.1, */*;q=0.5")
        self.check(EVENTS, "application/*;q=0.1, */*;q=0.5")
        self.check(EVENTS, f"{JSON};q=0, */*")
        self.check(LINES, f"{JSON};q=0, {EVENTS};q=0, */*")

    def test_named_type_wins_over_a_range_and_then_the_earlier_offer(self) -> None:
        self.check(EVENTS, f"*/*, {EVENTS}")
        self.check(EVENTS, f"application/*, {EVENTS}")
        self.check(JSON, f"{EVENTS}, {JSON}")
        self.check(LINES, f"{ND}, {LINES}")

    def test_refusal_names_the_offers(self) -> None:
        for value in ("text/html", "text/*;q=0", "*/*;q=0", f"{JSON};q=0", "image/*, audio/ogg"):
            error = self.assertRaises(NotAcceptable, negotiate_media_type, accept(value), OFFERED)
            self.assertEqual(error.extra_members["offered"], ", ".join(OFFERED))
            for offered in OFFERED:
                self.assertIn(offered, str(error))

    def test_malformed_ranges_do_not_count(self) -> None:
        self.check(EVENTS, f"{EVENTS};q=0.1, {JSON};q=2, {LINES};q=x, {ND};q=-1")
        self.check(EVENTS, f"nonsense, */json, ;;;, {EVENTS}, \xff")

    @given(st.lists(st.text(st.characters(max_codepoint=255), max_size=40), max_size=3))
    def test_any_header_ends_in_an_offer_or_a_refusal(self, values: list[str]) -> None:
        values = [value.replace("\r", "").replace("\n", "") for value in values]
        try:
            found = negotiate_media_type(accept(*values), OFFERED)
        except NotAcceptable:
            return
        assert found in OFFERED
