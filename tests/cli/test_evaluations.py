"""`cli.evaluations`: `status`, `cancel`, `list`, `follow`."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import UTC, datetime
from typing import Any

from tawebeval.cli.evaluations import (
    format_age,
    format_evaluation_row,
    format_problem_title,
    format_status,
)
from tawebeval.cli.output import format_json, summarize_results
from tawebeval.config import Configuration, EnvironmentSettings
from tawebeval.core.form import LIMIT_UNITS
from tests.cases.client import Fate
from tests.cases.command import REPOSITORY, CommandTestCase, LineClient
from tests.cases.screen import Shown


class EvaluationsTests(CommandTestCase):
    def test_status_is_short_for_people_and_whole_for_programs(self) -> None:
        identifier = self.line.begin()
        shown = self.run_command("status", identifier).stdout
        self.assertRegex(shown, r"(?m)^state +running$")
        self.assertNotIn("None", shown)
        document = json.loads(self.run_command("status", "--json", identifier).stdout)
        self.assertEqual(document["evaluation_id"], identifier)
        self.line.child.complain(b"one\ntwo \x1b[2J\n")
        self.line.child.end(3)
        shown = self.run_command("status", identifier).stdout
        self.assertRegex(shown, r"(?m)^exit +status: 3$")
        self.assertRegex(shown, r"(?m)^stderr +one\n +two \\u001b\[2J$")

    def test_sizes_in_a_status_have_units(self) -> None:
        identifier = self.line.begin(limits={"memory": "64M", "output": 1500})
        shown = self.run_command("status", identifier).stdout
        self.assertRegex(shown, r"(?m)^limits .*\bmemory: 64 MiB,.*\boutput: 1.5 KiB,")
        self.assertRegex(shown, r"(?m)^buffered_bytes +0 bytes$")

    def test_link_is_printed_as_url_of_the_page_and_revoked(self) -> None:
        identifier = self.line.begin()
        result = self.run_command("share", "--days", "2", identifier)
        pattern = rf"\Ahttp://127.0.0.1:8080/#shared/{identifier}/(link_[A-Za-z0-9_-]{{28}})\n\Z"
        self.assertRegex(result.stdout, pattern)
        self.assertRegex(result.stderr, "the link ends at [0-9]{4}-")
        document = json.loads(self.run_command("share", "--json", identifier).stdout)
        self.assertEqual(sorted(document), ["expires", "link", "url"])
        self.assertRegex(document["url"] + "\n", pattern)
        for status, revoke in ((0, False), (2, True)):
            if revoke:
                result = self.run_command("share", "--revoke", identifier)
                self.assertEqual((result.exit_code, result.stdout), (0, ""))
            self.line.client.token = document["link"]
            self.assertEqual(self.run_command("status", identifier).exit_code, status)
            self.line.client.token = None

    def test_options_of_rerun_replace_values_of_the_first_evaluation(self) -> None:
        first = self.line.begin(seed=3)
        self.assertIn("has not ended", self.run_command("rerun", first).stderr)
        self.line.child.end()
        self.line.settle()
        options = ("--seed", "4", "--limit", "cpu=9", "--label", "a=b", "--commit", "d" * 40)
        result = self.run_command("rerun", "--detach", *options, first)
        self.assertEqual(result.exit_code, 0, result.stderr)
        document = json.loads(self.run_command("status", "--json", result.stdout.strip()).stdout)
        self.assertEqual((document["seed"], document["commit_oid"]), (4, "d" * 40))
        self.assertEqual((document["limits"]["cpu"], document["metadata"]), (9, {"a": "b"}))
        self.line.child.end()
        self.line.settle()
        self.meanwhile = self.end()
        result = self.run_command("rerun", first)
        self.assertEqual((result.exit_code, result.stdout), (0, "hello\n"))
        self.meanwhile = self.end()
        result = self.run_command("rerun", "--events", first)
        self.assertEqual(json.loads(result.stdout.splitlines()[0])["type"], "text")
        self.run_command("follow", first)
        self.assertEqual(self.run_command("rerun", first).exit_code, 2)

    def test_whoami_shows_the_caller_and_what_its_token_permits(self) -> None:
        shown = json.loads(self.run_command("whoami", "--json").stdout)
        self.assertEqual((shown["caller"], shown["problems"]), (None, None))
        self.assertIn("read_only       False", self.run_command("whoami").stdout)
        members = {"supervises": {"b": ["ann", "bob"]}}
        self.assertEqual(format_status(members), "supervises      b: ann bob")

    def test_each_limit_in_bytes_is_shown_with_a_unit(self) -> None:
        limits = {name: 2**20 for name, unit in LIMIT_UNITS.items() if unit == "bytes"}
        self.assertEqual(format_status({"limits": limits}).count("1 MiB"), len(limits))

    def test_problem_is_shown_without_the_bytes_of_its_pictures(self) -> None:
        document = {"name": "a", "statement": "![p](p.png)", "pictures": {"p.png": "data:,x"}}
        self.patch(LineClient, "problem", lambda *_: dict(document))
        self.assertNotIn("data:", self.run_command("problems", "a").stdout)
        self.assertEqual(json.loads(self.run_command("problems", "--json", "a").stdout), document)

    def test_environments_are_listed_as_table_or_json(self) -> None:
        java = EnvironmentSettings("/srv/java", description="JDK 21\x9b\nx")
        self.line.service.registry.context.configuration = Configuration(
            environments={"java": java}
        )
        shown = self.run_command("environments").stdout
        self.assertRegex(shown, r"\ANAME +DESCRIPTION\n(?:default .*\n)?java +JDK 21\\u009b x\n\Z")
        shown = self.run_command("environments", "--json").stdout
        self.assertIn(
            {"name": "java", "description": "JDK 21\x9b\nx", "digest": None}, json.loads(shown)
        )

    def test_json_on_a_terminal_has_escaped_control_characters(self) -> None:
        text = "\x9b2J\x7f\u202eü"
        for terminal, written in ((True, "\\u009b2J\\u007f\\u202eü"), (False, text)):
            shown = Shown(terminal=terminal)
            shown.screen.print_text(format_json({"a": text}))
            self.assertIn(f'"{written}"', shown.out.getvalue())
            self.assertEqual(json.loads(shown.out.getvalue(), strict=False), {"a": text})

    def test_list_has_verdict_age_and_problem(self) -> None:
        identifiers = [self.line.begin() for _ in range(2)]
        self.line.child.end(3)
        self.line.settle()
        header, *lines = self.run_command("list").stdout.splitlines()
        self.assertEqual(header.split(), ["ID", "VERDICT", "AGE", "PROBLEM", "LABELS"])
        for line, identifier, verdict in zip(
            lines, identifiers, ("running", "failed: exit"), strict=True
        ):
            self.assertRegex(line, rf"^{identifier}  {verdict} +\d+ d  ./evaluate$")
        listed = json.loads(self.run_command("list", "--json").stdout)
        self.assertEqual([one["evaluation_id"] for one in listed], identifiers)

    def test_list_names_daemons_that_do_not_answer(self) -> None:
        self.line.add_silent_peer("b")
        made = self.line.begin()
        result = self.run_command("list", "--json")
        self.assertEqual([one["evaluation_id"] for one in json.loads(result.stdout)], [made])
        self.assertIn("the list is incomplete: no answer from b; try again later", result.stderr)

    def test_row_has_state_reason_age_problem_and_labels(self) -> None:
        now = datetime(2018, 9, 1, tzinfo=UTC)
        document = {"evaluation_id": "x", "state": "running", "created": now.isoformat()}
        document |= {"directory": "d", "evaluator_cmd": "y" * 1024}
        for what, members, row in (
            ("problem before directory", {"problem": "sums"}, "x running 0 s sums"),
            ("directory", {"directory": "a\x1b/b"}, "x running 0 s a\\u001b/b"),
            ("beginning of the command", {"directory": ""}, f"x running 0 s {'y' * 40}"),
            (
                "labels last",
                {"metadata": {"contest": "finals", "user": "a\nb"}},
                "x running 0 s d contest=finals, user=a b",
            ),
            (
                "state and reason",
                {"state": "failed", "error": {"reason": "memory"}},
                "x failed: memory 0 s d",
            ),
            (
                "reason that is the state",
                {"state": "cancelled", "error": {"reason": "cancelled"}},
                "x cancelled 0 s d",
            ),
        ):
            self.assertEqual(
                " ".join(format_evaluation_row(document | members, now).split()), row, what
            )

    def test_title_tells_when_the_problem_closes_in_the_local_time_zone(self) -> None:
        before = os.environ.get("TZ")
        os.environ["TZ"] = "UTC-2"
        time.tzset()
        try:
            shown = format_problem_title(
                {"title": "Sums", "closes": "2026-12-01T11:00:00.000+00:00"}
            )
        finally:
            os.environ.pop("TZ")
            if before is not None:
                os.environ["TZ"] = before
            time.tzset()
        self.assertEqual(shown, "Sums (closes 2026-12-01 13:00)")
        self.assertEqual(format_problem_title({"title": "Sums", "closes": None}), "Sums")

    def test_list_is_filtered_by_times_and_ages(self) -> None:
        identifier = self.line.begin()
        for options, expected in (
            (["--since", "9d"], []),
            (["--until", "9d"], [identifier]),
            (["--since", "2001-01-01"], [identifier]),
            (["--until", "2001-01-01T00:00:00Z"], []),
        ):
            listed = json.loads(self.run_command("list", "--json", *options).stdout)
            self.assertEqual([one["evaluation_id"] for one in listed], expected, options)
        for given in ("yesterday", "7", "999999999d", "0001-01-01"):
            result = self.run_command("list", "--since", given)
            self.assertEqual(result.exit_code, 2, given)
            self.assertIn(f"'{given}' is neither a time", result.stderr)

    def test_row_shows_score_goals_cases_or_progress_in_this_order_or_the_error(self) -> None:
        results: dict[str, Any] = {
            "goals": {"a": True, "b": False, "c": True},
            "goals_omitted": 0,
            "cases": {"accepted": 9, "time_limit": 1},
            "progress": {"done": 10, "total": 12},
            "score": {"score": 7.5, "maximum": 10},
        }
        words = ["score 7.5/10", "2/3 goals", "9/10 cases (1 time limit)", "progress 10/12"]
        for omitted, changed, expected in (
            (0, {}, words),
            (4, {"score": {"score": 3, "maximum": None}}, ["score 3", "2/3+ goals", *words[2:]]),
            (
                0,
                {"score": None, "goals": {}, "cases": {"partial": 1}},
                ["0/1 cases (1 partial)", words[3]],
            ),
            (0, {"progress": None}, words[:3]),
        ):
            shown = {**results, "goals_omitted": omitted, **changed}
            self.assertEqual(summarize_results(shown), expected)
            document = {
                "evaluation_id": "x",
                "state": "finished",
                "created": "2018-09-01T11:58:30.000+00:00",
                "results": shown,
            }
            now = datetime(2018, 9, 1, 12, 0, 0, tzinfo=UTC)
            verdict = f"  finished: {expected[0].partition(' (')[0]}  "
            self.assertIn(verdict, format_evaluation_row(document, now))
            self.assertIn(f"results         {', '.join(expected)}", format_status(document))
            document["error"] = {"reason": "exit"}
            self.assertIn("  finished: exit  ", format_evaluation_row(document, now))
        self.assertEqual(summarize_results(None), [])

    def test_age_is_in_the_largest_unit(self) -> None:
        for seconds, age in (
            *((-5, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min")),
            *((3600, "1 h"), (86399, "23 h"), (172800, "2 d")),
        ):
            self.assertEqual(format_age(seconds), age)

    def test_command_gives_up_at_once_if_no_daemon_listens_on_this_machine(self) -> None:
        self.line.agent.fate = lambda: Fate.REFUSED
        for command in ("evaluate", *REPOSITORY, "x=1"), ("follow", "x"), ("list",):
            self.line.agent.asked.clear()
            result = self.run_command(*command)
            self.assertEqual(result.exit_code, 3)
            self.assertIn("cannot connect to ", result.stderr)
            self.assertEqual(len(self.line.agent.asked), 1)

    def test_ctrl_c_while_following_prints_the_command_that_continues(self) -> None:
        identifier = self.line.begin()
        presses = iter([signal.SIGINT])
        self.meanwhile = lambda: [signal.raise_signal(number) for number in presses]
        result = self.run_command("follow", identifier)
        self.assertEqual(result.exit_code, 130)
        self.assertIn(f"continue here with `tawebeval follow {identifier}`\n", result.stderr)
