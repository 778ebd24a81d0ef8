"""`core.signed_links`: a link is of one evaluation, one generation, one expiry."""

from __future__ import annotations

import re

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.signed_links import LINK_PATTERN, LinkSigner, find_bearer_link

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

    def test_no_other_link_evaluation_generation_or_key_will_do(self) -> None:
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
    def test_every_text_with_the_prefix_is_a_link(self) -> None:
        for values, link in (
            ([], None),
            ([b"Bearer tawebeval_x"], None),
            ([b"Bearer link_x"], "link_x"),
            ([b"bearer   link_x y "], "link_x y"),
            ([b"Bearer tawebeval_x", b"BEARER link_\xff"], "link_\xff"),
            ([b"Basic link_x"], None),
        ):
            self.assertEqual(find_bearer_link(values), link)
