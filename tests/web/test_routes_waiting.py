"""`web`: long polls, status, cancelling."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from tests.cases.web import END, WebTestCase


class WaitTests(WebTestCase):
    """Long polls."""

    def wait(self, query: str = "?wait=20", **headers: str) -> Deferred[Any]:
        """Ask for the first events of a new evaluation, and wait for them."""
        self.identifier = self.evaluate()
        path = f"/evaluation/{self.identifier}/events{query}"
        asked = self.ask("GET", path, headers=headers)
        self.assertNoResult(asked)
        return asked

    def test_event(self) -> None:
        """An event answers."""
        asked = self.wait()
        self.child.print(b"a\n")
        answer = self.answer(asked)
        self.check(answer)
        self.assertEqual(answer.json()["end"], "1")
        self.assertEqual(answer.headers["preference-applied"], "wait=20")

    def test_time(self) -> None:
        """When the time is over the answer is an empty page."""
        asked = self.wait()
        self.service.reactor.advance(19.9)
        self.agent.flush()
        self.assertNoResult(asked)
        self.service.reactor.advance(0.1)
        self.assertEqual(self.answer(asked).json(), {"begin": None, "end": "0", "data": []})

    def test_prefer(self) -> None:
        """`Prefer: wait` (RFC 7240) does the same, among other preferences."""
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

    def test_prefer_what_is_none(self) -> None:
        """What is no such preference is ignored, and not said to be applied (RFC 7240)."""
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

    def test_prefer_in_several_lines(self) -> None:
        """Several headers are one list, of which the first preference counts (RFC 7240)."""
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

    def test_query(self) -> None:
        """In the query it must be a whole number."""
        path = f"/evaluation/{self.evaluate()}/events"
        for query in ("?wait=x", "?wait=-1", "?wait=1.5", "?wait=", "?wait=1&wait=2", "?wait=%ff"):
            self.request("GET", path + query, 400)
        self.request("GET", path + "?wait=0")

    def test_query_wins(self) -> None:
        """The query is the more particular of the two."""
        asked = self.wait("?wait=5", Prefer="wait=20")
        self.service.reactor.advance(5)
        self.assertEqual(self.answer(asked).headers["preference-applied"], "wait=5")

    def test_at_most(self) -> None:
        """The server caps the time, however long, and says to what."""
        for seconds in ("31", "2147483647", "9" * 15):
            for query, headers in ((f"?wait={seconds}", {}), ("", {"Prefer": f"wait={seconds}"})):
                asked = self.wait(query, **headers)
                self.service.reactor.advance(30)
                applied = self.answer(asked).headers["preference-applied"]
                self.assertEqual(applied, "wait=30", (query, headers))
                self.finish()

    def test_too_many_digits(self) -> None:
        """More digits than any time has are refused, or passed over, and it is said how many."""
        path = f"/evaluation/{self.evaluate()}/events"
        for name in ("wait", "skip"):
            problem = self.request("GET", f"{path}?{name}={'9' * 16}", 400).json()
            self.assertIn("is not a whole number of up to 15 digits", problem["detail"])
        answer = self.request("GET", path, headers={"Prefer": f"wait={'9' * 16}"})
        self.assertNotIn("preference-applied", answer.headers)

    def test_client_gone(self) -> None:
        """A client that goes away leaves nothing, and the events stay for the next."""
        identifier = self.evaluate()
        calls = len(self.service.reactor.getDelayedCalls())
        connection = self.connect()
        connection.request(f"GET /evaluation/{identifier}/events?wait=20")
        evaluation = self.service.registry.records[identifier].evaluation
        self.assertEqual(len(evaluation.events.change_condition), 1)
        connection.lose()
        self.assertEqual(len(evaluation.events.change_condition), 0)
        self.assertEqual(len(self.service.reactor.getDelayedCalls()), calls)
        self.child.print(b"a\n")
        self.assertEqual(len(self.page(identifier)["data"]), 1)


class StatusTests(WebTestCase):
    """`GET` and `DELETE /evaluation/{id}`."""

    def test_status(self) -> None:
        """The status document."""
        identifier = self.evaluate()
        document = self.request("GET", f"/evaluation/{identifier}").json()
        self.assertEqual((document["evaluation_id"], document["state"]), (identifier, "running"))
        self.request("GET", "/evaluation/unknown", 404)
        self.finish()
        self.page(identifier, f"?after={END}")
        self.request("GET", f"/evaluation/{identifier}", 410)

    def test_cancel(self) -> None:
        """204, when the process is gone, and again whenever it is repeated."""
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

    def test_cancel_and_go(self) -> None:
        """A client that cancels and goes away has cancelled."""
        identifier = self.evaluate()
        connection = self.connect()
        connection.request(f"DELETE /evaluation/{identifier}")
        connection.lose()
        self.finish()
        status = self.request("GET", f"/evaluation/{identifier}").json()
        self.assertEqual(status["state"], "cancelled")
