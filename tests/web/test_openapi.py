"""`web/openapi.json`: it is sound, and it is of this API.

All that the tests of the web are answered in memory is held against it, too (`cases.described`),
and schemathesis does as it says with a real daemon (`tests.integration.test_description`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import orjson
from openapi_spec_validator import OpenAPIV31SpecValidator
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import __version__, errors
from tawebeval.cli.evaluations import STATES
from tawebeval.config import MIB, Configuration
from tawebeval.core import form
from tawebeval.core.evaluations import CLIENT_VISIBLE_STATES, IDENTIFIER_PATTERN
from tawebeval.errors import FailureReason
from tawebeval.web.events import OFFERED_MEDIA_TYPES
from tawebeval.web.routes import OPENAPI_PATH, STATIC_RESOURCES, make_app
from tawebeval.web.server import messages
from tawebeval.web.server.messages import MAX_NUMBER_DIGITS
from tawebeval.web.streams import HEARTBEAT_SECONDS
from tawebeval.webhooks.records import CallbackState
from tawebeval_client.results import MAX_GOAL_NAMES_BYTES, MAX_GOALS, VERDICTS
from tests.cases import described
from tests.cases.described import DOCUMENT, complaints, operations, resolve
from tests.cases.web import CallerTestCase, WebTestCase
from tests.run import ROOT

SCHEMAS = DOCUMENT["components"]["schemas"]
FORM = SCHEMAS["Form"]


def parts(value: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all objects of the document, with where they are; examples are not looked into."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from parts(each, f"{path}/{number}")
    elif isinstance(value, dict):
        yield path, value
        for name, each in value.items():
            if name not in ("example", "examples"):
                yield from parts(each, f"{path}/{name}")


def examples() -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yield each example, with where it is and its schema."""
    for path, part in parts(DOCUMENT):
        schema = part.get("schema", part)
        if "example" in part:
            yield path, schema, part["example"]
        found = part.get("examples", [])
        if isinstance(found, list):
            yield from ((path, schema, example) for example in found)
        else:
            yield from ((path, schema, example["value"]) for example in found.values())


class DocumentTests(SynchronousTestCase):
    def test_document_is_openapi_3_1(self) -> None:
        found = [error.message for error in OpenAPIV31SpecValidator(DOCUMENT).iter_errors()]
        self.assertEqual(found, [])
        self.assertEqual(DOCUMENT["openapi"][:4], "3.1.")
        self.assertEqual(DOCUMENT["info"]["version"], __version__)
        self.assertEqual([server["url"] for server in DOCUMENT["servers"]], ["."])

    def test_examples_match_their_schemas_without_other_members(self) -> None:
        found = list(examples())
        self.assertGreater(len(found), 40)
        for path, schema, example in found:
            self.assertEqual(complaints(schema, example), [], path)

    def test_every_body_and_parameter_has_an_example(self) -> None:
        for path, part in parts(DOCUMENT):
            if "/content/" in path and path.rpartition("/content/")[2].count("/") == 1:
                self.assertTrue("example" in part or part.get("examples"), path)
            if "in" in part and "name" in part and "securitySchemes" not in path:
                self.assertTrue("example" in part or part.get("examples"), path)

    def test_problem_examples_have_the_status_and_words_of_the_daemon(self) -> None:
        for status, response in DOCUMENT["components"]["responses"].items():
            if "content" not in response:
                continue
            example = response["content"]["application/problem+json"]["example"]
            self.assertEqual(example["status"], int(status))
            self.assertEqual(example["message"], example["detail"])
        for refusal in (errors.EvaluationNotFound(), errors.EvaluationExpired()):
            status = str(messages.ERROR_STATUSES[type(refusal)].value)
            response = DOCUMENT["components"]["responses"][status]
            example = response["content"]["application/problem+json"]["example"]
            self.assertEqual(example, orjson.loads(messages.make_error_response(refusal)[2]))

    def test_references_lead_to_named_components(self) -> None:
        # Generators of clients follow no other.
        for path, part in parts(DOCUMENT):
            if "$ref" in part:
                self.assertRegex(part["$ref"], r"^#/components/[a-zA-Z]+/[A-Za-z0-9_-]+$", path)

    def test_openapi_json_has_no_duplicate_member_names(self) -> None:
        def check_names(members: list[tuple[str, Any]]) -> None:
            names = [name for name, _ in members]
            self.assertEqual(len(names), len(set(names)), names)

        json.loads(
            (ROOT / "tawebeval/web/openapi.json").read_bytes(), object_pairs_hook=check_names
        )

    def test_every_component_is_used(self) -> None:
        used = {part["$ref"] for _, part in parts(DOCUMENT) if "$ref" in part}
        for kind in ("parameters", "headers", "responses", "schemas"):
            for name in DOCUMENT["components"][kind]:
                self.assertIn(f"#/components/{kind}/{name}", used)


