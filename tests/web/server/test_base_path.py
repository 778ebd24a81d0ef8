"""`web.server.messages`: the API below a path of its host."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import RESERVED_URL_PATHS, Configuration, HttpSettings
from tawebeval.evaluations import reading
from tawebeval.web.server.messages import collapse_slashes, split_target
from tests.cases.web import LINK, PROXY, SETTINGS, RawTestCase
from tests.fakes.clients import MULTIPART, Answer, form, parts

BELOW = "/judge/a.b"
TARGETS = st.text("/ab?x.%", max_size=12).map(lambda rest: f"/{rest}".encode())


class BasePathTests(SynchronousTestCase):
    @given(TARGETS)
    def test_base_path_is_removed_from_the_target_only_as_its_prefix(self, target: bytes) -> None:
        path, _, query = target.partition(b"?")
        path = collapse_slashes(path)
        for before in (b"/judge/a.b", b"//judge///a.b", b"http://host/judge/a.b"):
            self.assertEqual(split_target(before + target, BELOW.encode()), (path, query))
        for other in (b"/judg", b"/judge/aXb", b"/judge/a.bc", b"/x/judge/a.b", b"judge/a.b"):
            kept = collapse_slashes(other + path)
            self.assertEqual(split_target(other + target, BELOW.encode()), (kept, query))
        self.assertEqual(split_target(target, b""), (path, query))


class RoutesBelowTests(RawTestCase):
    configuration = Configuration(http=HttpSettings(base_path=BELOW))

    def begin(self, path: str) -> Answer:
        return self.exchange(f"POST {path}", form(parts()), Content_Type=MULTIPART)

    def test_no_route_begins_like_a_base_path(self) -> None:
        rules = self.service.app.url_map.iter_rules()
        self.assertEqual({rule.rule.split("/")[1] for rule in rules} - {""}, RESERVED_URL_PATHS)

    def test_form_is_accepted_with_and_without_the_base_path(self) -> None:
        for path in (f"{BELOW}/evaluate", "/evaluate", "//judge//a.b//evaluate"):
            answer = self.begin(path)
            identifier = answer.json()["evaluation_id"]
            self.assertEqual(answer.headers["Location"], f"{BELOW}/evaluation/{identifier}")
        for path in ("/judge/evaluate", f"{BELOW}{BELOW}/evaluate"):
            self.assertEqual(self.begin(path).status, 404)

    def test_next_link_of_events_is_below_the_base_path(self) -> None:
        identifier = self.begin("/evaluate").json()["evaluation_id"]
        self.child.print(b"a\n")
        links = set()
        for path in (f"{BELOW}/evaluation/{identifier}/events", f"/evaluation/{identifier}/events"):
            for size in (1, 1000):
                connection = self.connect()
                request = f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
                for at in range(0, len(request), size):
                    connection.send(request[at : at + size])
                links.add(connection.answer().headers["Link"])
        (link,) = links
        found = re.fullmatch('<(.*)>; rel="next"', link)
        assert found is not None
        self.assertTrue(found[1].startswith(f"{BELOW}/evaluation/{identifier}/events?after="))
        self.assertEqual(self.exchange(f"GET {found[1]}").json()["begin"], found[1].split("=")[1])

    def test_next_link_of_the_list_is_below_the_base_path(self) -> None:
        self.patch(reading, "MAX_PAGE_EVALUATIONS", 1)
        for _ in range(2):
            self.begin("/evaluate")
        answer = self.exchange(f"GET {BELOW}/evaluations")
        end = answer.json()["end"]
        self.assertEqual(answer.headers["Link"], f'<{BELOW}/evaluations?after={end}>; rel="next"')

    def test_page_is_below_the_base_path(self) -> None:
        for target in (BELOW, f"{BELOW}?x=1", f"/{BELOW}"):
            answer = self.exchange(f"GET {target}")
            self.assertEqual(answer.status, 308)
            self.assertEqual(answer.json()["detail"], f"moved to {BELOW}/")
            self.assertEqual(answer.headers["Location"], f"{BELOW}/")
        page = self.exchange(f"GET {BELOW}/")
        self.assertEqual(page.headers["Content-Type"], "text/html; charset=utf-8")
        for link in LINK.findall(page.body.decode()):
            if not link.startswith("#"):
                self.assertEqual(self.exchange(f"GET {BELOW}/{link}").status, 200, link)

    def test_description_health_and_errors_are_below_the_base_path(self) -> None:
        for path in ("/health", "/openapi.json", "/health/ready"):
            self.assertEqual(self.exchange(f"GET {BELOW}{path}").status, 200)
        self.assertEqual(self.exchange(f"OPTIONS {BELOW}/evaluate").status, 204)
        self.check_raw(self.exchange(f"GET {BELOW}/nowhere"), 404)
        self.check_raw(self.exchange(f"PUT {BELOW}/evaluate"), 405)

    def test_route_is_counted_and_logged_without_the_base_path(self) -> None:
        self.exchange(f"GET {BELOW}/health")
        self.assertEqual(
            self.service.site.request_log.response_counts, {("GET", "/health", 200): 1}
        )


class EarlyRefusalsTests(RawTestCase):
    """What is refused before anything else is looked at, through a proxy and below a path."""

    configuration = Configuration(http=replace(SETTINGS, base_path=BELOW))

    def test_form_refused_for_x_forwarded_for_is_logged_without_the_base_path(self) -> None:
        request_log = self.service.site.request_log
        self.patch(request_log, "is_enabled", True)
        connection = self.service.connect(PROXY)
        with capturedLogs() as events:
            connection.request(
                f"POST {BELOW}/evaluate",
                form(parts()),
                Content_Type=MULTIPART,
                X_Forwarded_For="nobody knows",
            )
        self.check_raw(connection.answer(), 400)
        self.assertEqual(request_log.response_counts, {("POST", "/evaluate", 400): 1})
        paths = [event["path"] for event in events if "took" in event]
        self.assertEqual(paths, ["/evaluate"])
