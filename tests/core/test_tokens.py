"""`core.tokens`: the file of tokens, and who is let in by it."""

from __future__ import annotations

import hmac
import os
from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.tokens import TOKEN_BYTES, TokenHashes, generate_token, parse_tokens
from tawebeval.errors import ConfigurationError, Unauthorized


def line(name: str, token: str) -> str:
    """Return a line of the file."""
    return f"{name} sha256:{sha256(token.encode()).hexdigest()}"


class FileTests(SynchronousTestCase):
    """What may stand in a file of tokens."""

    def refuse(self, text: str, number: int | None) -> str:
        """Hold that a file is refused because of that line, of which nothing is shown."""
        error = str(self.assertRaises(ConfigurationError, parse_tokens, text))
        self.assertEqual(error.startswith(f"line {number}: "), number is not None, error)
        self.assertNotIn("secret", error)
        return error

    def test_file(self) -> None:
        """A caller on each line; comments, empty lines and spaces around do not count."""
        text = f"# ours\n\n{line('alice', 'a')}\r\n \t\n  {line('bob', 'b').upper()[3:]}  "
        text = text.replace("SHA256", "sha256").replace("\n  ", "\n  bob")
        tokens = parse_tokens(text)
        self.assertEqual(tokens.find_token([b"Bearer a"]).caller, "alice")
        self.assertEqual(tokens.find_token([b"Bearer b"]).caller, "bob")

    def test_several(self) -> None:
        """One caller may have several tokens."""
        tokens = parse_tokens(f"{line('alice', 'a')}\n{line('alice', 'b')}")
        self.assertEqual(
            {tokens.find_token([b"Bearer " + t]).caller for t in (b"a", b"b")}, {"alice"}
        )
        self.assertEqual(tokens.caller_names, {"alice"})

    def test_broken(self) -> None:
        """What is anything else is refused with its line."""
        good = line("alice", "a")
        for broken in (
            "alice",
            "secret",
            "alice secret",
            "alice sha256:",
            good[:-1],
            good + "0",
            good + " # secret",
            good + "read",
            good + " write",
            good + " read read",
            good + " rate=0",
            good + " rate=1000000",
            good + " rate=-1",
            good.replace("sha256", "md5"),
            good.replace("alice", ""),
            good.replace("alice", "al ice"),
            good.replace("alice", "ül"),
            good.replace("alice", "a" * 65),
            good.replace("alice", "-a"),
        ):
            self.refuse(f"# first\n{broken}\n", 2)
            self.refuse(f"{line('bob', 'b')}\n\n{broken}", 3)

    def test_same_token(self) -> None:
        """A token cannot be two callers', nor stand there twice."""
        self.refuse(f"{line('alice', 'a')}\n{line('bob', 'a')}", 2)

    def test_empty(self) -> None:
        """A file without a token lets nobody in: surely a mistake."""
        self.refuse("", None)
        self.refuse("# alice\n", None)