class ContentTests(SynchronousTestCase):
    def test_form_fields_are_those_of_the_code(self) -> None:
        files = {name for name in FORM["properties"] if name.startswith("submission[")}
        self.assertEqual(set(FORM["properties"]) - files, set(form.TEXT_FIELD_SIZE_LIMITS))
        for name, limit in form.TEXT_FIELD_SIZE_LIMITS.items():
            described = resolve(FORM["properties"][name])
            if limit is not None and described["type"] == "string" and name != "commit_oid":
                self.assertEqual(described["maxLength"], limit)
                self.assertIn(f"{limit} bytes", described["description"])
        self.assertEqual(SCHEMAS["Seed"]["maximum"], form.MAX_SEED)
        self.assertEqual(FORM["properties"]["repository[depth]"]["maximum"], form.MAX_CLONE_DEPTH)
        pattern, label = FORM["patternProperties"]
        own = form.LABEL_FIELD_PATTERN.pattern.replace("(", "").replace(")", "")
        self.assertEqual(label, f"^{own}$")
        for name, good in (
            ("submission[a]", True),
            ("submission[" + "a" * 251 + "]", True),
            ("submission[" + "a" * 252 + "]", False),
            ("submission[A]", False),
            ("submission[]", False),
            ("submission[a]x", False),
        ):
            self.assertEqual(bool(re.search(pattern, name)), good, name)
            if good:
                self.assertIsNotNone(form.parse_submission_file(name, None))
            else:
                self.assertRaises(errors.InvalidField, form.parse_submission_file, name, None)

    def test_names_and_bounds_are_those_of_the_code(self) -> None:
        parameters, results = DOCUMENT["components"]["parameters"], SCHEMAS["Results"]["properties"]
        events = DOCUMENT["paths"]["/evaluation/{id}/events"]["get"]["responses"]["200"]
        location = DOCUMENT["components"]["headers"]["Location"]["schema"]["pattern"]
        reasons = re.findall("`([a-z_]+)`", SCHEMAS["Reason"]["description"])
        for what, told, expected in (
            *(
                (name, parameters[name]["schema"]["maximum"], 10**MAX_NUMBER_DIGITS - 1)
                for name in ("wait", "limit", "skip")
            ),
            ("identifiers", SCHEMAS["Identifier"]["pattern"], f"^{IDENTIFIER_PATTERN}$"),
            ("Location", location, f"^/(.+/)?evaluation/{IDENTIFIER_PATTERN}$"),
            ("states", SCHEMAS["State"]["enum"], list(CLIENT_VISIBLE_STATES)),
            ("states of the command", list(STATES), list(CLIENT_VISIBLE_STATES)),
            (
                "states of callbacks",
                SCHEMAS["Callback"]["properties"]["state"]["enum"],
                [state.value for state in CallbackState],
            ),
            ("verdicts", SCHEMAS["Verdict"]["enum"], list(VERDICTS)),
            ("goals", results["goals"]["maxProperties"], MAX_GOALS),
            ("limits", list(SCHEMAS["Limits"]["properties"]), list(form.LIMIT_UNITS)),
            ("limits that are always there", SCHEMAS["Limits"]["required"], [*form.LIMIT_UNITS]),
            ("reasons", {*reasons}, {*get_args(FailureReason), "protocol"}),
            ("media types", tuple(events["content"]), OFFERED_MEDIA_TYPES),
        ):
            self.assertEqual(told, expected, what)
        page = STATIC_RESOURCES["/static/page.js"].content.decode()
        self.assertIn(f"({IDENTIFIER_PATTERN})$", page)

    def test_form_needs_a_file(self) -> None:
        body = next(iter(DOCUMENT["paths"]["/evaluate"]["post"]["requestBody"]["content"].values()))
        whole = body["examples"]["python"]["value"]
        self.assertEqual(complaints({"$ref": "#/components/schemas/Form"}, whole), [])
        bare = {name: value for name, value in whole.items() if name in form.TEXT_FIELD_SIZE_LIMITS}
        self.assertTrue(complaints({"$ref": "#/components/schemas/Form"}, bare))

    def test_description_states_limits_and_defaults_of_the_code(self) -> None:
        settings = Configuration()
        said = json.dumps(DOCUMENT)
        for words in (
            f"Maximum {settings.limits.request_body // MIB} MiB for the body",
            "64 KiB for a field that is not a file",
            f"{form.MAX_FIELDS} fields. The first",
            f"Up to {settings.buffers.max_page_bytes // 1024} KiB of events",
            f"daemon's own limit ({settings.buffers.max_page_bytes // 1024} KiB",
            f"Maximum {settings.polls.wait:g} (operator's setting)",
            "the request waits up to 20 seconds",
            f"follows each {HEARTBEAT_SECONDS} seconds without an event",
            f"The request line is over {settings.http.max_line_bytes // 1024} KiB",
            f"A header over {settings.http.max_line_bytes // 1024} KiB",
            f"over {settings.http.max_headers} headers",
            f"over {settings.http.max_header_bytes // 1024} KiB in all",
            f"beyond {MAX_GOALS}, or beyond {MAX_GOAL_NAMES_BYTES // 1024} KiB",
        ):
            self.assertIn(words, said)


