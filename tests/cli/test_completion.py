"""`cli.completion`: names for the shell, of which a server has chosen some."""

from __future__ import annotations

import time

from tawebeval.cli import completion
from tawebeval.cli.runtime import ServerAccess
from tawebeval.config import Configuration, EnvironmentSettings, ProblemSettings
from tests.cases.agents import Fate
from tests.cases.command import CommandTestCase
from tests.fakes.world import OID


class CompletionTests(CommandTestCase):
    """Completion as the shell asks for it."""

    def complete(self, *words: str, token: str = "") -> list[str]:
        """Return what zsh is offered for the last word: pairs of a name and a help."""
        env = {"COMP_WORDS": " ".join(("main", *words[:-1])), "COMP_CWORD": str(len(words))}
        env["COMP_WORDS"] += f" {words[-1]}"
        env["TAWEBEVAL_TOKEN"] = token
        result = self.run_command(env={"_MAIN_COMPLETE": "zsh_complete", **env})
        self.assertEqual((result.exit_code, result.stderr), (0, ""))
        lines = result.stdout.splitlines()
        return [f"{name}: {help_}" for name, help_ in zip(lines[1::3], lines[2::3], strict=True)]

    def test_problems_environments_and_identifiers_of_the_server_are_offered(self) -> None:
        problem = ProblemSettings("https://example.org/p.git", "./run", commit=OID, title="T\x9b")
        java = EnvironmentSettings("/srv/java", description="a `b` $(c)\nd")
        self.line.service.registry.context.configuration = Configuration(
            problems={"one": problem, "two": problem}, environments={"java": java}
        )
        self.assertEqual(self.complete("evaluate", "--problem", "o"), ["one: T"])
        self.assertEqual(self.complete("list", "--problem", "t"), ["two: T"])
        self.assertEqual(self.complete("evaluate", "--environment", "j"), ["java: a b (c) d"])
        identifiers = [self.line.begin() for _ in range(2)]
        first = self.complete("status", "")
        self.assertEqual({line.partition(":")[0] for line in first}, set(identifiers))
        self.assertTrue(first[0].endswith(": running"), first)
        self.assertEqual(len(self.complete("status", identifiers[0])), 1)

    def test_failing_and_unknown_servers_offer_nothing_silently(self) -> None:
        self.line.agent.fate = lambda: Fate.NONSENSE
        self.assertEqual(self.complete("status", ""), [])
        self.assertEqual(self.complete("status", "--server", "none", ""), [])

    def test_no_token_is_sent_in_clear_text_over_a_network(self) -> None:
        self.line.begin()
        for url, count in (("http://judge.example.org", 0), ("https://judge.example.org", 1)):
            offered = self.complete("status", "--server", url, "", token="x")
            self.assertEqual(len(offered), count, url)

    def test_shell_waits_for_a_short_time_only(self) -> None:
        self.patch(completion, "_TIMEOUT", 0.01)

        def make_client(server: ServerAccess) -> None:
            time.sleep(0.5)

        self.patch(ServerAccess, "make_quiet_client", make_client)
        self.assertEqual(self.complete("status", ""), [])

    def test_stored_servers_are_offered(self) -> None:
        self.run_command("login", "--storage", "file", "https://judge.example.org", stdin=b"x\n")
        for words in (("list", "--server", ""), ("logout", "j"), ("servers", "--default", "")):
            offered = ["judge.example.org: https://judge.example.org"]
            self.assertEqual(self.complete(*words), offered)