class AuthenticateTests(SynchronousTestCase):
    """`Authorization`."""

    tokens = parse_tokens(f"{line('alice', 'secret-a')}\n{line('bob', 'secret-b')}")

    def test_known(self) -> None:
        """The scheme is Bearer, however it is written."""
        for header in (b"Bearer secret-a", b"bearer secret-a", b"BEARER   secret-a "):
            self.assertEqual(self.tokens.find_token([header]).caller, "alice")
        self.assertEqual(self.tokens.find_token([b"Bearer secret-b"]).caller, "bob")

    def test_refused(self) -> None:
        """No header, two, another scheme, no token, a wrong one; nothing of it is repeated."""
        for headers in (
            [],
            [b"Bearer secret-a", b"Bearer secret-a"],
            [b""],
            [b"Bearer"],
            [b"Bearer "],
            [b"Bearersecret-a"],
            [b"Basic secret-a"],
            [b"Bearer secret-a secret-b"],
            [b"Bearer secret-A"],
            [b"Bearer secret-"],
            [b"Bearer secret-aa"],
            [b"Bearer secret-a\0"],
            [b"Bearer \xff"],
            [b"Bearer " + sha256(b"secret-a").hexdigest().encode()],
        ):
            error = self.assertRaises(Unauthorized, self.tokens.find_token, headers)
            self.assertNotIn("secret", str(error))

    @given(st.binary(max_size=80))
    def test_garbage(self, sent: bytes) -> None:
        """Nothing else gets in."""
        self.assertRaises(Unauthorized, self.tokens.find_token, [b"Bearer " + sent])

    def test_constant_time(self) -> None:
        """Each token of the file is compared, in constant time, whichever it is."""
        compared: list[bytes] = []

        def compare(known: bytes, digest: bytes) -> bool:
            compared.append(known)
            return known == digest

        self.patch(hmac, "compare_digest", compare)
        for token in (b"secret-a", b"secret-b"):
            compared.clear()
            self.tokens.find_token([b"Bearer " + token])
            self.assertEqual(len(compared), 2)

    def test_not_shown(self) -> None:
        """What is known of tokens is in no representation, which may end in a log."""
        self.assertEqual(repr(self.tokens), "TokenHashes()")
        self.assertIsInstance(self.tokens, TokenHashes)


class NewTests(SynchronousTestCase):
    """New tokens."""

    def test_new(self) -> None:
        """A token of 256 random bits, and the line that makes it a caller's."""
        asked: list[int] = []

        def random(count: int) -> bytes:
            asked.append(count)
            return os.urandom(count)

        token, written = generate_token("alice", random)
        self.assertEqual((asked, TOKEN_BYTES), ([32], 32))
        self.assertRegex(token, r"\Atawebeval_[A-Za-z0-9_-]{43}\Z")
        self.assertNotIn(token, written)
        found = parse_tokens(written).find_token([b"Bearer " + token.encode()])
        self.assertEqual(found.caller, "alice")

    def test_restricted(self) -> None:
        """What restricts a token stands in its line."""
        for read, rate, problems, end in (
            (False, None, (), ""),
            (True, None, (), " read"),
            (False, 60, (), " rate=60"),
            (True, 999_999, (), " read rate=999999"),
            (False, None, ("a",), " problems=a"),
            (True, 1, ("a", "b.c_d-1"), " read rate=1 problems=a,b.c_d-1"),
        ):
            token, written = generate_token(
                "a",
                os.urandom,
                is_read_only=read,
                requests_per_minute=rate,
                problems=problems,
            )
            self.assertTrue(written.endswith(end))
            found = parse_tokens(written).find_token([b"Bearer " + token.encode()])
            self.assertEqual((found.is_read_only, found.requests_per_minute), (read, rate))
            self.assertEqual(found.permitted_problems, frozenset(problems) or None)

    def test_malformed_problems(self) -> None:
        """A list that is no list of names is refused, as no token without restriction may come."""
        _, line = generate_token("a", os.urandom)
        for end in ("problems=", "problems=A", "problems=a,", "problems=a, b", "problem=a"):
            self.assertRaises(ConfigurationError, parse_tokens, f"{line} {end}")
        for name in ("", "A", "a,b", "a b", "a\n"):
            with self.assertRaises(ConfigurationError):
                generate_token("a", os.urandom, problems=[name])

    def test_fresh(self) -> None:
        """No two are the same."""
        self.assertEqual(len({generate_token("a", os.urandom)[0] for _ in range(50)}), 50)

    def test_name(self) -> None:
        """What could not stand in the file is refused."""
        for name in ("", "a b", "#a", "a\nb", "a" * 65, "ü"):
            self.assertRaises(ConfigurationError, generate_token, name, os.urandom)
        for name in ("a" * 64, "alice@example.org", "site-1"):
            parse_tokens(generate_token(name, os.urandom)[1])