class RouteTests(WebTestCase):
    def test_description_has_exactly_the_served_routes_except_head_and_options(self) -> None:
        # HEAD works like GET and OPTIONS everywhere, and both are described in words.
        routes = {
            (method, re.sub(r"<\w+>", "{}", rule.rule))
            for rule in make_app(self.service.context).url_map.iter_rules()
            for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
        }
        paths = {(method, re.sub(r"{\w+}", "{}", path)) for method, path, _ in operations()}
        self.assertEqual(paths, routes)

    def test_every_status_of_a_refusal_is_described(self) -> None:
        told = {status for _, _, operation in operations() for status in operation["responses"]}
        for refusal, status in messages.ERROR_STATUSES.items():
            if refusal not in (errors.UnknownHTTPMethod, errors.ResourceMoved):  # of no operation
                self.assertIn(str(status.value), told)

    def test_answer_to_options_is_described(self) -> None:
        answer = self.exchange("OPTIONS /health")
        self.assertEqual(answer.status, 204)
        words = DOCUMENT["info"]["description"]
        told = [name for name in answer.headers if name.startswith("Access") and name in words]
        self.assertEqual(len(told), 3)
        more = {name.lower() for name in answer.headers} - described.COMMON_HEADERS
        self.assertEqual(more, {name.lower() for name in told})

    def test_pages_of_other_origins_may_send_every_described_header(self) -> None:
        allowed = self.request("OPTIONS", "/evaluate", 204).headers["access-control-allow-headers"]
        parameters = DOCUMENT["components"]["parameters"].values()
        described = {one["name"].lower() for one in parameters if one["in"] == "header"}
        described -= {"if-none-match"}  # browsers send it themselves
        self.assertEqual(
            set(allowed.lower().split(", ")), {"authorization", "content-type", *described}
        )

    def test_headers_of_problems_are_described(self) -> None:
        for refusal, headers in (
            (errors.ServerBusy("later", 5), {"Retry-After": 5}),
            (errors.ServerStopping(), {"Retry-After": 5}),
            (errors.CallerQuotaExceeded("later", 5), {"Retry-After": 5}),
            (errors.Unauthorized("who?"), {"WWW-Authenticate": "Bearer"}),
        ):
            problem_status, given, _ = messages.make_error_response(refusal)
            self.assertEqual({name.decode() for name in given}, set(headers))
            response = DOCUMENT["components"]["responses"][str(problem_status.value)]
            for name, value in headers.items():
                schema = resolve(response["headers"][name])["schema"]
                self.assertEqual(complaints(schema, value), [])


class ServedTests(CallerTestCase):
    def test_document_is_served_without_a_token_to_any_page(self) -> None:
        answer = self.request("GET", "/openapi.json")
        self.assertEqual(answer.body, STATIC_RESOURCES[OPENAPI_PATH].content)
        self.assertEqual(answer.headers["content-type"], "application/json")
