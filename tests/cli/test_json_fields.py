"""`cli.json_fields`: fields of documents, and their names."""

from __future__ import annotations

import json

from tawebeval.cli.json_fields import (
    ENVIRONMENT_FIELDS,
    PROBLEM_FIELDS,
    STATUS_FIELDS,
    SUMMARY_FIELDS,
)
from tests.cases.command import CommandTestCase
from tests.cases.described import DOCUMENT


class JsonFieldsTests(CommandTestCase):
    """`--json FIELDS`."""

    def test_names_are_those_of_the_openapi_document(self) -> None:
        schemas = DOCUMENT["components"]["schemas"]
        environment = schemas["Environments"]["properties"]["data"]["items"]
        for names, schema in (
            (STATUS_FIELDS, schemas["Status"]),
            (SUMMARY_FIELDS, schemas["Summary"]),
            (PROBLEM_FIELDS, schemas["JudgedProblem"]),
            (ENVIRONMENT_FIELDS, environment),
        ):
            self.assertEqual(list(names), list(schema["properties"]))

    def test_selected_fields_are_printed_in_order_and_absent_ones_are_null(self) -> None:
        identifier = self.line.begin(seed=3)
        shown = self.run_command("status", "--json", "seed, state,archived", identifier).stdout
        self.assertEqual(
            list(json.loads(shown).items()), [("seed", 3), ("state", "running"), ("archived", None)]
        )

    def test_list_requests_statuses_only_for_fields_that_it_lacks(self) -> None:
        identifier = self.line.begin(seed=3)
        for fields, found, requests in (
            ("state", {"state": "running"}, 1),
            ("seed,evaluation_id", {"seed": 3, "evaluation_id": identifier}, 2),
        ):
            self.line.agent.asked.clear()
            shown = self.run_command("list", "--json", fields).stdout
            self.assertEqual(json.loads(shown), [found])
            self.assertEqual(len(self.line.agent.asked), requests)

    def test_fields_are_listed_without_argument_and_for_a_wrong_name(self) -> None:
        result = self.run_command("list", "--json")
        self.assertEqual(result.exit_code, 2)
        self.assertIn(
            "separated by commas, or `all`:\n  evaluation_id\n  log_name\n", result.stderr
        )
        result = self.run_command("status", "--json", "abc")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("'abc' is not a field; the fields are evaluation_id, log_name", result.stderr)
        self.assertEqual(self.line.agent.asked, [])
