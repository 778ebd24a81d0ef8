"""`web.events`: pages and polls, what the headers of a request ask for, evicted events."""

from __future__ import annotations

import errno
import os
import re

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.http_headers import Headers

from tawebeval.config import Configuration, EventBufferSettings, HttpSettings
from tawebeval.core import events as core_events
from tawebeval.errors import NotAcceptable
from tawebeval.evaluations.eventlog import EvaluationEvents
from tawebeval.web.events import PAGE_MEDIA_TYPE, STREAM_FRAMINGS, negotiate_media_type
from tests.cases import described
from tests.cases.polls import asking
from tests.cases.settings import with_constants
from tests.cases.web import END, RawTestCase, StreamTestCase
from tests.fakes.streams import FOLLOWERS, LineFollower, SocketFollower, SourceFollower, parse
from tests.fakes.world import SlowThreads

OF_CONTENT = ("date", "content-length", "transfer-encoding")
"""Headers that hang on the time, or that an answer may have only with its content."""


class ChoiceTests(StreamTestCase):
    def test_stream_has_the_accepted_type_and_is_not_cached(self) -> None:
        identifier = self.evaluate()
        for accept in ("text/event-stream", "application/jsonl", "application/x-ndjson"):
            answer = self.follow(LineFollower, identifier, Accept=accept).answer
            self.assertEqual(answer.status, 200)
            self.assertEqual(answer.headers["content-type"], accept)
            self.assertEqual(answer.headers["cache-control"], "no-store")
            self.assertEqual(answer.headers["x-accel-buffering"], "no")
            self.assertEqual(answer.headers["vary"], "Accept")
            self.assertEqual(answer.headers["access-control-allow-origin"], "*")
        page = self.request("GET", f"/evaluation/{identifier}/events")
        self.assertEqual(page.headers["vary"], "Accept")
        self.assertNotIn("x-accel-buffering", page.headers)

    def test_406_names_the_offered_types_and_acknowledges_nothing(self) -> None:
        identifier = self.evaluate(b"a\nb\n")
        path = f"/evaluation/{identifier}/events?after=2"
        answer = self.request("GET", path, 406, headers={"Accept": "text/html"})
        self.assertIn("application/jsonl", answer.json()["offered"])
        self.assertEqual(answer.headers["vary"], "Accept")
        self.page(identifier)

    def test_http_1_0_client_gets_pages_and_server_sent_events_but_no_json_lines(self) -> None:
        identifier = self.evaluate(b"a\n")
        self.finish()
        for accept, status, whole in (
            ("application/jsonl", 505, b"}"),
            ("application/x-ndjson", 505, b"}"),
            ("text/event-stream", 200, b"event: end\ndata: null\nid: end\n\n"),
            ("application/json", 200, b"]}"),
        ):
            for method in ("GET", "HEAD"):
                connection = self.connect()
                connection.send(
                    f"{method} /evaluation/{identifier}/events HTTP/1.0\r\n"
                    f"Accept: {accept}\r\n\r\n".encode()
                )
                self.turn()
                answer = connection.answer(method)
                self.assertEqual(answer.status, status, accept)
                if method == "GET":
                    self.assertTrue(answer.body.endswith(whole), answer.body)
                if method == "GET" and status == 505:
                    said = answer.json()["detail"]
                    self.assertIn("application/json, text/event-stream", said)
                    self.check_nothing_left(identifier)

    def test_malformed_parameter_is_400_for_every_media_type(self) -> None:
        path = f"/evaluation/{self.evaluate()}/events"
        for name, values in (
            ("wait", ("x", "-1", "1.5", "", "1&wait=2", "%ff")),
            ("skip", ("x", "-1", "1&skip=1")),
            ("times", ("2", "x", "", "1&times=1")),
            ("limit", ("0", "00", "x", "-1", "", "1.5", "1000000000000000", "1&limit=1")),
        ):
            for value in values:
                for accept in ("application/json", "text/event-stream", "application/jsonl"):
                    target = f"{path}?{name}={value}"
                    answer = self.request("GET", target, 400, headers={"Accept": accept})
                    self.assertIn(name, answer.json()["detail"])

    def test_head_has_the_status_and_headers_of_get(self) -> None:
        queries = ["", "?wait=20", "?after=3", "?after=x", "?after=9", "?skip=2", "?skip=5"]
        queries += ["?after=0&skip=9", f"?after={END}&skip=1", f"?after={END}"]
        for accept in ("application/json", *STREAM_FRAMINGS, "text/html"):
            path = f"/evaluation/{self.evaluate()}/events"
            self.print(b"a\nb\n")
            for state in ("running", "finished", "forgotten"):
                if state == "finished":
                    self.finish()
                for query in queries:
                    head, get = self.answers_to_both(f"{path}{query}", accept)
                    self.assertEqual(head, get, (state, accept, query))

    def answers_to_both(self, path: str, accept: str) -> list[tuple[int, dict[str, str]]]:
        answers = []
        for method in ("HEAD", "GET"):
            connection = self.connect()
            connection.request(f"{method} {path}", Accept=accept)
            self.turn()
            answer, _ = parse(connection.received)
            described.check(method, path, answer)
            headers = {k: v for k, v in answer.headers.items() if k not in OF_CONTENT}
            answers.append((answer.status, headers))
            connection.lose()
        return answers

    def test_head_acknowledges_nothing(self) -> None:
        identifier = self.evaluate(b"a\nb\n")
        self.finish()
        for accept in ("text/event-stream", "application/jsonl", "application/json"):
            for query in ("?after=2", f"?after={END}", "?after=1&wait=20"):
                nothing = accept == "text/event-stream" and query == f"?after={END}"
                answer = self.exchange(
                    f"HEAD /evaluation/{identifier}/events{query}", Accept=accept
                )
                self.assertEqual(answer.status, 204 if nothing else 200)
                described.check("HEAD", f"/evaluation/{identifier}/events", answer)
        self.assertEqual(len(self.page(identifier)["data"]), 4)


