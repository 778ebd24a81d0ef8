"""`webhooks.signing`: the file of secrets, and what is signed with them."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import ConfigurationError
from tawebeval.webhooks.signing import (
    SigningSecrets,
    parse_secrets,
    read_signing_secrets,
)
from tests.cases.secrets import NEW, OLD, format_secret
from tests.run import ROOT

OLD_SECRET, NEW_SECRET = format_secret(OLD), format_secret(NEW)


class ParseTests(SynchronousTestCase):
    def test_each_line_is_a_secret_of_its_caller(self) -> None:
        secrets = parse_secrets(
            f"# ours\n\n  alice\t{OLD_SECRET} \nbob {NEW_SECRET}\r\n* {OLD_SECRET}"
        )
        for caller in ("alice", "bob", ANONYMOUS_CALLER):
            self.assertTrue(secrets.has_secret(caller), caller)
        for caller in ("carol", "*", "Alice"):
            self.assertFalse(secrets.has_secret(caller), caller)
        self.assertFalse(SigningSecrets().has_secret(ANONYMOUS_CALLER))

    def test_malformed_line_is_named_by_number_without_its_content(self) -> None:
        for line in (
            "alice", OLD_SECRET, f"alice {b64encode(OLD).decode()}", f"-x {OLD_SECRET}",
            f"alice {format_secret(b's' * 23)}", f"alice {format_secret(b's' * 65)}",
            f"alice {OLD_SECRET}A", f"alice {OLD_SECRET} x", f"** {OLD_SECRET}", "alice whsec_",
        ):  # fmt: skip
            error = self.assertRaises(ConfigurationError, parse_secrets, f"# x\n{line}")
            self.assertTrue(str(error).startswith("line 2: "), str(error))
            self.assertNotIn("b2", str(error))
        for text in ("", "\n# nothing\n"):
            error = self.assertRaises(ConfigurationError, parse_secrets, text)
            self.assertIn("no secret", str(error))

    def test_secrets_are_not_in_representations(self) -> None:
        self.assertNotIn("oooo", repr(parse_secrets(f"alice {OLD_SECRET}")))


class SignTests(SynchronousTestCase):
    def test_signature_is_that_of_the_specification(self) -> None:
        secrets = parse_secrets("x whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
        headers = secrets.sign_body(
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

    @given(st.binary(min_size=24, max_size=64), st.binary(), st.integers(0, 2**40))
    def test_each_secret_of_the_caller_signs_identifier_time_and_body(
        self, secret: bytes, body: bytes, moment: int
    ) -> None:
        lines = f"a {format_secret(secret)}\nb {OLD_SECRET}\na {NEW_SECRET}"
        headers = parse_secrets(lines).sign_body("a", "evt_1", moment, body)
        content = b"evt_1." + str(moment).encode() + b"." + body
        digests = (hmac.new(each, content, hashlib.sha256).digest() for each in (secret, NEW))
        signatures = [f"v1,{b64encode(digest).decode()}" for digest in digests]
        assert headers["Webhook-Signature"].split() == signatures


class VerifyTests(SynchronousTestCase):
    def test_verify_of_the_example_accepts_only_the_signed_body_and_headers(self) -> None:
        found: dict[str, Any] = {}
        site = (ROOT / "examples" / "integrations" / "judge_site.py").read_text()
        imports = re.findall(r"(?m)^(?:import|from (?:collections|typing)) .*$", site)
        (function,) = re.findall(r"(?ms)^def verify\(.*?\n\n\n", site)
        exec("\n".join([*imports, function]), found)
        secret, body = format_secret(NEW), b'{"state": "failed"}'
        signed = parse_secrets(f"a {OLD_SECRET}\na {secret}").sign_body(
            "a", "evt_1", int(time.time()), body
        )
        headers = {name.lower(): value for name, value in signed.items()}
        self.patch(os, "environ", {"WEBHOOK_SECRET": secret})
        self.assertEqual(found["verify"](headers, body), {"state": "failed"})
        for name, value in (
            ("webhook-id", "evt_x"), ("webhook-timestamp", "1"), ("webhook-signature", "v1,AAAA"),
        ):  # fmt: skip
            wrong = {**headers, name: value}
            self.assertRaises(ValueError, found["verify"], wrong, body)
        self.assertRaises(ValueError, found["verify"], headers, body[:-1])


class SecretsFileTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp()).absolute()
        self.write(f"alice {format_secret(OLD)}\n")

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.path.chmod(0o600)

    def test_unusable_file_is_named_with_its_setting(self) -> None:
        for content, words in (
            (b"alice s3cret", "line 1: "),
            (b"\xff", "UTF-8"),
            (None, "cannot read the file: No such file"),
        ):
            if content is None:
                self.path.unlink()
            else:
                self.path.write_bytes(content)
            error = self.assertRaises(ConfigurationError, read_signing_secrets, self.path)
            self.assertTrue(str(error).startswith(f"callbacks.secrets: {self.path}: "), str(error))
            self.assertIn(words, str(error))
            self.assertNotIn("s3cret", str(error))

    def test_secrets_file_readable_by_everybody_is_logged_as_a_warning(self) -> None:
        with capturedLogs() as logged:
            read_signing_secrets(self.path)
            self.path.chmod(0o604)
            read_signing_secrets(self.path)
        (event,) = logged
        self.assertEqual(event["log_level"], LogLevel.warn)
        self.assertIn(str(self.path), formatEvent(event))
