"""`cli.login`: servers with their tokens, and which token a server gets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import keyring
from click.testing import Result

from tawebeval.cli import servers
from tawebeval.cli.login import derive_server_name
from tawebeval.core.tokens import generate_token
from tests.cases.command import CommandTestCase
from tests.fakes.keyring import FakeKeyring

URL = "https://judge.example.org"
OTHER = "https://other.example.org"


class LoginTests(CommandTestCase):
    """Several servers, and a keyring in memory."""

    def setUp(self) -> None:
        super().setUp()
        self.keyring = FakeKeyring()
        self.patch(keyring, "get_keyring", lambda: self.keyring)
        self.path = self.configuration / "tawebeval" / "servers.json"

    def login(self, *arguments: str, token: str = "secret") -> Result:
        """Store a server with a token from stdin."""
        return self.run_command("login", *arguments, stdin=f"{token}\n".encode())

    def get_token(self, *options: str, **env: str) -> tuple[str, str | None]:
        """Return the URL and the token that a command would use."""
        self.server = None
        variables = {f"TAWEBEVAL_{name}": value for name, value in env.items()}
        result = self.run_command("list", *options, env=variables)
        assert self.server is not None, result.stderr
        return self.server.url, self.server.token

    def test_token_goes_to_the_keyring_and_logout_removes_it(self) -> None:
        result = self.login("judge.example.org/")
        self.assertEqual(result.exit_code, 0, result.stderr)
        self.assertIn(f"stored {URL} as judge.example.org, the default server", result.stderr)
        self.assertIn("the token is in the keyring", result.stderr)
        self.assertNotIn("secret", self.path.read_text())
        self.assertEqual(self.get_token(), (URL, "secret"))
        self.assertEqual(self.run_command("logout").exit_code, 0)
        self.assertEqual(self.keyring.passwords, {})
        self.assertEqual(self.get_token(), ("http://127.0.0.1:8080", None))
        self.assertIn("no default server", self.run_command("logout").stderr)
        words = "no server is stored as 'x'; `tawebeval servers` lists the servers"
        self.assertIn(words, self.run_command("logout", "x").stderr)

    def test_token_goes_to_the_file_without_keyring_or_on_request(self) -> None:
        self.assertIn(str(self.path), self.login("--storage", "file", URL).stderr)
        self.keyring.priority = 0
        result = self.login("--name", "b", OTHER)
        self.assertIn(f"this session has no keyring: the token goes to {self.path}", result.stderr)
        self.assertEqual(self.keyring.passwords, {})
        self.assertEqual(self.get_token("--server", "b"), (OTHER, "secret"))
        result = self.login("--storage", "keyring", URL)
        self.assertEqual(result.exit_code, 2)
        self.assertIn("no keyring", result.stderr)
        self.path.chmod(0o644)
        result = self.run_command("list")
        self.assertEqual(result.exit_code, 2)
        self.assertIn(f"chmod 600 {self.path}", result.stderr)

    def test_stored_token_is_sent_to_its_own_server_only(self) -> None:
        self.login("--name", "one", URL, token="first")
        self.login("--name", "two", URL, token="second")
        self.login("--name", "free", OTHER, token="")
        self.assertEqual(self.get_token("--server", "one"), (URL, "first"))
        self.assertEqual(self.get_token("--server", "two"), (URL, "second"))
        self.assertEqual(self.get_token("--server", "free"), (OTHER, None))
        self.assertEqual(self.get_token("--server", OTHER), (OTHER, None))
        self.assertEqual(self.get_token("--server", "https://x"), ("https://x", None))
        self.assertEqual(self.get_token(SERVER="two", TOKEN="x"), (URL, "second"))
        self.assertEqual(self.get_token(SERVER=URL, TOKEN="x"), (URL, "x"))
        self.file.write_text("filed")
        given = ("--server", "two", "--token-file", str(self.file))
        self.assertEqual(self.get_token(*given), (URL, "filed"))
        result = self.run_command("list", "--server", URL)
        self.assertIn(f"several stored servers have the URL {URL}: one, two", result.stderr)
        self.run_command("logout", "one")
        self.assertEqual(self.get_token("--server", URL), (URL, "second"))
        self.login("--name", "two", OTHER, token="third")
        self.assertEqual(list(self.keyring.passwords.values()), ["third"])
        result = self.run_command("list", "--server", "three")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("nor the name of a stored server (free, two)", result.stderr)

    def test_url_that_is_changed_in_the_file_does_not_get_the_token_of_the_keyring(self) -> None:
        self.login("--name", "one", URL)
        self.path.write_text(self.path.read_text().replace(URL, OTHER))
        result = self.run_command("list", "--server", "one")
        self.assertIn("the keyring has no token of the server one", result.stderr)

    def test_servers_are_listed_and_another_one_becomes_the_default(self) -> None:
        self.login("--name", "one", URL)
        self.login("--name", "two", "--storage", "file", OTHER)
        self.login("--name", "zero", "http://127.0.0.1:1", token="")
        self.assertEqual(self.run_command("servers", "--default", "two").exit_code, 0)
        lines = self.run_command("servers").stdout.splitlines()
        self.assertEqual(
            [line.split() for line in lines],
            [
                ["NAME", "TOKEN", "URL"],
                ["one", "keyring", URL],
                ["*", "two", "file", OTHER],
                ["zero", "none", "http://127.0.0.1:1"],
            ],
        )
        listed = json.loads(self.run_command("servers", "--json", "name,default").stdout)
        self.assertEqual(listed[1], {"name": "two", "default": True})
        result = self.run_command("servers", "--default", "x")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("no server is stored as 'x'", result.stderr)

    def test_unwritable_file_stays_and_is_reported(self) -> None:
        self.login("--name", "one", URL, token="first")
        stored = self.path.read_text()

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        self.patch(servers, "_replace_file", fail)
        for arguments in (
            ("login", "--name", "one", URL),
            ("login", "--name", "two", URL),
            ("login", "--name", "one", OTHER),
            ("login", "--name", "one", "--storage", "file", URL),
            ("logout", "one"),
        ):
            result = self.run_command(*arguments, stdin=b"second\n")
            self.assertEqual(result.exit_code, 2, arguments)
            self.assertIn(f"{self.path}: cannot write the file: No space left", result.stderr)
            self.assertEqual(self.path.read_text(), stored, arguments)

    def test_server_is_removed_though_its_keyring_does_not_answer(self) -> None:
        self.login("--name", "one", URL)
        self.keyring.error = RuntimeError("locked")
        result = self.run_command("logout", "one")
        self.assertEqual(result.exit_code, 0)
        self.assertIn("a token stays in the keyring: the keyring does not", result.stderr)
        self.assertEqual(json.loads(self.path.read_text()), {})

    def test_advice_works_where_the_keyring_is_missing_later(self) -> None:
        self.login(URL)
        self.keyring.priority = 0
        advice = "tawebeval login --storage file URL"
        self.assertIn(advice, self.run_command("list").stderr)
        result = self.login("--storage", "file", URL)
        self.assertEqual(result.exit_code, 0, result.stderr)
        self.assertIn("a token stays in the keyring: this session has no", result.stderr)
        self.assertEqual(self.get_token(), (URL, "secret"))

    def test_token_has_at_most_4096_characters_before_the_line_end(self) -> None:
        self.assertEqual(self.login(URL, token="x" * 4096).exit_code, 0)

    def test_refused_or_invalid_token_is_not_stored(self) -> None:
        folder = Path(self.mktemp())
        folder.mkdir()
        token, line = generate_token("alice", os.urandom)
        (folder / "tokens").write_text(line)
        self.line = self.make(tokens=folder / "tokens", token="wrong")
        for arguments, typed, words in (
            ([URL], "wrong", "tawebeval login"),
            ([URL], "a b", "a token is one word"),
            ([URL], "\x9b", "a token is one word"),
            ([URL], "x" * 5000, "at most 4096 characters"),
            (["--name", "a/b", URL], "x", "cannot be a name"),
            (["ftp://x"], "x", "is not the URL of a server"),
        ):
            result = self.login(*arguments, token=typed)
            self.assertEqual(result.exit_code, 2, typed)
            self.assertIn(words, result.stderr)
            self.assertNotIn("Traceback", result.stderr)
            self.assertFalse(self.path.exists())
        self.line = self.make(tokens=folder / "tokens", token=token)
        self.assertEqual(self.login(URL, token=token).exit_code, 0)

    def test_default_name_is_host_and_port(self) -> None:
        for url, name in (
            (URL, "judge.example.org"),
            ("http://[::1]:8080/x", "1--8080"),
            (f"https://{'x' * 70}", "x" * 64),
        ):
            self.assertEqual(derive_server_name(url), name)
