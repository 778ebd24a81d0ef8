"""`web`: long polls, status, cancelling."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from tests.cases.web import END, WebTestCase


class WaitTests(WebTestCase):
    def wait(self, query: str = "?wait=20", **headers: str) -> Deferred[Any]:
        self.identifier = self.evaluate()
        path = f"/evaluation/{self.identifier}/events{query}"
        asked = self.ask("GET", path, headers=headers)
        self.assertNoResult(asked)
        return asked

    def test_event_answers_a_waiting_poll(self) -> None:
        asked = self.wait()
        self.child.print(b"a\n")
        answer = self.answer(asked)
        self.check(answer)
        self.assertEqual(answer.json()["end"], "1")
        self.assertEqual(answer.headers["preference-applied"], "wait=20")

    def test_poll_without_event_is_answered_with_an_empty_page_in_time(self) -> None:
        asked = self.wait()
        self.service.reactor.advance(19.9)
        self.agent.flush()
        self.assertNoResult(asked)
        self.service.reactor.advance(0.1)
        self.assertEqual(self.answer(asked).json(), {"begin": None, "end": "0", "data": []})

    def test_prefer_wait_waits_among_other_preferences(self) -> None:
        for header in (
            *("wait=20", 'respond-async, wait=20, x="y"', 'wait="20"', "  wait=20  "),
            *(
                "Wait=20",
                "wait=20; foo=bar",
                "wait=20;",
                "wait = 20 ;a=b;c",
                "handling=x;wait=1,wait=20",
            ),
            *("wait=20, wait=10", 'x="a, wait=10", wait=20', r'x="\", wait=10", wait=20'),
        ):
            asked = self.wait("", Prefer=header)
            self.child.print(b"a\n")
            self.assertEqual(self.answer(asked).headers["preference-applied"], "wait=20", header)
            self.finish()

    def test_malformed_prefer_is_ignored_and_not_applied(self) -> None:
        identifier = self.evaluate()
        path = f"/evaluation/{identifier}/events"
        for header in (
            *("wait", "wait=x", "wait=-1", "wait=0", "respond-async", "", '"', "=,=;"),
            *(
                "wait, wait=20",
                "wait=x, wait=20",
                'wait="20',
                'wait="20;"',
                '"wait=20"',
                ";wait=20",
            ),
            *('x=", wait=20', "awaits=20"),
        ):
            answer = self.request("GET", path, headers={"Prefer": header})
            self.assertNotIn("preference-applied", answer.headers, header)

    def test_first_preference_of_several_headers_counts(self) -> None:
        self.identifier = self.evaluate()
        for lines, waits in (
            (b"Prefer: wait=20\r\nPrefer: wait=0\r\n", True),
            (b"Prefer: wait=0\r\nPrefer: wait=20\r\n", False),
        ):
            connection = self.connect()
            path = f"/evaluation/{self.identifier}/events"
            connection.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n".encode() + lines + b"\r\n")
            self.assertEqual(connection.received == b"", waits, lines)
            connection.lose()

    def test_query_wins_over_prefer(self) -> None:
        asked = self.wait("?wait=5", Prefer="wait=20")
        self.service.reactor.advance(5)
        self.assertEqual(self.answer(asked).headers["preference-applied"], "wait=5")

    def test_wait_is_capped_and_the_answer_says_to_what(self) -> None:
        for seconds in ("31", "2147483647", "9" * 15):
            for query, headers in ((f"?wait={seconds}", {}), ("", {"Prefer": f"wait={seconds}"})):
                asked = self.wait(query, **headers)
                self.service.reactor.advance(30)
                applied = self.answer(asked).headers["preference-applied"]
                self.assertEqual(applied, "wait=30", (query, headers))
                self.finish()

    def test_number_of_more_than_15_digits_is_refused_or_ignored_in_prefer(self) -> None:
        path = f"/evaluation/{self.evaluate()}/events"
        for name in ("wait", "skip"):
            problem = self.request("GET", f"{path}?{name}={'9' * 16}", 400).json()
            self.assertIn("is not a whole number of up to 15 digits", problem["detail"])
        answer = self.request("GET", path, headers={"Prefer": f"wait={'9' * 16}"})
        self.assertNotIn("preference-applied", answer.headers)

    def test_client_that_leaves_a_poll_leaves_nothing(self) -> None:
        identifier = self.evaluate()
        calls = len(self.service.reactor.getDelayedCalls())
        connection = self.connect()
        connection.request(f"GET /evaluation/{identifier}/events?wait=20")
        evaluation = self.service.registry.records[identifier]
        self.assertEqual(len(evaluation.events.change_condition), 1)
        connection.lose()
        self.assertEqual(len(evaluation.events.change_condition), 0)
        self.assertEqual(len(self.service.reactor.getDelayedCalls()), calls)
        self.child.print(b"a\n")
        self.assertEqual(len(self.page(identifier)["data"]), 1)


class StatusTests(WebTestCase):
    def test_status_is_410_once_forgotten_and_404_if_unknown(self) -> None:
        identifier = self.evaluate()
        document = self.request("GET", f"/evaluation/{identifier}").json()
        self.assertEqual((document["evaluation_id"], document["state"]), (identifier, "running"))
        self.request("GET", "/evaluation/unknown", 404)
        self.finish()
        self.page(identifier, f"?after={END}")
        self.request("GET", f"/evaluation/{identifier}", 410)

    def test_cancelling_is_204_when_the_process_is_gone_and_when_repeated(self) -> None:
        identifier = self.evaluate()
        asked = self.ask("DELETE", f"/evaluation/{identifier}")
        self.assertNoResult(asked)
        self.assertEqual(self.child.signals, [15])
        self.finish()
        answer = self.answer(asked)
        self.assertEqual((answer.status, answer.body), (204, b""))
        self.check(answer)
        self.request("DELETE", f"/evaluation/{identifier}", 204)
        (event,) = self.page(identifier)["data"]
        self.assertEqual(event["payload"]["reason"], "cancelled")
        self.page(identifier, f"?after={END}")
        self.request("DELETE", f"/evaluation/{identifier}", 204)
        self.request("DELETE", "/evaluation/unknown", 404)

    def test_client_that_leaves_has_cancelled(self) -> None:
        identifier = self.evaluate()
        connection = self.connect()
        connection.request(f"DELETE /evaluation/{identifier}")
        connection.lose()
        self.finish()
        status = self.request("GET", f"/evaluation/{identifier}").json()
        self.assertEqual(status["state"], "cancelled")
