"""`webhooks.signatures`: the file of secrets, and what is signed with them."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64decode, b64encode

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.tokens import ANONYMOUS
from tawebeval.errors import ConfigurationError
from tawebeval.webhooks.signatures import Secrets, parse_secrets


def written(secret: bytes) -> str:
    """Return a secret as files have it."""
    return f"whsec_{b64encode(secret).decode()}"


OLD, NEW = b"o" * 24, b"n" * 64


class ParseTests(SynchronousTestCase):
    """The file."""

    def test_callers(self) -> None:
        """A line for each secret; `*` is the caller without a name; others have none."""
        secrets = parse_secrets(
            f"# ours\n\n  alice\t{written(OLD)} \nbob {written(NEW)}\r\n* {written(OLD)}"
        )
        for caller in ("alice", "bob", ANONYMOUS):
            self.assertTrue(secrets.has(caller), caller)
        for caller in ("carol", "*", "Alice"):
            self.assertFalse(secrets.has(caller), caller)
        self.assertFalse(Secrets().has(ANONYMOUS))

    def test_mistakes(self) -> None:
        """What is no line of the file is named by its number, and nothing of it is shown."""
        for line in (
            "alice", written(OLD), f"alice {b64encode(OLD).decode()}", f"-x {written(OLD)}",
            f"alice {written(b's' * 23)}", f"alice {written(b's' * 65)}", "alice whsec_",
            f"alice {written(OLD)}A", f"alice {written(OLD)} x", f"** {written(OLD)}",
        ):  # fmt: skip
            error = self.assertRaises(ConfigurationError, parse_secrets, f"# x\n{line}")
            self.assertTrue(str(error).startswith("line 2: "), str(error))
            self.assertNotIn("b2", str(error))
        for text in ("", "\n# nothing\n"):
            error = self.assertRaises(ConfigurationError, parse_secrets, text)
            self.assertIn("no secret", str(error))

    def test_not_shown(self) -> None:
        """What is logged by mistake has no secret in it."""
        self.assertNotIn("oooo", repr(parse_secrets(f"alice {written(OLD)}")))


class SignTests(SynchronousTestCase):
    """Signatures."""

    def test_specification(self) -> None:
        """The example of the specification of Standard Webhooks comes out."""
        secrets = parse_secrets("x whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
        headers = secrets.sign(
            "x", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
        )
        self.assertEqual(
            headers,
            {
                "Webhook-Id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
                "Webhook-Timestamp": "1614265330",
                "Webhook-Signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
            },
        )

    def test_each_secret(self) -> None:
        """While a secret is changed for another there is a signature by each."""
        secrets = parse_secrets(f"alice {written(OLD)}\nbob {written(OLD)}\nalice {written(NEW)}")
        one, other = secrets.sign("alice", "e", 1, b"{}")["Webhook-Signature"].split()
        self.assertNotEqual(one, other)
        self.assertEqual(secrets.sign("bob", "e", 1, b"{}")["Webhook-Signature"], one)
        self.assertRaises(KeyError, secrets.sign, "carol", "e", 1, b"{}")

    @given(st.binary(min_size=24, max_size=64), st.binary(), st.integers(0, 2**40))
    def test_any(self, secret: bytes, body: bytes, time: int) -> None:
        """It is the HMAC of identifier, time and body, whatever these are."""
        headers = parse_secrets(f"a {written(secret)}").sign("a", "evt_1", time, body)
        version, _, signature = headers["Webhook-Signature"].partition(",")
        assert version == "v1"
        content = b"evt_1." + str(time).encode() + b"." + body
        assert b64decode(signature) == hmac.new(secret, content, hashlib.sha256).digest()
