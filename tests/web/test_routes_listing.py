"""`GET /evaluations`: a caller's own evaluations, some at a time."""

from __future__ import annotations

from typing import Any
from unittest import mock

from tawebeval.config import CallerSettings, Configuration
from tests.cases.web import WebTestCase
from tests.fakes.clients import form, parts


class ListingTests(WebTestCase):
    def listed(self, query: str = "", status: int = 200, **headers: str) -> Any:
        return self.request("GET", f"/evaluations{query}", status, headers=headers).json()

    def test_evaluations_are_listed_in_order_of_acceptance_with_their_states(self) -> None:
        self.assertEqual(self.listed(), {"begin": None, "end": None, "data": []})
        identifiers = [self.evaluate() for _ in range(3)]
        self.page(identifiers[0])
        self.finish()
        listing = self.listed()
        self.assertEqual([one["evaluation_id"] for one in listing["data"]], identifiers)
        self.assertEqual(
            [one["state"] for one in listing["data"]], ["running", "finished", "running"]
        )
        self.assertEqual(
            set(listing["data"][0]),
            {
                *("evaluation_id", "state", "caller", "problem", "counts", "directory"),
                "evaluator_cmd",
                *("metadata", "submitted", "created", "ended", "error", "results"),
            },
        )
        status = self.request("GET", f"/evaluation/{identifiers[1]}").json()
        for name in ("created", "ended"):
            self.assertEqual(listing["data"][1][name], status[name])

    def test_list_page_is_bounded_in_bytes(self) -> None:
        with mock.patch("tawebeval.evaluations.reading.MAX_LIST_PAGE_BYTES", 650):
            identifiers = [self.evaluate() for _ in range(4)]
            found, end = [], ""
            while end is not None:
                listing = self.listed(f"?after={end}")
                found.append(len(listing["data"]))
                end = listing["end"]
        self.assertEqual((found, len(identifiers)), ([3, 1], 4))

    def label(self, **labels: str) -> str:
        fields = {f"metadata[{name}]": value.encode() for name, value in labels.items()}
        identifier: str = self.post(body=form(parts(**fields))).json()["evaluation_id"]
        return identifier

    def find(self, query: str) -> list[str]:
        return [one["evaluation_id"] for one in self.listed(f"?{query}")["data"]]

    def test_filter_lists_evaluations_with_all_of_its_labels(self) -> None:
        first = self.label(contest="finals", team="1")
        second = self.label(contest="finals", team="2 & 3")
        self.label()
        self.assertEqual(
            [one["metadata"] for one in self.listed()["data"]],
            [{"contest": "finals", "team": "1"}, {"contest": "finals", "team": "2 & 3"}, {}],
        )
        status = self.request("GET", f"/evaluation/{first}").json()
        self.assertEqual(status["metadata"], {"contest": "finals", "team": "1"})
        for query, found in (
            ("metadata[contest]=finals", [first, second]),
            ("metadata%5Bteam%5D=2%20%26+3", [second]),
            ("metadata[contest]=finals&metadata[team]=1", [first]),
            ("metadata[contest]=Finals", []),
            ("metadata[other]=finals", []),
        ):
            self.assertEqual(self.find(query), found, query)

    def test_filter_lists_evaluations_since_and_until(self) -> None:
        moments = []
        for _ in range(3):
            moments.append(self.evaluate())
            self.service.reactor.advance(10.5)
        first, second, third = moments
        middle = self.listed()["data"][1]["created"]
        self.assertEqual(middle, "2023-11-14T22:13:30.500+00:00")
        encoded = middle.replace("+", "%2B")
        for query, found in (
            (f"since={encoded}", [second, third]),
            (f"since={middle}", [second, third]),  # its plus sign means a space
            (f"until={encoded}", [first]),
            (f"since={encoded}&until={encoded}", []),
            ("since=2023-11-14T23:13:30%2B01:00&until=2023-11-14T22:13:31Z", [second]),
        ):
            self.assertEqual(self.find(query), found, query)

    def test_filtered_pages_lead_on_with_the_same_filter(self) -> None:
        with (
            mock.patch("tawebeval.evaluations.reading.MAX_PAGE_EVALUATIONS", 1),
            mock.patch("tawebeval.evaluations.reading.MAX_EVALUATIONS_EXAMINED_PER_PAGE", 2),
        ):
            first, *_, last = (
                self.label(a="x y"),
                self.label(),
                self.label(a="x"),
                self.label(a="x y"),
            )
            path, found = "/evaluations?metadata[a]=x+y", []
            while path:
                answer = self.request("GET", path)
                found.append([one["evaluation_id"] for one in answer.json()["data"]])
                end = answer.json()["end"]
                path = f"/evaluations?after={end}&metadata%5Ba%5D=x+y" if end else ""
                link = f'<{path}>; rel="next"' if path else None
                self.assertEqual(answer.headers.get("link"), link)
        self.assertEqual(found, [[first], [], [last]])

    def test_malformed_filter_is_refused_with_what_is_allowed(self) -> None:
        for query, words in (
            ("state=drained", "state: 'drained' is no state; allowed: queued, fetching, running,"),
            ("metadata[A]=x", "metadata[A]: bad label; write metadata[NAME], where NAME is"),
            ("state=", "state: '' is no state"),
            ("metadata[a]=", "metadata[a]: is empty; no label is"),
            ("until=", "until: '' is no time of RFC 3339"),
            ("since=yesterday", "since: 'YESTERDAY' is no time of RFC 3339, such as 2026-11-20"),
            ("since=2023-02-30T00:00:00Z", "since: '2023-02-30T00:00:00Z' is no time"),
            ("until=2023-11-14T22:13:31", "until: '2023-11-14T22:13:31' is no time of RFC 3339"),
            ("state=failed&state=failed", "state: the query parameter is repeated"),
        ):
            self.assertIn(words, self.listed(f"?{query}", 400)["detail"])
        self.listed("?other=1&other=2")

    def test_malformed_cursor_is_400_with_the_remedy(self) -> None:
        self.evaluate()
        self.evaluate()
        with mock.patch("tawebeval.evaluations.reading.MAX_PAGE_EVALUATIONS", 1):
            self.assertEqual(self.listed()["end"], "1")
        # The last ones were not given out.
        for cursor in ("x", "end", "-1", "1.5", "1-", "1-x", "0", "01", "3", "999999999"):
            message = self.listed(f"?after={cursor}", 400)["message"]
            self.assertIn(f"after: '{cursor}' is not a cursor of this list", message)
            self.assertIn("begin again without `after`", message)
            self.assertNotIn("page", message)
        answer = self.request("GET", f"/evaluations?after={'9' * 5000}", 400)
        self.assertIn("is not a cursor of this list", answer.json()["message"])
        self.assertEqual(self.listed("?after=2")["data"], [])

    def test_only_own_pages_read_the_list(self) -> None:
        self.evaluate()
        self.assertEqual(len(self.listed(Origin="http://localhost:8080")["data"]), 1)
        self.listed("", 403, Origin="https://elsewhere.example")
        self.listed("", 403, Origin="null")
        for host, status in (("127.0.0.1:8080", 200), ("elsewhere.example:8080", 403)):
            self.assertEqual(
                self.exchange_bytes(
                    f"GET /evaluations HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
                ).status,
                status,
            )


class OpenTests(WebTestCase):
    configuration = Configuration(callers=CallerSettings(open=True))

    def test_open_daemon_lists_nothing(self) -> None:
        self.evaluate()
        self.request("GET", "/evaluations", 401)
