"""`cli.servers`: the file of servers, `login`, and which server and token a command uses."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from threading import Thread

from click.testing import Result
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.runtime import ServerAccess
from tawebeval.cli.servers import (
    StoredServers,
    edit_stored_servers,
    locate_stored_servers,
    read_stored_servers,
)
from tawebeval.core.tokens import generate_token
from tawebeval.errors import ConfigurationError
from tests.cases.command import CommandTestCase
from tests.cases.screen import Shown

URL = "https://judge.example.org"
OTHER = "https://other.example.org"


class FileTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.path = self.folder / "tawebeval" / "servers.json"

    def write(self) -> None:
        with edit_stored_servers(self.path) as stored:
            stored.tokens[URL] = "secret"
            stored.default_url = URL

    def test_only_the_owner_has_access_to_the_stored_servers(self) -> None:
        self.assertEqual(read_stored_servers(self.path), StoredServers())
        self.addCleanup(os.umask, os.umask(0))
        self.write()
        found = read_stored_servers(self.path)
        self.assertEqual((found.tokens, found.default_url), ({URL: "secret"}, URL))
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)
        self.assertEqual(stat.S_IMODE(self.path.parent.stat().st_mode), 0o700)
        self.assertEqual([path.name for path in self.path.parent.iterdir()], ["servers.json"])

    def test_symbolic_link_stays_and_its_target_is_replaced(self) -> None:
        self.write()
        link = self.folder / "link"
        link.symlink_to(self.path)
        with edit_stored_servers(link) as stored:
            stored.default_url = None
        self.assertTrue(link.is_symlink())
        self.assertIsNone(read_stored_servers(self.path).default_url)

    def test_two_processes_that_edit_the_file_at_once_lose_nothing(self) -> None:
        def edit() -> None:
            with edit_stored_servers(self.path) as stored:
                stored.tokens[OTHER] = "other"

        other = Thread(target=edit)
        with edit_stored_servers(self.path) as stored:
            other.start()
            other.join(0.2)  # it waits for the end of this block
            stored.tokens[URL] = "secret"
        other.join()
        self.assertEqual(read_stored_servers(self.path).tokens, {URL: "secret", OTHER: "other"})

    def test_error_leaves_the_file_unchanged(self) -> None:
        self.write()

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        self.patch(os, "rename", fail)
        with (
            self.assertRaises(ConfigurationError) as caught,
            edit_stored_servers(self.path) as stored,
        ):
            stored.default_url = None
        self.assertIn("cannot write the file: No space left on device", str(caught.exception))
        self.assertEqual(read_stored_servers(self.path).default_url, URL)
        self.assertEqual([path.name for path in self.path.parent.iterdir()], ["servers.json"])

    def test_broken_file_and_file_that_others_can_access_are_refused(self) -> None:
        self.write()
        for mode in (0o640, 0o604, 0o620, 0o602, 0o601):
            self.path.chmod(mode)
            error = self.assertRaises(ConfigurationError, read_stored_servers, self.path)
            self.assertIn(f"(mode {mode:04o}", str(error))
            self.assertIn(f"; chmod 600 {self.path}", str(error))
        self.path.chmod(0o600)
        for content, words in (
            (b"{", "mend or remove the file"),
            (b"[" * 100_000, "mend or remove the file"),
            (b'{"tokens":{"a":1}}', "Expected `str`"),
        ):
            self.path.write_bytes(content)
            error = self.assertRaises(ConfigurationError, read_stored_servers, self.path)
            self.assertIn(words, str(error))
        error = self.assertRaises(ConfigurationError, read_stored_servers, self.path / "x")
        self.assertIn("cannot read the file", str(error))
        with self.assertRaises(ConfigurationError), edit_stored_servers(self.path / "x" / "y"):
            self.fail("it cannot be written")

    def test_file_of_another_user_is_refused(self) -> None:
        self.write()
        self.patch(os, "geteuid", lambda: 12345)
        error = self.assertRaises(ConfigurationError, read_stored_servers, self.path)
        self.assertIn(f"{self.path}: the file belongs to ", str(error))
        self.assertIn("and the command runs as 12345; remove the file, or set", str(error))

    def test_file_lies_in_the_configuration_directory_of_the_user(self) -> None:
        for given, expected in (
            ({"XDG_CONFIG_HOME": "/x"}, "/x/tawebeval/servers.json"),
            ({"XDG_CONFIG_HOME": "x"}, str(Path.home() / ".config/tawebeval/servers.json")),
        ):
            self.assertEqual(str(locate_stored_servers(given)), expected)

        def fail() -> Path:
            raise RuntimeError("Could not determine home directory.")

        self.patch(Path, "home", fail)
        self.assertRaises(ConfigurationError, locate_stored_servers, {})


class LoginTests(CommandTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.path = self.configuration / "tawebeval" / "servers.json"

    def login(self, *arguments: str, token: str = "secret") -> Result:
        return self.run_command("login", *arguments, stdin=f"{token}\n".encode())

    def get_token(self, *options: str, **env: str) -> tuple[str, str | None]:
        """Return the URL and the token that a command would use."""
        self.server = None
        variables = {f"TAWEBEVAL_{name}": value for name, value in env.items()}
        result = self.run_command("list", *options, env=variables)
        assert self.server is not None, result.stderr
        return self.server.url, self.server.token

    def test_token_is_stored_and_logout_removes_it(self) -> None:
        self.run_command("logout")
        self.assertFalse(self.configuration.exists())
        result = self.login("judge.example.org/")
        self.assertEqual(result.exit_code, 0, result.stderr)
        said = f"{URL} is the default server now; the token is in {self.path}"
        self.assertIn(said, result.stderr)
        self.assertEqual(self.get_token(), (URL, "secret"))
        self.assertEqual(self.run_command("logout").exit_code, 0)
        self.assertNotIn("secret", self.path.read_text())
        self.assertEqual(self.get_token(), ("http://127.0.0.1:8080", None))
        self.assertIn("no default server", self.run_command("logout").stderr)
        said = f"no login at {OTHER} is stored; stored are: none"
        self.assertIn(said, self.run_command("logout", OTHER).stderr)

    def test_stored_token_is_sent_to_its_own_server_only(self) -> None:
        self.login(OTHER, token="")
        self.login(URL, token="first")
        self.assertEqual(self.get_token("--server", URL), (URL, "first"))
        self.assertEqual(self.get_token("--server", OTHER), (OTHER, None))
        self.assertEqual(self.get_token("--server", OTHER, TOKEN="x"), (OTHER, "x"))
        self.assertEqual(self.get_token("--server", "https://x"), ("https://x", None))
        self.assertEqual(self.get_token(TOKEN="x"), (URL, "first"))
        self.assertEqual(self.get_token(SERVER=f"{URL}/", TOKEN="x"), (URL, "x"))
        self.assertEqual(self.get_token("--server", OTHER, SERVER=URL), (OTHER, None))
        self.file.write_text("filed")
        self.assertEqual(self.get_token("--token-file", str(self.file)), (URL, "filed"))
        self.login(URL, token="second")
        self.assertEqual(self.get_token(), (URL, "second"))
        self.assertNotIn("first", self.path.read_text())

    def test_stored_servers_are_not_read_if_server_and_token_are_given(self) -> None:
        self.login(URL)
        self.path.chmod(0o644)
        self.assertEqual(self.get_token("--server", URL, TOKEN="x"), (URL, "x"))
        result = self.run_command("list", "--server", URL)
        self.assertEqual(result.exit_code, 2)
        self.assertIn(f"chmod 600 {self.path}", result.stderr)

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
            (["ftp://x"], "x", "is not the URL of a server"),
        ):
            result = self.login(*arguments, token=typed)
            self.assertEqual(result.exit_code, 2, typed)
            self.assertIn(words, result.stderr)
            self.assertNotIn("Traceback", result.stderr)
            self.assertFalse(self.path.exists())
        self.line = self.make(tokens=folder / "tokens", token=token)
        self.assertEqual(self.login(URL, token=token).exit_code, 0)


class ServerTests(CommandTestCase):
    def asked(self, *options: str, **env: str) -> ServerAccess:
        self.run_command("list", *options, env={f"TAWEBEVAL_{k}": v for k, v in env.items()})
        assert self.server is not None
        return self.server

    def test_token_comes_from_file_or_environment_and_is_not_in_the_repr(self) -> None:
        one, two = Path(self.mktemp()), Path(self.mktemp())
        one.write_text("one\n")
        two.write_text("two\n")
        self.assertIsNone(self.asked().token)
        self.assertEqual(self.asked(TOKEN="three").token, "three")
        self.assertEqual(self.asked(TOKEN="three", TOKEN_FILE=str(two)).token, "two")
        self.assertEqual(self.asked("--token-file", str(one), TOKEN_FILE=str(two)).token, "one")
        self.assertNotIn("three", repr(self.asked(TOKEN="three")))

    def test_token_sent_in_clear_text_is_warned_of(self) -> None:
        for url, token, warns in (
            ("http://judge.example.org", "t", True),
            ("http://192.0.2.1:8080", "t", True),
            ("http://judge.example.org", None, False),
            ("https://judge.example.org", "t", False),
            ("http://127.0.0.1:8080", "t", False),
            ("http://[::1]:8080", "t", False),
            ("http://localhost", "t", False),
        ):
            shown = Shown()
            ServerAccess(url, token).make_client(shown.screen)
            secure = url.replace("http:", "https:")
            warning = f"warning: {url} gets the token in clear text; try {secure}\n"
            self.assertEqual(shown.notes.getvalue(), warning if warns else "", (url, token))

    def test_invalid_tokens_are_refused(self) -> None:
        empty = Path(self.mktemp())
        empty.write_text("\n")
        for options, env, words in (
            (["--token-file", str(empty)], {}, "has no token; put the token alone into it"),
            ([], {"TAWEBEVAL_TOKEN": "a b"}, "TAWEBEVAL_TOKEN: a token is one word"),
            ([], {"TAWEBEVAL_TOKEN": "a\nb"}, "one word"),
        ):
            result = self.run_command("list", *options, env=env)
            self.assertEqual(result.exit_code, 2)
            self.assertIn(words, result.stderr)

    def test_unauthorized_caller_learns_how_to_give_a_token(self) -> None:
        folder = Path(self.mktemp())
        folder.mkdir()
        (folder / "tokens").write_text(generate_token("alice", os.urandom)[1])
        self.line = self.make(tokens=folder / "tokens")
        result = self.run_command("list")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("--token-file", result.stderr)