class PageTests(StreamTestCase):
    def test_limit_makes_a_page_smaller_but_never_empty_or_larger(self) -> None:
        identifier = self.evaluate(b"a\n" * 100 + b"b" * 1000 + b"\n")
        self.finish()
        path, found = f"/evaluation/{identifier}/events?limit=100", 0
        text, end = '{"type":"text","payload":"a"}', '{"type":"text","payload":"\\n"}'
        self.assertLess(len(text) + len(end) + 2, 100)
        while path:
            answer = self.request("GET", path)
            data = answer.json()["data"]
            found += len(data)
            self.assertLessEqual(len(data), 3)
            path = answer.headers.get("link", "").partition("<")[2].partition(">")[0]
            self.assertTrue(not path or path.endswith("&limit=100"), path)
        self.assertEqual(found, 202)
        identifier = self.evaluate(b"a\n" * 1000)
        usual = self.page(identifier)
        self.assertLess(len(usual["data"]), 1000)
        self.assertEqual(self.page(identifier, "?limit=999999999999999"), usual)
        self.assertEqual(len(self.page(identifier, "?limit=1")["data"]), 1)
        older = f"/evaluation_events?evaluation={identifier}&limit=1"
        self.assertEqual(len(self.request("GET", older).json()["data"]), 1)
        head = self.request("HEAD", f"/evaluation/{identifier}/events?limit=1")
        self.assertTrue(head.headers["link"].endswith('?after=1&limit=1>; rel="next"'))

    def test_times_are_added_only_where_asked_for(self) -> None:
        identifier = self.evaluate(b"a\n")
        self.service.world.clock.advance(1.5)
        self.print(b"b\n")
        self.finish()
        path = f"/evaluation/{identifier}/events?times=1"
        answer = self.request("GET", path)
        self.assertEqual(answer.headers["link"], f'<{path[:-7]}after=end&times=1>; rel="next"')
        plain = self.page(identifier)["data"]
        timed = answer.json()["data"]
        status = self.request("GET", f"/evaluation/{identifier}").json()
        self.assertEqual(
            [event.pop("time") for event in timed],
            [status["created"], *[status["ended"]] * (len(plain) - 1)],
        )
        self.assertEqual(timed, plain)
        expected = answer.json()["data"]
        for kind in FOLLOWERS:
            for query, events in (("?times=1", expected), ("?times=0", plain), ("", plain)):
                follower = self.follow(kind, identifier, query)
                self.turn()
                self.assertEqual(follower.events, events, kind)
        self.page(identifier, "?after=end&times=1")

    def test_waiting_page_obeys_limit_and_times_and_the_link_of_head_keeps_times(self) -> None:
        identifier = self.evaluate()
        waiting = self.ask("GET", f"/evaluation/{identifier}/events?wait=5&limit=1&times=1")
        self.print(b"a\n" * 100)
        (event,) = self.answer(waiting).json()["data"]
        self.assertIn("time", event)
        head = self.request("HEAD", f"/evaluation/{identifier}/events?times=1")
        self.assertIn('&times=1>; rel="next"', head.headers["link"])

    def test_only_an_empty_page_without_wait_has_retry_after(self) -> None:
        identifier = self.evaluate()
        path = f"/evaluation/{identifier}/events"
        answer = self.request("GET", path)
        self.assertEqual(answer.headers["retry-after"], "1")
        waiting = self.ask("GET", path + "?wait=5")
        self.service.reactor.advance(5)
        self.assertNotIn("retry-after", self.answer(waiting).headers)
        self.print(b"a\n")
        self.assertNotIn("retry-after", self.request("GET", path).headers)
        self.finish()
        for after in ("2", END):
            self.assertNotIn("retry-after", self.request("GET", f"{path}?after={after}").headers)


