"""`core.identifiers`: identifiers that prove where they were issued (contract, section 3)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.identifiers import (
    DAEMON_NAME_PATTERN,
    IDENTIFIER_PATTERN,
    SECRET_KEY_BYTES,
    IdentifierIssuer,
)

KEY = bytes(range(SECRET_KEY_BYTES))


def repeating(drawn: bytes) -> Callable[[int], bytes]:
    """Return a source of randomness that has none."""
    return lambda count: (drawn * count)[:count]


draws = st.binary(min_size=1, max_size=13)
names = st.just("") | st.from_regex(DAEMON_NAME_PATTERN, fullmatch=True)


class IssuedTests(SynchronousTestCase):
    def test_no_two_are_the_same_by_at_least_80_random_bits(self) -> None:
        asked: list[int] = []

        def random(count: int) -> bytes:
            asked.append(count)
            return os.urandom(count)

        identities = IdentifierIssuer(KEY, random)
        self.assertEqual(len({identities.issue_identifier() for _ in range(100)}), 100)
        self.assertGreaterEqual(min(asked) * 8, 80)

    @given(draws)
    def test_own_identifiers_are_recognised_after_a_restart(self, drawn: bytes) -> None:
        identifier = IdentifierIssuer(KEY, repeating(drawn)).issue_identifier()
        assert IdentifierIssuer(KEY, os.urandom).is_issued(identifier)

    @given(draws, st.binary(min_size=1, max_size=64))
    def test_identifiers_of_another_key_are_not_recognised(self, drawn: bytes, key: bytes) -> None:
        if key == KEY:
            return
        assert not IdentifierIssuer(KEY, os.urandom).is_issued(
            IdentifierIssuer(key, repeating(drawn)).issue_identifier()
        )

    @given(
        draws,
        st.integers(0, 39),
        st.one_of(st.text(max_size=2), st.sampled_from("aA=\u0131\u017f7-_")),
    )
    def test_changed_identifier_is_not_recognised(
        self, drawn: bytes, place: int, other: str
    ) -> None:
        identities = IdentifierIssuer(KEY, repeating(drawn))
        identifier = identities.issue_identifier()
        for changed in (
            identifier[:place] + other + identifier[place + 1 :],
            identifier[:place] + other + identifier[place:],
            identifier[:place],
        ):
            assert identities.is_issued(changed) == (changed == identifier), changed

    def test_every_character_of_the_identifier_matters(self) -> None:
        identities = IdentifierIssuer(KEY, os.urandom)
        identifier = identities.issue_identifier()
        for place, character in enumerate(identifier):
            other = "a" if character != "a" else "b"
            changed = identifier[:place] + other + identifier[place + 1 :]
            self.assertFalse(identities.is_issued(changed), place)

    def test_there_is_one_way_to_write_an_identifier(self) -> None:
        identifier = IdentifierIssuer(KEY, repeating(b"x")).issue_identifier()
        self.assertFalse(IdentifierIssuer(KEY, os.urandom).is_issued(identifier.upper()))

    def test_characters_that_change_case_to_ascii(self) -> None:
        identities = [IdentifierIssuer(KEY, repeating(b"%d" % number)) for number in range(500)]
        for own, other in (
            ("s", "\u017f"),
            ("i", "\u0131"),
            ("k", "\u212a"),
            ("ss", "\xdf"),
            ("fi", "\ufb01"),
        ):
            for issuer in identities:
                identifier = issuer.issue_identifier()
                changed = identifier.replace(own, other)
                self.assertEqual(issuer.is_issued(changed), changed == identifier, changed)

    @given(st.one_of(st.text(), st.from_regex(r"[a-z2-7=]{0,56}"), st.text("a=\0é\ud800\n ")))
    def test_garbage_is_no_identifier(self, identifier: str) -> None:
        assert not IdentifierIssuer(KEY, os.urandom).is_issued(identifier)

    def test_secrets_are_not_shown(self) -> None:
        self.assertNotIn(repr(KEY)[2:-1], repr(IdentifierIssuer(KEY, os.urandom)))

    @given(draws, st.text(max_size=5), st.text(max_size=5))
    def test_to_another_caller_it_looks_like_one_that_was_never_issued(
        self, drawn: bytes, caller: str, other: str
    ) -> None:
        identities = IdentifierIssuer(KEY, repeating(drawn))
        identifier = identities.issue_identifier(caller)
        assert identities.is_issued(identifier, caller)
        assert identities.is_issued(identifier, other) == (caller == other)

    @given(draws, names, names, st.text(max_size=5))
    def test_identifier_begins_with_the_daemons_name(
        self, drawn: bytes, name: str, other: str, caller: str
    ) -> None:
        identifier = IdentifierIssuer(KEY, repeating(drawn), name).issue_identifier(caller)
        before, dash, own = identifier.rpartition("-")
        self.assertEqual((before, dash), (name, "-" if name else ""))
        self.assertTrue(re.fullmatch(IDENTIFIER_PATTERN, identifier), identifier)
        for read in (name, other):
            daemon = IdentifierIssuer(KEY, os.urandom, read)
            # Nor is it that daemon's with the name changed, whether it has one or not.
            for written in (identifier, f"{read}-{own}", own):
                expected = read == name and written == identifier
                self.assertEqual(daemon.is_issued(written, caller), expected, (read, written))

    def test_identifier_that_was_issued_once_stays_valid_in_later_versions(self) -> None:
        for name, identifier in (
            ("", "aaaaaaaaaaaaaaaaaaaaashy5uyx6gkm4qzx6j67"),
            ("a", "a-aaaaaaaaaaaaaaaaaaaaagkjvvtpndmqyqrnwg3i"),
        ):
            self.assertEqual(
                IdentifierIssuer(KEY, repeating(b"\0"), name).issue_identifier(), identifier
            )
