"""`cli.operator_commands`: the starter and new tokens; others are tested beside what they call."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from twisted.scripts import twistd
from twisted.scripts._twistd_unix import ServerOptions
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli import main
from tawebeval.core.tokens import parse_tokens
from tests.cases.patience import PATIENCE


class ServeTests(SynchronousTestCase):
    def test_serve_passes_its_options_to_twistd_and_searches_for_no_plugins(self) -> None:
        run: list[Any] = []
        self.patch(twistd, "runApp", run.append)
        self.patch(ServerOptions, "_getPlugins", None)
        listen = "tcp:8123:interface=127.0.0.1"
        arguments = ["serve", "--config", "a.toml", "--listen", listen]
        done = CliRunner().invoke(main, arguments, catch_exceptions=False)
        self.assertEqual((done.exit_code, done.output), (0, ""))
        (options,) = run
        self.assertEqual(options.subCommand, "tawebeval")
        self.assertEqual(options.loadedPlugins["tawebeval"].module, "tawebeval.daemon.tap")
        chosen = options.subOptions
        self.assertEqual((chosen["config"], [*chosen["listen"]]), ("a.toml", [listen]))


class TokenTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()
        self.file = self.folder / "tokens"

    def run_token(self, command: str, *arguments: str, status: int = 0) -> Result:
        arguments = ("token", command, "--file", str(self.file), *arguments)
        result = CliRunner().invoke(main, arguments)
        self.assertEqual(result.exit_code, status, result.output)
        self.assertEqual([path.name for path in self.folder.glob(".*")], [])
        return result

    def test_interruption_at_the_lock_does_not_delete_the_new_file_of_another_process(self) -> None:
        other = self.folder / ".tokens.new"
        other.write_text("line")

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        self.patch(fcntl, "flock", interrupt)
        CliRunner().invoke(main, ("token", "add", "--file", str(self.file), "alice"))
        self.assertEqual(other.read_text(), "line")

    def test_token_is_printed_once_and_the_new_file_is_for_its_owner_alone(self) -> None:
        result = self.run_token("add", "alice")
        self.assertRegex(result.stdout, r"\Atawebeval_\S+\n\Z")
        token = result.stdout.strip()
        self.assertNotIn(token, result.stderr)
        text = self.file.read_text()
        self.assertNotIn(token, text)
        tokens = parse_tokens(text)
        self.assertEqual(tokens.find_token([b"Bearer " + token.encode()]).caller, "alice")
        self.assertEqual(self.file.stat().st_mode & 0o7777, 0o600)

    def test_options_of_token_add_are_in_the_line_of_the_token(self) -> None:
        self.run_token("add", "bob", "--group", "g", "--problem", "b", "--problem", "a", "--read")
        self.run_token("add", "t", "--supervise", "g", "--supervise", "h", "--rate", "9")
        self.run_token("add", "site", "--shared")
        bob, teacher, site = parse_tokens(self.file.read_text()).tokens
        self.assertRegex(bob.file_line, r"^bob sha256:\S{64} read group=g problems=a,b$")
        self.assertRegex(teacher.file_line, r"^t sha256:\S{64} rate=9 supervises=g,h$")
        self.assertRegex(site.file_line, r"^site sha256:\S{64} shared$")

    def test_invalid_name_is_refused_with_the_rule_and_changes_nothing(self) -> None:
        for arguments in (
            ["a b"], ["a", "--group", "g h"], ["a", "--supervise", ""], ["a", "--problem", "A"],
        ):  # fmt: skip
            result = self.run_token("add", *arguments, status=2)
            self.assertIn("1 to 64 of the characters", result.output)
        self.assertFalse(self.file.exists())

    def test_adding_a_token_keeps_mode_comments_and_symbolic_link_of_the_file(self) -> None:
        real = self.folder / "real"
        real.write_text(f"# ours\nold sha256:{'0' * 64}")
        real.chmod(0o640)
        self.file.symlink_to(real)
        self.run_token("add", "alice")
        self.assertTrue(self.file.is_symlink())
        lines = real.read_text().split("\n")
        self.assertEqual(lines[:2], ["# ours", f"old sha256:{'0' * 64}"])
        self.assertEqual([lines[2][:13], lines[3:]], ["alice sha256:", [""]])
        self.assertEqual(real.stat().st_mode & 0o7777, 0o640)

    def test_token_list_shows_restrictions_and_only_the_first_digits_of_hashes(self) -> None:
        self.file.write_text(f"a sha256:{'ab' * 32} group=g problems=x\nb sha256:{'CD' * 32}\n")
        shown = self.run_token("list").stdout.splitlines()
        self.assertEqual([line.split() for line in shown], [
            ["a", "abababababab", "group=g", "problems=x"], ["b", "cdcdcdcdcdcd"],
        ])  # fmt: skip

    def test_revoke_removes_all_tokens_of_a_caller_or_the_token_of_a_hash(self) -> None:
        one, two, other = (f"{name} sha256:{digit * 64}" for name, digit in ("a1", "a2", "b3"))
        self.file.write_text(f"# first\n{one}\n\n{two}\n{other}\n")
        self.run_token("revoke", "a", "--hash", "2" * 12)
        self.assertEqual(self.file.read_text(), f"# first\n{one}\n\n{other}\n")
        self.run_token("revoke", "a", "--hash", "3", status=2)
        self.run_token("revoke", "c", status=2)
        self.run_token("revoke", "a")
        self.assertEqual(self.file.read_text(), f"# first\n\n{other}\n")

    def test_last_token_cannot_be_revoked(self) -> None:
        self.file.write_text(f"a sha256:{'0' * 64}\n")
        result = self.run_token("revoke", "a", status=2)
        self.assertIn("the last token", result.stderr)
        self.assertEqual(self.file.read_text(), f"a sha256:{'0' * 64}\n")

    def test_token_commands_refuse_and_do_not_change_a_malformed_file(self) -> None:
        for content in (b"not a line\n", b"\xff\n"):
            self.file.write_bytes(content)
            for command in (("add", "a"), ("list",), ("revoke", "a")):
                result = self.run_token(*command, status=2)
                self.assertIn(str(self.file), result.stderr)
            self.assertEqual(self.file.read_bytes(), content)
        self.file.unlink()
        self.file.mkdir()
        self.run_token("add", "a", status=2)

    def test_tokens_added_at_the_same_time_are_all_stored(self) -> None:
        program = "from tawebeval.cli import main; main()"
        arguments = [sys.executable, "-c", program, "token", "add", "--file", str(self.file)]
        environment = {"PYTHONPATH": ":".join(sys.path)}
        running = [
            subprocess.Popen([*arguments, f"n{n}"], env=environment, stdout=subprocess.DEVNULL)
            for n in range(4)
        ]
        self.assertEqual([process.wait(PATIENCE) for process in running], [0] * 4)
        names = parse_tokens(self.file.read_text()).caller_names
        self.assertEqual(names, {"n0", "n1", "n2", "n3"})

    def test_file_changed_by_another_program_meanwhile_is_not_overwritten(self) -> None:
        self.file.write_text(f"a sha256:{'0' * 64}\n")
        edited = f"b sha256:{'1' * 64}\n"
        self.patch(os, "fsync", lambda _: self.file.write_text(edited))
        result = self.run_token("add", "c", status=2)
        self.assertIn("another program has changed the file", result.stderr)
        self.assertEqual((result.stdout, self.file.read_text()), ("", edited))