class ServerSentTests(StreamTestCase):
    def test_stream_begins_at_once_with_retry(self) -> None:
        follower = self.follow(SourceFollower, self.evaluate())
        self.assertEqual(follower.answer.body, b"retry: 2000\n\n")
        self.assertEqual(follower.source.retry, 2000)

    def test_last_event_id_wins_over_after(self) -> None:
        identifier = self.evaluate(b"a\nb\n")
        for query in ("", "?after=0", "?after=1", "?after=1&skip=1", "?after=x"):
            follower = self.follow(SourceFollower, identifier, query, Last_Event_ID="2")
            self.assertEqual(follower.payloads, ["b"])
        for query, payloads in (("", ["a", "\n", "b"]), ("?after=1", ["\n", "b"])):
            follower = self.follow(SourceFollower, identifier, query, Last_Event_ID="")
            self.assertEqual(follower.payloads, payloads)
            follower = self.follow(LineFollower, identifier, query, Last_Event_ID="2")
            self.assertEqual(follower.payloads, payloads)

    def test_repeated_last_event_id_is_400(self) -> None:
        identifier = self.evaluate()
        self.assertEqual(
            self.exchange_bytes(
                f"GET /evaluation/{identifier}/events HTTP/1.1\r\nHost: localhost\r\n"
                "Accept: text/event-stream\r\nLast-Event-ID: 0\r\nLast-Event-ID: 0\r\n\r\n".encode()
            ).status,
            400,
        )

    def test_reconnecting_client_gets_the_end_again_and_204_after_it(self) -> None:
        identifier = self.evaluate(b"a\n")
        first = self.follow(SourceFollower, identifier)
        self.finish()
        self.assertTrue(first.complete)
        again = self.follow(SourceFollower, identifier, Last_Event_ID="2")
        self.assertEqual((again.events, again.complete), ([], True))
        for _ in range(3):
            follower = self.follow(SourceFollower, identifier, Last_Event_ID=END)
            self.assertEqual((follower.answer.status, follower.answer.body), (204, b""))
        follower = self.follow(SourceFollower, identifier, Last_Event_ID="2")
        self.assertEqual(follower.answer.status, 410)

    def test_comment_is_sent_after_15_seconds_without_event(self) -> None:
        follower = self.follow(SourceFollower, self.evaluate())
        begin = follower.answer.body
        self.service.reactor.advance(14)
        self.assertEqual(follower.answer.body, begin)
        for count in range(1, 4):
            self.service.reactor.advance(1)
            self.turn()
            self.assertEqual(follower.answer.body, begin + b":\n\n" * count)
            self.service.reactor.advance(14)
        self.print(b"a\n")
        self.service.reactor.advance(14)
        self.turn()
        self.assertEqual(follower.answer.body.count(b":\n\n"), 3)
        self.service.reactor.advance(1)
        self.turn()
        self.assertEqual(follower.answer.body.count(b":\n\n"), 4)
        self.assertEqual(follower.payloads, ["a"])

    def test_json_lines_have_no_heartbeat(self) -> None:
        follower = self.follow(LineFollower, self.evaluate())
        for _ in range(9):
            self.service.reactor.advance(15)
            self.turn()
        self.assertEqual(follower.answer.body, b"")

    def test_data_line_with_a_carriage_return_arrives_whole(self) -> None:
        identifier = self.evaluate()
        followers = [
            self.follow(kind, identifier) for kind in (SourceFollower, LineFollower, SocketFollower)
        ]
        self.print(self.child.make_data_block("[1,\r2]\r")[1:])
        for follower in followers:
            self.assertEqual(follower.payloads, [[1, 2]])


