"""`webhooks.secrets_file`: the file of secrets, read at the start and again."""

from __future__ import annotations

from pathlib import Path

from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import ConfigurationError
from tawebeval.webhooks.secrets_file import (
    SigningSecretsFile,
    find_secrets_file,
    read_signing_secrets,
)
from tests.cases.secrets import NEW, OLD, format_secret


class SigningTests(SynchronousTestCase):
    """A file in a directory."""

    def setUp(self) -> None:
        self.path = Path(self.mktemp()).absolute()
        self.write(f"alice {format_secret(OLD)}\n")

    def write(self, text: str) -> None:
        """Change the file."""
        self.path.write_text(text)
        self.path.chmod(0o600)

    def test_read(self) -> None:
        """What stands in the file counts; without a file nobody has a secret."""
        self.assertTrue(SigningSecretsFile(self.path).current_secrets.has_secret("alice"))
        none = SigningSecretsFile()
        self.assertFalse(none.current_secrets.has_secret("alice"))
        self.assertEqual(list(none.list_reloadables()), [])

    def test_unusable(self) -> None:
        """A file that cannot be used is named with its setting; nothing in it is shown."""
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

    def test_reload(self) -> None:
        """A change counts when it is read again; with a mistake all stays as it was."""
        signing = SigningSecretsFile(self.path)
        (reloadable,) = signing.list_reloadables()
        self.assertEqual((reloadable.name, reloadable.paths), ("callbacks.secrets", (self.path,)))
        before = signing.current_secrets.sign_body("alice", "e", 1, b"")
        self.write(f"alice {format_secret(NEW)}\n")
        self.assertEqual(signing.current_secrets.sign_body("alice", "e", 1, b""), before)
        secrets = reloadable.read_files()
        self.assertEqual(signing.current_secrets.sign_body("alice", "e", 1, b""), before)
        reloadable.apply_content(secrets)
        after = signing.current_secrets.sign_body("alice", "e", 1, b"")
        self.assertNotEqual(after, before)
        self.write("alice s3cret")
        said = str(self.assertRaises(ConfigurationError, reloadable.read_files))
        self.assertIn(f"callbacks.secrets: {self.path}: line 1", said)
        self.assertNotIn("s3cret", said)
        self.assertEqual(signing.current_secrets.sign_body("alice", "e", 1, b""), after)

    def test_readable_by_others(self) -> None:
        """A file that every user can read is warned of."""
        with capturedLogs() as logged:
            read_signing_secrets(self.path)
            self.path.chmod(0o604)
            read_signing_secrets(self.path)
        (event,) = logged
        self.assertEqual(event["log_level"], LogLevel.warn)
        self.assertIn(str(self.path), formatEvent(event))


class FindTests(SynchronousTestCase):
    """Where the file is."""

    def test_found(self) -> None:
        """Where it is configured, else what systemd hands over; with neither nothing starts."""
        folder = Path(self.mktemp()).absolute()
        folder.mkdir()
        environment = {"CREDENTIALS_DIRECTORY": str(folder)}
        self.assertEqual(find_secrets_file("/x/y", environment), Path("/x/y"))
        for nowhere in (environment, {}):
            error = self.assertRaises(ConfigurationError, find_secrets_file, "", nowhere)
            self.assertIn("LoadCredential=callback-secrets", str(error))
        Path("callback-secrets").touch()  # where the daemon happens to be started
        self.assertRaises(ConfigurationError, find_secrets_file, "", {})
        (folder / "callback-secrets").write_text("")
        self.assertEqual(find_secrets_file("", environment), folder / "callback-secrets")
