"""`web.server.messages`: all that goes wrong is answered by problem details."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus

from klein import Klein
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import errors
from tawebeval.web.routes import make_app
from tawebeval.web.server import messages
from tests.cases.web import WebTestCase


class TableTests(SynchronousTestCase):
    def test_every_refusal_has_a_status(self) -> None:
        refusals = set(_below(errors.RequestError))
        self.assertEqual(set(messages.ERROR_STATUSES), refusals)
        self.assertTrue(refusals)

    def test_document_is_that_of_rfc_9457_with_message_and_extra_members(self) -> None:
        self.assertEqual(
            messages.make_problem_details(HTTPStatus.GONE, "no more", oldest="3"),
            b'{"type":"about:blank","title":"Gone","status":410,"detail":"no more",'
            b'"message":"no more","oldest":"3"}',
        )


def _below(base: type) -> Iterator[type]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from _below(subclass)


class RouteTests(WebTestCase):
    def test_no_two_routes_share_a_function_name(self) -> None:
        functions: dict[str, object] = {}
        route = Klein.route

        def watch(app: Klein, *args: object, **kwargs: object) -> object:
            self.assertIn("methods", kwargs, "a route without methods takes them all")

            def decorate(function: object) -> object:
                name = function.__name__  # type: ignore[attr-defined]
                self.assertIs(functions.setdefault(name, function), function)
                return route(app, *args, **kwargs)(function)  # type: ignore[arg-type]

            return decorate

        self.patch(Klein, "route", watch)
        make_app(self.service.context)
        self.assertGreaterEqual(len(functions), 5)

    def test_405_names_what_is_allowed(self) -> None:
        for method, path, allowed in (
            ("GET", "/evaluate", "POST"),
            ("PUT", "/evaluate", "POST"),
            ("POST", "/health", "GET"),
            ("DELETE", "/evaluation/x/events", "GET"),
            ("POST", "/evaluation/x", "DELETE"),
            ("PATCH", "/evaluation/x", "GET"),
        ):
            answer = self.request(method, path, 405)
            self.assertIn(allowed, answer.headers["allow"])
            methods = ", ".join(sorted(answer.headers["allow"].split(", ")))
            said = f"method '{method}' is not allowed here; allowed: {methods}"
            self.assertEqual(answer.json()["detail"], said)

    def test_options_is_answered_everywhere(self) -> None:
        for path in ("/evaluate", "/evaluation/x/events", "/nowhere"):
            answer = self.request("OPTIONS", path, 204)
            self.assertEqual(answer.body, b"")
            methods = answer.headers["access-control-allow-methods"]
            self.assertEqual(set(methods.split(", ")), {"GET", "POST", "DELETE", "OPTIONS"})
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            for name in ("Link", "Retry-After", "Preference-Applied", "Location"):
                self.assertIn(name, exposed)

    def test_defect_is_logged_and_500_without_details(self) -> None:
        self.patch(self.service.registry, "get_status", lambda *_: 1 // 0)
        answer = self.request("GET", "/evaluation/x", 500)
        self.assertNotIn(b"ZeroDivision", answer.body)
        self.assertNotIn(b"division", answer.body)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_defect_outside_of_routes_is_500(self) -> None:
        self.patch(self.service.site.resource, "render", lambda request: 1 // 0)
        self.request("GET", "/health", 500)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