OFFERED = [PAGE_MEDIA_TYPE, *STREAM_FRAMINGS]
JSON, EVENTS, LINES, ND = OFFERED


def accept(*values: str) -> Headers:
    """Return headers in which these are accepted."""
    return Headers({b"Accept": [value.encode("latin-1") for value in values]} if values else {})


class NegotiationTests(SynchronousTestCase):
    def test_preferred_type_is_chosen(self) -> None:
        html = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
        for why, expected, values in (
            ("no header", JSON, ()),
            *(
                ("no preference", JSON, (value,))
                for value in ("", "*/*", "application/*", html, f"{JSON}, text/plain, */*", "*")
            ),
            ("Java", JSON, ("text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2",)),
            ("higher quality", EVENTS, (f"{JSON};q=0.5, {EVENTS};q=0.6",)),
            ("higher quality first", EVENTS, (f"{EVENTS};q=0.6, {JSON};q=0.5",)),
            ("quality of 1 by itself", JSON, (f"{EVENTS};q=0.999, {JSON}",)),
            ("more than any", LINES, (f"*/*;q=0.1, {LINES};q=0.2",)),
            ("most specific range", JSON, (f"{EVENTS};q=0.1, */*;q=0.5",)),
            ("more specific range", EVENTS, ("application/*;q=0.1, */*;q=0.5",)),
            ("all but one", EVENTS, (f"{JSON};q=0, */*",)),
            ("all but two", LINES, (f"{JSON};q=0, {EVENTS};q=0, */*",)),
            ("name before any", EVENTS, (f"*/*, {EVENTS}",)),
            ("name before range", EVENTS, (f"application/*, {EVENTS}",)),
            ("earlier offer", JSON, (f"{EVENTS}, {JSON}",)),
            ("earlier of streams", LINES, (f"{ND}, {LINES}",)),
            ("bad qualities", EVENTS, (f"{EVENTS};q=0.1, {JSON};q=2, {LINES};q=x, {ND};q=-1",)),
            ("bad ranges", EVENTS, (f"nonsense, */json, ;;;, {EVENTS}, \xff",)),
            *(
                ("name in any case with any parameters", offered, values)
                for offered in OFFERED
                for values in (
                    (offered.upper(),),
                    ("text/html", offered),
                    (f"text/html, {offered};charset=utf-8;q=0.1",),
                )
            ),
        ):
            self.assertEqual(negotiate_media_type(accept(*values), OFFERED), expected, why)

    def test_refusal_names_the_offers(self) -> None:
        for value in ("text/html", "text/*;q=0", "*/*;q=0", f"{JSON};q=0", "image/*, audio/ogg"):
            error = self.assertRaises(NotAcceptable, negotiate_media_type, accept(value), OFFERED)
            self.assertEqual(error.extra_members["offered"], ", ".join(OFFERED))
            for offered in OFFERED:
                self.assertIn(offered, str(error))

    @given(st.lists(st.text(st.characters(max_codepoint=255), max_size=40), max_size=3))
    def test_any_accept_header_gets_an_offered_type_or_a_refusal(self, values: list[str]) -> None:
        values = [value.replace("\r", "").replace("\n", "") for value in values]
        try:
            found = negotiate_media_type(accept(*values), OFFERED)
        except NotAcceptable:
            return
        assert found in OFFERED


