"""The command `tawebeval`, in terminals and with pipes, against the daemon."""

from __future__ import annotations

from tests.integration.client import python
from tests.integration.harness import DaemonTestCase, until
from tests.integration.terminal import Terminal, piped

PARTIAL = python("import time; print('half', end='', flush=True); time.sleep(600)")


class CommandTests(DaemonTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        (self.folder / "solution.py").write_text("print(1)\n")

    def arguments(self, command: str, *more: str) -> tuple[str, ...]:
        """Return those that evaluate in the test's repository."""
        place = ("--repository", self.repository.url, "--commit", self.commit)
        return ("evaluate", *place, "--evaluator", command, *more)

    def source(self) -> str:
        return str(self.folder / "solution.py")

    async def test_terminal_shows_partial_lines_and_ctrl_c_cancels(self) -> None:
        terminal = Terminal(self.daemon.url, *self.arguments(PARTIAL, "x=1"))
        self.addCleanup(terminal.close)
        await until(lambda: "half" in terminal.shown, "the partial line is there")
        terminal.interrupt()
        self.assertEqual(await terminal.end(), 1)
        self.assertIn("cancelling", terminal.shown)
        self.assertIn("\x1b[31mfailed: ", terminal.shown)

    async def test_typed_token_is_hidden_and_stored_for_its_owner_alone(self) -> None:
        folder = self.folder / "configuration"
        more = {"XDG_CONFIG_HOME": str(folder)}
        arguments = ("login", self.daemon.url)
        terminal = Terminal("", *arguments, **more)
        self.addCleanup(terminal.close)
        await until(lambda: "Token (" in terminal.shown, "it asks")
        terminal.type("secret\n")
        self.assertEqual(await terminal.end(), 0, terminal.shown)
        self.assertNotIn("secret", terminal.shown)
        file = folder / "tawebeval" / "servers.json"
        self.assertIn("secret", file.read_text())
        self.assertEqual(file.stat().st_mode & 0o777, 0o600)
        self.assertEqual((await piped("", "list", **more)).returncode, 0)
        file.chmod(0o640)
        done = await piped("", "list", **more)
        self.assertEqual(done.returncode, 2)
        self.assertIn(f"chmod 600 {file}", done.stderr)
