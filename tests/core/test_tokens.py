"""`core.tokens`: the file of tokens, who is let in by it, and links to one evaluation."""

from __future__ import annotations

import hmac
import os
import re
from hashlib import sha256
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.tokens import (
    LINK_PATTERN,
    MAX_SUPERVISED_CALLERS,
    TOKEN_BYTES,
    LinkSigner,
    TokenTable,
    find_bearer_link,
    generate_token,
    parse_tokens,
    remove_token_lines,
)
from tawebeval.errors import ConfigurationError, Unauthorized


def line(name: str, token: str) -> str:
    """Return a line of the file."""
    return f"{name} sha256:{sha256(token.encode()).hexdigest()}"


class FileTests(SynchronousTestCase):
    def refuse(self, text: str, number: int | None) -> str:
        """Hold that a file is refused because of that line, of which nothing is shown."""
        error = str(self.assertRaises(ConfigurationError, parse_tokens, text))
        self.assertEqual(error.startswith(f"line {number}: "), number is not None, error)
        self.assertNotIn("secret", error)
        return error

    def test_each_line_has_a_caller_and_a_token(self) -> None:
        text = f"# ours\n\n{line('alice', 'a')}\r\n \t\n  {line('bob', 'b').upper()[3:]}  "
        text = text.replace("SHA256", "sha256").replace("\n  ", "\n  bob")
        tokens = parse_tokens(text)
        self.assertEqual(tokens.find_token([b"Bearer a"]).caller, "alice")
        self.assertEqual(tokens.find_token([b"Bearer b"]).caller, "bob")

    def test_one_caller_may_have_several_tokens(self) -> None:
        tokens = parse_tokens(f"{line('alice', 'a')}\n{line('alice', 'b')}")
        self.assertEqual(
            {tokens.find_token([b"Bearer " + t]).caller for t in (b"a", b"b")}, {"alice"}
        )
        self.assertEqual(tokens.caller_names, {"alice"})

    def test_malformed_line_is_refused_with_its_number(self) -> None:
        good = line("alice", "a")
        for broken in (
            "alice", "secret", "alice secret", "alice sha256:", good[:-1], good + "0",
            good + " # secret", good + "read", good + " write", good + " read read",
            good + " group=", good + " group=a b",
            good + " supervises=a, b", good + " group=a shared", good + " rate=0",
            good + " rate=1000000", good + " rate=-1",
            good.replace("sha256", "md5"), good.replace("alice", ""),
            good.replace("alice", "al ice"), good.replace("alice", "ül"),
            good.replace("alice", "a" * 65), good.replace("alice", "-a"),
        ):  # fmt: skip
            self.refuse(f"# first\n{broken}\n", 2)
            self.refuse(f"{line('bob', 'b')}\n\n{broken}", 3)

    def test_duplicate_token_is_refused(self) -> None:
        self.refuse(f"{line('alice', 'a')}\n{line('bob', 'a')}", 2)

    def test_file_without_a_token_authorizes_no_caller(self) -> None:
        self.refuse("", None)
        self.refuse("# alice\n", None)


class AuthenticateTests(SynchronousTestCase):
    tokens = parse_tokens(f"{line('alice', 'secret-a')}\n{line('bob', 'secret-b')}")

    def test_bearer_scheme_is_case_insensitive(self) -> None:
        for header in (b"Bearer secret-a", b"bearer secret-a", b"BEARER   secret-a "):
            self.assertEqual(self.tokens.find_token([header]).caller, "alice")
        self.assertEqual(self.tokens.find_token([b"Bearer secret-b"]).caller, "bob")

    def test_missing_repeated_or_malformed_authorization_header_is_unauthorized(self) -> None:
        for headers in (
            [], [b"Bearer secret-a", b"Bearer secret-a"], [b""], [b"Bearer"], [b"Bearer "],
            [b"Bearersecret-a"], [b"Basic secret-a"], [b"Bearer secret-a secret-b"],
            [b"Bearer secret-A"], [b"Bearer secret-"], [b"Bearer secret-aa"],
            [b"Bearer secret-a\0"], [b"Bearer \xff"],
            [b"Bearer " + sha256(b"secret-a").hexdigest().encode()],
        ):  # fmt: skip
            error = self.assertRaises(Unauthorized, self.tokens.find_token, headers)
            self.assertNotIn("secret", str(error))

    def test_bearer_value_is_compared_with_each_token_in_constant_time(self) -> None:
        compared: list[bytes] = []

        def compare(known: bytes, digest: bytes) -> bool:
            compared.append(known)
            return known == digest

        self.patch(hmac, "compare_digest", compare)
        for token in (b"secret-a", b"secret-b"):
            compared.clear()
            self.tokens.find_token([b"Bearer " + token])
            self.assertEqual(len(compared), 2)

    def test_tokens_are_in_no_representation(self) -> None:
        self.assertEqual(repr(self.tokens), "TokenTable()")
        self.assertIsInstance(self.tokens, TokenTable)