LINE_COUNT = 20


class EvictedEventsTests(StreamTestCase):
    """An evaluation of which only the newest events are in memory, and threads that wait."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(core_events, "MIN_SEGMENT_BYTES", 500)
        self.patch(core_events, "MAX_SEGMENT_BYTES", 500)
        self.service.world.memory.budget.total = 0
        self.threads = SlowThreads()
        self.begin()

    def begin(self) -> None:
        self.identifier = self.evaluate()
        for number in range(LINE_COUNT):
            self.print(b"line %d\n" % number)
        self.events = self.service.registry.records[self.identifier].events
        self.events._threads = self.threads  # type: ignore[assignment]

    def settle(self) -> None:
        """Let the threads do all their work, and streams go on."""
        for _ in range(99):
            self.threads.finish()
            self.turn()

    def test_disconnect_from_a_stream_of_evicted_events_leaves_nothing(self) -> None:
        follower = self.follow(LineFollower, self.identifier)
        follower.lose()
        self.settle()
        self.check_nothing_left(self.identifier)

    def test_lack_of_descriptors_is_503_and_cuts_streams(self) -> None:
        def fail(begin: int, end: int) -> bytes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        assert self.events.stdout is not None
        self.patch(type(self.events.stdout._files), "read_stdout", lambda *_: fail(0, 0))
        asked = self.ask("GET", f"/evaluation/{self.identifier}/events")
        self.assertNoResult(asked)
        self.threads.finish()
        answer = self.answer(asked)
        self.assertEqual((answer.status, answer.headers["retry-after"]), (503, "5"))
        for kind in FOLLOWERS:
            follower = self.follow(kind, self.identifier)
            self.settle()
            self.check_cut(follower, 1013)
            follower.lose()


class PollTests(RawTestCase):
    configuration = Configuration(
        buffers=with_constants(EventBufferSettings, max_page_bytes=1024)(),
        http=with_constants(
            HttpSettings, idle_timeout=40, rate_window_seconds=20, min_bytes_per_second=1024
        )(),
    )

    def setUp(self) -> None:
        super().setUp()
        self.identifier = self.evaluate()

    def poll(self, query: str = "", *headers: str) -> bytes:
        return asking(query, *headers).replace(b"ID", self.identifier.encode())

    def test_requests_behind_a_waiting_poll_wait_in_the_socket(self) -> None:
        connection = self.connect()
        connection.send(self.poll("?wait=20"))
        for _ in range(200):
            if connection.transport.producerState == "producing":
                connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        self.assertEqual(connection.received, b"")
        self.assertEqual(connection.transport.producerState, "paused")
        self.assertLess(sum(map(len, connection.channel._dataBuffer)), 20_000)
        self.child.print(b"a\n")
        connection.settle()
        found = re.findall(rb'{"(begin|status)"', connection.received)
        self.assertEqual(found[:2], [b"begin", b"status"])
        self.assertEqual(found.count(b"begin"), 1)
        self.assertGreater(len(found), 100)
        self.assertEqual(connection.transport.producerState, "producing")

    def test_client_that_stops_reading_is_cut_off_after_20_seconds(self) -> None:
        connection = self.connect()
        for _ in range(200):
            connection.send(self.poll())
        connection.channel.pauseProducing()
        for seconds, aborted in ((19, False), (2, True)):
            self.service.reactor.pump([1] * seconds)
            self.assertEqual(connection.aborted, aborted)

    def test_exception_during_a_poll_is_logged_and_answered_with_500(self) -> None:
        for query in ("", "?wait=20"):
            connection = self.connect()
            if query:
                connection.send(self.poll(query))
            defect = self.patch(EvaluationEvents, "read_now", lambda *_, **__: 1 // 0)
            if query:
                self.child.print(b"a\n")
            else:
                connection.send(self.poll(query))
            answer = connection.answer()
            self.assertEqual(answer.status, 500)
            self.assertEqual(answer.headers["Content-Type"], "application/problem+json")
            self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
            connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            self.assertEqual(connection.answer().status, 200)
            defect.restore()
