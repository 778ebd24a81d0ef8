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
    """What is recognised and what is not."""

    def test_form(self) -> None:
        """An identifier is 40 characters that stand in a URL as they are."""
        identifier = IdentifierIssuer(KEY, os.urandom).issue_identifier()
        self.assertTrue(re.fullmatch(r"[a-z2-7]{40}", identifier), identifier)

    def test_fresh(self) -> None:
        """No two are the same, by at least 80 random bits."""
        asked: list[int] = []

        def random(count: int) -> bytes:
            asked.append(count)
            return os.urandom(count)

        identities = IdentifierIssuer(KEY, random)
        self.assertEqual(len({identities.issue_identifier() for _ in range(100)}), 100)
        self.assertGreaterEqual(min(asked) * 8, 80)

    @given(draws)
    def test_own(self, drawn: bytes) -> None:
        """Its own are recognised, after a restart with the same key too."""
        identifier = IdentifierIssuer(KEY, repeating(drawn)).issue_identifier()
        assert IdentifierIssuer(KEY, os.urandom).is_issued(identifier)

    @given(draws, st.binary(min_size=1, max_size=64))
    def test_other_key(self, drawn: bytes, key: bytes) -> None:
        """Another key's are not."""
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
    def test_mutation(self, drawn: bytes, place: int, other: str) -> None:
        """With any one character changed, left out or added it is another's."""
        identities = IdentifierIssuer(KEY, repeating(drawn))
        identifier = identities.issue_identifier()
        for changed in (
            identifier[:place] + other + identifier[place + 1 :],
            identifier[:place] + other + identifier[place:],
            identifier[:place],
        ):
            assert identities.is_issued(changed) == (changed == identifier), changed

    def test_each_character_counts(self) -> None:
        """Every character of the identifier matters."""
        identities = IdentifierIssuer(KEY, os.urandom)
        identifier = identities.issue_identifier()
        for place, character in enumerate(identifier):
            other = "a" if character != "a" else "b"
            changed = identifier[:place] + other + identifier[place + 1 :]
            self.assertFalse(identities.is_issued(changed), place)

    def test_case(self) -> None:
        """There is one way to write an identifier."""
        identifier = IdentifierIssuer(KEY, repeating(b"x")).issue_identifier()
        self.assertFalse(IdentifierIssuer(KEY, os.urandom).is_issued(identifier.upper()))

    def test_characters_that_change_case_to_ascii(self) -> None:
        """No other character passes for one of `a-z`: some become those in upper case."""
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
    def test_garbage(self, identifier: str) -> None:
        """Anything else is not, and raises nothing."""
        assert not IdentifierIssuer(KEY, os.urandom).is_issued(identifier)

    def test_secrets_are_not_shown(self) -> None:
        """The key is in no representation, which may end in a log."""
        self.assertNotIn(repr(KEY)[2:-1], repr(IdentifierIssuer(KEY, os.urandom)))

    @given(draws, st.text(max_size=5), st.text(max_size=5))
    def test_caller(self, drawn: bytes, caller: str, other: str) -> None:
        """To another caller it looks like one that was never issued."""
        identities = IdentifierIssuer(KEY, repeating(drawn))
        identifier = identities.issue_identifier(caller)
        assert identities.is_issued(identifier, caller)
        assert identities.is_issued(identifier, other) == (caller == other)

    @given(draws, names, names, st.text(max_size=5))
    def test_name(self, drawn: bytes, name: str, other: str, caller: str) -> None:
        """It begins with the daemon's name, and to a daemon of another name it is another's."""
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

    def test_key_size(self) -> None:
        """The key has 256 bits."""
        self.assertEqual(SECRET_KEY_BYTES, 32)

    def test_known(self) -> None:
        """An identifier that was issued once stays valid in later versions."""
        for name, identifier in (
            ("", "aaaaaaaaaaaaaaaaaaaaashy5uyx6gkm4qzx6j67"),
            ("a", "a-aaaaaaaaaaaaaaaaaaaaagkjvvtpndmqyqrnwg3i"),
        ):
            self.assertEqual(
                IdentifierIssuer(KEY, repeating(b"\0"), name).issue_identifier(), identifier
            )
