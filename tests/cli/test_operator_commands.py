"""`cli.operator_commands`: the starter and new tokens; others are tested beside what they call."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from twisted.scripts import twistd
from twisted.scripts._twistd_unix import ServerOptions
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli import main
from tawebeval.core.tokens import parse_tokens
from tests.cases.documented import CONFIGURE, scripts


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
    def test_token_is_on_stdout_and_its_line_for_the_file_on_stderr(self) -> None:
        result = CliRunner().invoke(main, ["token", "new", "alice"])
        self.assertEqual(result.exit_code, 0, result.output)
        self.assertRegex(result.stdout, r"\Atawebeval_\S+\n\Z")
        self.assertNotIn("tawebeval_", result.stderr)
        token = result.stdout.strip()
        (line,) = re.findall(r"^alice sha256:\S+$", result.stderr, re.MULTILINE)
        tokens = parse_tokens(line)
        self.assertEqual(tokens.find_token([b"Bearer " + token.encode()]).caller, "alice")

    def test_problem_option_restricts_the_token(self) -> None:
        given = ["token", "new", "alice", "--problem", "a", "--problem", "b"]
        result = CliRunner().invoke(main, given)
        self.assertIn(" problems=a,b\n", result.stderr)
        result = CliRunner().invoke(main, [*given, "--problem", "A"])
        self.assertEqual(result.exit_code, 2)
        self.assertIn("'A' cannot be a problem's name", result.output)

    def test_token_that_only_reads_is_described(self) -> None:
        result = CliRunner().invoke(main, ["token", "new", "alice", "--read"])
        self.assertIn("only the evaluations that alice submits with another token", result.stderr)

    def test_commands_of_docs_configure_write_both_files_of_tokens(self) -> None:
        folder = Path(self.mktemp()).absolute()
        folder.mkdir()
        command = folder / "tawebeval"
        program = "from tawebeval.cli import main; main()"
        command.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{program}' \"$@\"\n")
        command.chmod(0o755)
        first, *_ = scripts(CONFIGURE, "Tokens")
        script = first.replace("/etc/tawebeval/tokens", "tokens")
        variables = {
            "PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": ":".join(sys.path),
        }
        shown = []
        for arguments in ("alice", "bob --read", "a/b"):
            done = subprocess.run(
                ["sh", "-c", script.replace("new alice", f"new {arguments}")],
                cwd=folder,
                env=variables,
                capture_output=True,
                text=True,
            )
            shown.append(done.stdout + done.stderr)
        self.assertEqual(shown[0], "")
        self.assertTrue(shown[1].startswith("the token only reads"), shown[1])
        self.assertIn("'a/b' cannot be a caller's name", shown[2])
        lines = (folder / "tokens").read_text("ascii").splitlines()
        self.assertEqual([line.split()[0] for line in lines], ["alice", "bob"])

    def test_invalid_name_is_refused_with_the_rule(self) -> None:
        result = CliRunner().invoke(main, ["token", "new", "a b"])
        self.assertEqual(result.exit_code, 2)
        self.assertIn("64", result.output)
        self.assertNotIn("sha256", result.output)