class NewTokenTests(SynchronousTestCase):
    def test_new_token_has_256_random_bits_and_a_line_for_its_caller(self) -> None:
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

    def test_restrictions_of_a_token_are_in_its_line(self) -> None:
        for end, restrictions in (
            ("", {}),
            (" rate=60", {"requests_per_minute": 60}),
            (" supervises=A@1,b", {"supervised_groups": ("b", "A@1")}),
            (" problems=a,b.c_d-1", {"problems": ("b.c_d-1", "a")}),
            (" read shared group=g", {"is_read_only": True, "is_shared": True, "group": "g"}),
        ):
            token, written = generate_token("a", os.urandom, **restrictions)
            self.assertEqual(written[73:], end)
            found = parse_tokens(written).find_token([b"Bearer " + token.encode()])
            self.assertEqual(found.file_line, written)
            for name, value in restrictions.items():
                name = name.replace("problems", "permitted_problems")
                kept = frozenset(value) if isinstance(value, tuple) else value
                self.assertEqual(getattr(found, name), kept)

    def test_supervisor_has_access_to_callers_with_tokens_in_its_groups(self) -> None:
        def add(caller: str, **given: Any) -> str:
            return generate_token(caller, os.urandom, **given)[1]

        lines = [add("ann", group="g"), add("ann"), add("bob", group="g"), add("eve", group="h")]
        lines.append(add("teacher", supervised_groups=["g", "none"]))
        tokens = parse_tokens("\n".join(lines))
        *_, eve, teacher = tokens.tokens
        self.assertEqual(
            tokens.find_supervised_members(teacher), {"g": {"ann", "bob"}, "none": frozenset()}
        )
        self.assertEqual(tokens.find_supervised_members(eve), {})
        for token, owner, is_permitted in (
            (teacher, "ann", True), (teacher, "teacher", True), (teacher, "eve", False),
            (eve, "eve", True), (eve, "ann", False), (tokens.tokens[0], "bob", False),
        ):  # fmt: skip
            self.assertEqual(tokens.has_access(token, owner), is_permitted)
        fewer = parse_tokens("\n".join(lines[1:]))
        self.assertFalse(fewer.has_access(teacher, "ann"))
        self.assertFalse(fewer.has_access(tokens.tokens[0], "ann"))
        self.assertTrue(fewer.has_access(teacher, "bob"))

    def test_number_of_supervised_callers_has_a_limit(self) -> None:
        def make_lines(count: int) -> str:
            members = [f"m{n} sha256:{n:064x} group=g{n % 2}" for n in range(count)]
            return "\n".join((*members, f"t sha256:{'f' * 64} supervises=g0,g1"))

        parse_tokens(make_lines(MAX_SUPERVISED_CALLERS - 1))
        error = self.assertRaises(ConfigurationError, parse_tokens, make_lines(1000))
        self.assertIn("t supervises 1001 callers; the limit is 1000", str(error))

    def test_removal_of_tokens_keeps_other_lines_and_the_last_token(self) -> None:
        one, two = (f"a sha256:{digit * 64}" for digit in "12")
        text = f"# a\r\n{one}\n {two} \nb sha256:{'3' * 64}"
        self.assertEqual(remove_token_lines(text, "a", "2"), f"# a\r\n{one}\nb sha256:{'3' * 64}")
        self.assertEqual(remove_token_lines(text, "a", ""), f"# a\r\nb sha256:{'3' * 64}")
        for caller, prefix in (("c", ""), ("a", "3"), ("b", "1")):
            self.assertRaises(ConfigurationError, remove_token_lines, text, caller, prefix)
        self.assertRaises(ConfigurationError, remove_token_lines, f"# x\n{one}\n", "a", "")

    def test_malformed_list_of_problems_is_refused(self) -> None:
        _, line = generate_token("a", os.urandom)
        for end in ("problems=", "problems=A", "problems=a,", "problems=a, b", "problem=a"):
            self.assertRaises(ConfigurationError, parse_tokens, f"{line} {end}")
        for name in ("", "A", "a,b", "a b", "a\n"):
            with self.assertRaises(ConfigurationError):
                generate_token("a", os.urandom, problems=[name])

    def test_invalid_caller_name_gets_no_token(self) -> None:
        for name in ("", "a b", "#a", "a\nb", "a" * 65, "ü"):
            self.assertRaises(ConfigurationError, generate_token, name, os.urandom)
        for name in ("a" * 64, "alice@example.org", "site-1"):
            parse_tokens(generate_token(name, os.urandom)[1])


GENERATION = b"generati"
EXPIRES = 1_800_000_000


class SignerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.signer = LinkSigner(b"k" * 32)
        self.link = self.signer.sign_link("a" * 40, GENERATION, EXPIRES)

    def read(self, link: str, identifier: str = "a" * 40, generation: bytes = GENERATION) -> object:
        return self.signer.verify_and_read_expiry(link, identifier, generation)

    def test_link_tells_its_expiry_and_not_the_key(self) -> None:
        self.assertTrue(re.fullmatch(LINK_PATTERN, self.link))
        self.assertEqual(self.read(self.link), EXPIRES)
        self.assertNotIn("kkk", repr(self.signer))

    def test_link_with_another_evaluation_generation_or_key_is_refused(self) -> None:
        for link in (
            *("", "link_", self.link[:-1], f"{self.link}A", self.link.upper(), f" {self.link}"),
            *(f"{self.link}\n", self.link.replace("link_", "link-"), "link_" + "é" * 28),
            self.signer.sign_link("a" * 40, GENERATION, EXPIRES + 1)[:12] + self.link[12:],
        ):
            self.assertIsNone(self.read(link), link)
        self.assertIsNone(self.read(self.link, "b" * 40))
        self.assertIsNone(self.read(self.link, generation=b"another."))
        self.assertIsNone(
            LinkSigner(b"x" * 32).verify_and_read_expiry(self.link, "a" * 40, GENERATION)
        )


class HeaderTests(SynchronousTestCase):
    def test_bearer_value_with_the_prefix_link_is_a_link(self) -> None:
        for values, link in (
            ([], None),
            ([b"Bearer tawebeval_x"], None),
            ([b"Bearer link_x"], "link_x"),
            ([b"bearer   link_x y "], "link_x y"),
            ([b"Bearer tawebeval_x", b"BEARER link_\xff"], "link_\xff"),
            ([b"Basic link_x"], None),
        ):
            self.assertEqual(find_bearer_link(values), link)
