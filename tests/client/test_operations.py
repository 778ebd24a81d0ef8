"""`client.operations`: every operation, against the daemon's site in memory."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from collections.abc import AsyncGenerator, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import coroutine
from typing import Any

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, LongPollSettings, ProblemSettings
from tawebeval_client import (
    AsyncClient,
    Client,
    ClientError,
    Data,
    EvaluationGone,
    Event,
    InvalidRequest,
    Outcome,
    Refused,
    Text,
    Unavailable,
    UnknownEvaluation,
    operations,
)
from tawebeval_client.backoff import Backoff
from tawebeval_client.http import HttpRequest, Repetition, RequestFailure, Response
from tawebeval_client.operations import BaseClient, normalize_server_url
from tests import EXAMPLES
from tests.cases.client import ClientTestCase, Fate, Line, gathered, text
from tests.fakes.world import EPOCH


class EvaluateTests(ClientTestCase):
    """`Client.evaluate`."""

    def test_request_repeated_after_lost_responses_begins_one_evaluation(self) -> None:
        self.line.fail_once(Fate.BUSY, Fate.LOST, Fate.REFUSED, Fate.CUT, Fate.GATEWAY)
        identifier = self.line.begin(submission={"source": Path(__file__)})
        self.assertEqual(len(self.line.service.world.spawn.children), 1)
        self.assertEqual(len(self.line.agent.asked), 6)
        listed = self.line.wait(gathered(self.line.client.evaluations()))
        self.assertEqual([one["evaluation_id"] for one in listed], [identifier])

    def test_same_idempotency_key_returns_the_same_evaluation_and_refuses_other_fields(
        self,
    ) -> None:
        first = self.line.begin(key="mine")
        self.assertEqual(self.line.begin(key="mine"), first)
        self.assertNotEqual(self.line.begin(), first)
        error = self.assertRaises(InvalidRequest, self.line.begin, key="mine", seed=5)
        self.assertEqual(error.status, 422)

    def test_invalid_field_is_named_and_the_form_is_not_repeated(self) -> None:
        error = self.assertRaises(InvalidRequest, self.line.begin, commit="main")
        self.assertEqual(error.field, "commit_oid")
        self.assertIn("40 hexadecimal digits", str(error))
        self.assertEqual(len(self.line.agent.asked), 1)


class EventsTests(ClientTestCase):
    """`Client.events` and `Client.pages`."""

    def test_long_poll_waits_for_the_time_that_the_server_grants(self) -> None:
        for wait, seconds, requests in ((20, 60.25, 4), (0, 10, 11)):
            self.line = self.make(settings={"polls": LongPollSettings(wait=wait)})
            identifier = self.line.begin()
            before = len(self.line.agent.asked)
            following = Deferred.fromCoroutine(gathered(self.line.client.events(identifier)))
            self.line.settle()
            self.line.pass_time(seconds)
            self.assertNoResult(following)
            self.assertEqual(len(self.line.agent.asked) - before, requests)
            self.line.child.print(b"a\n")
            self.line.child.end()
            self.line.pass_time(2)
            self.assertEqual(self.successResultOf(following), [Text("a"), Text("\n")])

    def test_cursor_may_skip_more_events_than_a_page_has(self) -> None:
        identifier = self.printed(b"a\nb\nc\n")
        self.assertEqual(text(self.line.follow(identifier, "+4")), "c\n")
        identifier = self.printed(b"x\n" * 100)
        self.assertEqual(text(self.line.follow(identifier, "+197")), "\nx\n")

    def test_invalid_cursors_are_refused_by_client_or_server(self) -> None:
        identifier = self.printed(b"a\n")
        for cursor in ("1+", "1+x", "+-1", "+\N{SUPERSCRIPT TWO}"):
            self.assertRaises(ValueError, self.line.follow, identifier, cursor)
        self.assertRaises(InvalidRequest, self.line.follow, identifier, "7777")

    def test_pages_are_contiguous_and_the_next_request_acknowledges_the_last_page(self) -> None:
        identifier = self.printed(b"0123456789\n" * 60)

        async def look() -> list[tuple[str | None, str | None]]:
            found = []
            async for page in self.line.client.pages(identifier):
                self.assertTrue(page.events)
                again = await anext(self.line.client.pages(identifier, page.begin))
                self.assertEqual(again.events, page.events)
                found.append((page.begin, page.end))
            return found

        bounds = self.line.wait(look())
        self.assertGreater(len(bounds), 2)
        self.assertEqual(bounds[0][0], None)
        self.assertEqual([end for _, end in bounds[:-1]], [begin for begin, _ in bounds[1:]])
        self.assertEqual(bounds[-1][1], "end")

    def test_pages_have_at_most_limit_events_and_lose_none(self) -> None:
        identifier = self.printed(b"0123456789\n" * 60)
        pages = self.line.wait(gathered(self.line.client.pages(identifier, limit=1)))
        self.assertEqual({len(page.events) for page in pages}, {1})
        self.assertEqual(text([page.events[0] for page in pages]), "0123456789\n" * 60)

    def test_events_have_times_on_request_also_after_a_cursor_within_a_page(self) -> None:
        identifier = self.line.begin()
        began = self.line.service.reactor.seconds()
        for output in (b"a\n", b"b\n"):
            self.line.child.print(output)
            self.line.pass_time(1)
        self.line.child.end()
        self.line.settle()

        async def look() -> list[Any]:
            client = self.line.client
            plain = await anext(client.pages(identifier))
            rest = await anext(client.pages(identifier, "+2", times=True))
            events = await gathered(client.events(identifier, times=True))
            return [plain.events, rest.events, events]

        plain, rest, events = self.line.wait(look())
        self.assertEqual({event.time for event in plain}, {None})
        self.assertEqual(list(plain), events)
        seconds = [event.time.timestamp() - EPOCH - began for event in events]
        # A terminator waits for what follows: it may belong to a block.
        self.assertEqual([int(each) for each in seconds], [0, 1, 1, 2])
        self.assertEqual([event.time for event in rest], [event.time for event in events[2:]])


class OtherTests(ClientTestCase):
    """Status, cancelling, lists, tokens, URLs."""

    def test_cancel_request_has_a_timeout_of_600_seconds(self) -> None:
        (request,), _ = play(
            operations.cancel(SteppingClient("http://a"), "x"), Response(204, {}, b"")
        )
        self.assertEqual(request.timeout, 600)

    def test_client_lists_problems_submits_to_a_problem_and_filters_by_problem(self) -> None:
        problem = ProblemSettings("https://example.org/p.git", "./run", commit="c" * 40)
        problems = {f"p{number:03}": problem for number in range(150)}
        self.line.service.registry.context.configuration = Configuration(problems=problems)
        client, line = self.line.client, self.line
        listed = line.wait(gathered(client.problems()))
        self.assertEqual([one["name"] for one in listed], list(problems))
        line.begin()
        identifier = line.wait(
            client.evaluate_problem("p001", {"source": "x"}, metadata={"a": "b"}, key="k")
        )
        status = line.wait(client.status(identifier))
        self.assertEqual((status["problem"], status["metadata"]), ("p001", {"a": "b"}))
        (found,) = line.wait(gathered(client.evaluations(problem="p001")))
        self.assertEqual(found["evaluation_id"], identifier)
        with self.assertRaises(InvalidRequest) as caught:
            line.wait(client.evaluate_problem("../evaluate", {"source": "x"}))
        self.assertEqual(caught.exception.status, 404)

    def test_server_url_with_query_or_user_is_refused_without_showing_the_user(self) -> None:
        self.assertEqual(normalize_server_url("http://localhost:8080/"), "http://localhost:8080")
        self.assertEqual(normalize_server_url("https://[::1]/judge//"), "https://[::1]/judge")
        for wrong in (
            *("", "localhost:8080", "ftp://a", "http://", "http://a:b", "http://a:0"),
            *("http://a?x", "http://a#x", "http://[::1"),
        ):
            named = f"{wrong!r} is not the URL of a server, such as "
            self.assertTrue(self.refused(wrong).startswith(named))
        for wrong, shown in (
            ("http://me:secret@a", "http://***@a"),
            ("http://me:se/cr@et@a", "http://***@a"),
            ("me:se\ncret@a", "***@a"),
        ):
            self.assertTrue(self.refused(wrong).startswith(f"{shown!r} is not the URL"), wrong)
        self.assertIn("such as http://localhost:8080", self.refused("localhost:8080"))
        self.assertIn("such as https://judge.example.org", self.refused("ftp://a"))

    def test_token_is_one_word_of_ascii(self) -> None:
        for wrong in ("sec ret", "secret\n", "sécret"):
            error = self.assertRaises(ValueError, SteppingClient, "http://a", token=wrong)
            self.assertNotIn(wrong, str(error))

    def refused(self, server: str) -> str:
        """Return why a URL is refused."""
        return str(self.assertRaises(ValueError, normalize_server_url, server))


WRITING = st.lists(
    st.one_of(
        st.text(min_size=1, max_size=40),
        st.sampled_from(["\n", "a line\n", "x" * 900 + "\n", "a\r\n"]),
        st.just(Data("[1.50]")),
    ),
    max_size=40,
)


def joined(items: Iterable[str | Event]) -> list[str | Event]:
    """Return events, with text that came in parts put together."""
    found: list[str | Event] = []
    for item in items:
        some = item.text if isinstance(item, Text) else item
        if isinstance(some, str) and found and isinstance(found[-1], str):
            found[-1] += some
        else:
            found.append(some)
    return found


class BreakingLineTests(SynchronousTestCase):
    """Whatever happens to single requests, the stream is exactly what was printed."""

    @settings(max_examples=EXAMPLES // 2, deadline=None)
    @given(WRITING, st.randoms(use_true_random=False), st.floats(0, 0.7), st.booleans())
    def test_broken_requests_neither_lose_nor_repeat_nor_reorder_events(
        self, writing: list[str | Event], chance: random.Random, breaks: float, leaves: bool
    ) -> None:
        root = Path(tempfile.mkdtemp(prefix="tawebeval-test-")).resolve()
        try:
            line = Line.make(root, ClientTestCase.settings)
            found = self.follow(line, writing, chance, breaks, leaves)
            line.close()
        finally:
            shutil.rmtree(root)
        self.assertEqual(joined(found), joined(writing))

    def follow(
        self,
        line: Line,
        writing: list[str | Event],
        chance: random.Random,
        breaks: float,
        leaves: bool,
    ) -> list[Event]:
        """Follow one evaluation, of which all requests break as often as `breaks` says."""
        bad = [fate for fate in Fate if fate.passes]
        line.client.request_backoff = line.client.events_backoff = Backoff(10**6, 0.5, 5)
        line.wait(gathered(line.client.evaluations()))  # the daemon is known to run
        line.agent.fate = lambda: chance.choice(bad) if chance.random() < breaks else Fate.WELL
        identifier = line.begin()
        self.assertEqual(len(line.service.world.spawn.children), 1)
        block = line.child.make_data_block("[1.50]")
        todo = [some.encode() if isinstance(some, str) else block for some in writing]

        def meanwhile() -> None:
            if todo:
                line.child.print(todo.pop(0))
            elif line.child.is_running:
                line.child.end()

        found: list[Event] = []

        async def follow() -> None:
            while True:
                after = found[-1].cursor if found else None
                async for event in line.client.events(identifier, after):
                    found.append(event)
                    if leaves and chance.random() < 0.1:
                        break
                else:
                    return

        line.wait(follow(), meanwhile)
        return found


@attrs.frozen
class Pause:
    """A pause of so many seconds."""

    seconds: float


class SteppingClient(BaseClient):
    """A client that suspends an operation for each request and each pause."""

    @coroutine
    def exchange(self, request: HttpRequest) -> Iterator[Any]:
        return (yield request)

    @coroutine
    def pause(self, seconds: float) -> Iterator[Any]:
        yield Pause(seconds)


def play(operation: Any, *outcomes: Any) -> tuple[list[Any], Any]:
    """Return the steps of an operation that gets these outcomes, and its result or exception."""
    coming = iter(outcomes)
    steps: list[Any] = []
    outcome = None
    running = gathered(operation) if isinstance(operation, AsyncGenerator) else operation
    while True:
        try:
            steps.append(running.send(outcome))
        except StopIteration as end:
            return steps, end.value
        except ClientError as error:
            return steps, error
        outcome = next(coming) if isinstance(steps[-1], HttpRequest) else None


def json_response(body: str, status: int = 200, **headers: str) -> Response:
    """Return a response with a body of JSON."""
    return Response(status, {"content-type": "application/json", **headers}, body.encode())


RUNNING = json_response('{"state":"running"}')
BROKEN = RequestFailure("cut", Repetition.ALWAYS)


class StepTests(SynchronousTestCase):
    """The steps of operations, without a network."""

    def setUp(self) -> None:
        self.told: list[str] = []
        self.client = self.make("http://a/b/", "secret")

    def make(self, server: str, token: str | None = None) -> SteppingClient:
        """Return the settings of a client that makes two attempts."""
        return SteppingClient(
            server,
            token,
            request_backoff=Backoff(2, 8, 8, 100),
            events_backoff=Backoff(2, 8, 8, 100),
            on_retry=lambda why, seconds: self.told.append(why),
            on_recovery=lambda: self.told.append("answered"),
            draw_random=lambda: 0.5,
            get_time=lambda: 1000.0,
        )

    def test_request_has_token_version_and_time_limit(self) -> None:
        steps, result = play(operations.status(self.client, "x/y"), RUNNING)
        self.assertEqual(result, {"state": "running"})
        (sent,) = steps
        self.assertEqual((sent.method, sent.url), ("GET", "http://a/b/evaluation/x%2Fy"))
        self.assertEqual(sent.headers["Authorization"], "Bearer secret")
        self.assertTrue(sent.headers["User-Agent"].startswith("tawebeval/"))
        self.assertEqual((sent.timeout, sent.connect_timeout), (60, 30))

    def test_form_has_the_given_fields(self) -> None:
        given = {"repository": "r", "commit": "c", "evaluator_cmd": "e", "directory": "d"}
        operation = operations.evaluate(self.client, {"a": "x"}, **given, seed=0)
        (sent,), _ = play(operation, json_response('{"evaluation_id":"y"}'))
        expected = {"repository[url]": "r", "commit_oid": "c", "evaluator_cmd": "e"}
        self.assertEqual(sent.form.fields, {**expected, "directory": "d", "seed": "0"})
        self.assertEqual(sent.form.submission, {"a": "x"})

    def test_rerun_sends_replaced_fields_and_the_key_only(self) -> None:
        operation = operations.rerun(self.client, "x", seed=3, limits={"cpu": 2}, key="k")
        steps, result = play(operation, json_response('{"evaluation_id":"y"}'))
        self.assertEqual(result, "y")
        (sent,) = steps
        self.assertEqual((sent.method, sent.url), ("POST", "http://a/b/evaluation/x/rerun"))
        self.assertEqual(sent.headers["Idempotency-Key"], "k")
        self.assertEqual(sent.form.fields, {"seed": "3", "limits[cpu]": "2"})
        operation = operations.rerun(self.client, "x", uses_current_evaluator=True)
        (sent,), _ = play(operation, json_response('{"evaluation_id":"y"}'))
        self.assertEqual(sent.url, "http://a/b/evaluation/x/rerun?evaluator=current")

    def test_request_is_repeated_after_a_pause_until_the_last_attempt_fails(self) -> None:
        steps, result = play(operations.status(self.client, "x"), BROKEN, RUNNING)
        self.assertEqual(steps[1:], [Pause(4), steps[0]])
        self.assertEqual(result, {"state": "running"})
        self.assertEqual(self.told, ["cut", "answered"])
        steps, result = play(operations.status(self.client, "x"), BROKEN, BROKEN)
        self.assertIsInstance(result, Unavailable)
        self.assertEqual(len(steps), 3)

    def test_permanent_statuses_are_reported_at_once_and_others_repeated(self) -> None:
        for status, headers, pauses, kind in (
            (503, {"retry-after": "7"}, [Pause(11)], Unavailable),
            (503, {"retry-after": "Thu, 01 Jan 1970 00:16:45 GMT"}, [Pause(9)], Unavailable),
            (503, {"retry-after": "é☃"}, [Pause(4)], Unavailable),
            (429, {}, [Pause(4)], Unavailable),
            (503, {"retry-after": "101"}, [], Unavailable),
            (501, {}, [], Refused),
            (302, {"location": "https://b"}, [], Refused),
            (404, {}, [], UnknownEvaluation),
        ):
            response = json_response("", status, **headers)
            steps, result = play(operations.status(self.client, "x"), response, response)
            self.assertIsInstance(result, kind)
            self.assertEqual([step for step in steps if isinstance(step, Pause)], pauses, status)
            if "101" in headers.values():
                self.assertIn("the server asks to retry after 101 seconds", str(result))
        self.assertEqual(len([step for step in steps if isinstance(step, HttpRequest)]), 1)

    def test_refused_connection_on_this_machine_is_retried_only_for_events(self) -> None:
        refused = RequestFailure("refused", Repetition.IF_SERVER_MAY_START)
        for server, operation, attempts in (
            ("http://localhost", operations.status, 1),
            ("http://a", operations.status, 2),
            ("http://localhost", operations.events, 2),
        ):
            steps, result = play(operation(self.make(server), "x"), refused, refused)
            self.assertTrue(result.is_refused_connection)
            sent = [step for step in steps if isinstance(step, HttpRequest)]
            self.assertEqual(len(sent), attempts)

    def test_methods_have_their_names_in_help_and_tracebacks(self) -> None:
        for kind in (Client, AsyncClient):
            for name in ("run", "run_problem", "evaluate", "events", "standings"):
                self.assertEqual(getattr(kind, name).__name__, name)

    def test_run_returns_the_verdict_of_an_evaluation_in_one_call(self) -> None:
        case = '{"type":"data","payload":{"type":"case","case":"1","verdict":"%s"}}'
        failure = (
            '{"type":"data","payload":{"type":"evaluation_error","reason":"exit","message":"m"}}'
        )
        for begin, path in (
            (partial(operations.run, repository="r", commit="c", evaluator_cmd="e"), "/evaluate"),
            (
                lambda *given: operations.run_problem(given[0], "p", given[1]),
                "/problems/p/evaluate",
            ),
        ):
            for listed, verdict in (
                ((case % "accepted",), "accepted"),
                ((case % "time_limit", case % "accepted"), "time limit"),
                (('{"type":"text","payload":"x"}',), "finished"),
                ((case % "accepted", failure), "evaluation failed"),
                ((case.replace("%s", f'accepted","x":"{"ü" * 8192}'),), "finished"),
                ((failure, case % "accepted"), "accepted"),
            ):
                steps, outcome = play(
                    begin(self.client, {"source": "x"}),
                    json_response('{"evaluation_id":"x"}'),
                    json_response(f'{{"begin":null,"end":"1","data":[{",".join(listed)}]}}'),
                    json_response('{"begin":"1","end":null,"data":[]}'),
                )
                self.assertEqual(steps[0].url, f"http://a/b{path}")
                self.assertEqual((outcome.identifier, outcome.verdict), ("x", verdict))
                self.assertEqual(outcome.error is None, verdict != "evaluation failed")
        self.assertEqual(Outcome("x", None).verdict, "finished")

    def test_problem_submission_and_link_operations_send_and_parse(self) -> None:
        client = self.client
        for operation, sent, body, expected in (
            (
                operations.problem(client, "a/b"),
                ("GET", "http://a/b/problems/a%2Fb"),
                '{"name":"a","statement":"s"}',
                {"name": "a", "statement": "s"},
            ),
            (
                operations.submission(client, "x"),
                ("GET", "http://a/b/evaluation/x/submission"),
                '{"files":[{"field":"f","filename":"n"}]}',
                [{"field": "f", "filename": "n"}],
            ),
            (
                operations.make_link(client, "x", lifetime=60),
                ("POST", "http://a/b/evaluation/x/links?lifetime=60"),
                '{"link":"l","expires":"e"}',
                {"link": "l", "expires": "e"},
            ),
        ):
            steps, result = play(operation, json_response(body))
            self.assertEqual((steps[0].method, steps[0].url), sent)
            self.assertEqual(result, expected)
        steps, result = play(operations.revoke_links(client, "x"), Response(204, {}, b""))
        self.assertEqual(steps[0].url, "http://a/b/evaluation/x/links")
        self.assertIsNone(result)
        _, result = play(operations.problem(client, "x"), json_response("{}", 404))
        self.assertIsInstance(result, InvalidRequest)

    def test_response_of_another_kind_of_server_is_an_error_without_retry(self) -> None:
        client = self.client
        for operation, response, words in (
            (operations.status(client, "x"), json_response("{}"), "required field `state`"),
            (operations.rerun(client, "x"), json_response("{}"), "field `evaluation_id`"),
            (operations.cancel(client, "x"), RUNNING, "the status is 200"),
            (operations.environments(client), json_response('{"data":[{}]}'), "field `name`"),
            (operations.whoami(client), json_response("{}"), "field `caller`"),
            (operations.status(client, "x"), Response(200, {}, b"<html>"), "instead of JSON"),
        ):
            steps, result = play(operation, response)
            self.assertIsInstance(result, Unavailable)
            self.assertIn(words, str(result))
            self.assertEqual(len(steps), 1)

    def test_members_of_wrong_types_are_unexpected_answers(self) -> None:
        client = self.client
        results = '"goals":{},"goals_omitted":0,"cases":{},"progress":null'
        listed = '{"evaluation_id":"x","state":"running","created":'
        for operation, body in (
            (operations.status(client, "x"), '{"state":1}'),
            (operations.status(client, "x"), '{"state":"running","results":{"score":1}}'),
            (operations.status(client, "x"), f'{{"state":"running","results":{{{results}}}}}'),
            (operations.status(client, "x"), '{"state":"failed","error":{}}'),
            (operations.status(client, "x"), '{"state":"failed","metadata":{"a":1}}'),
            (operations.status(client, "x"), '{"state":"failed","created":"now"}'),
            (operations.evaluations(client), f'{{"end":null,"data":[{listed}null}}]}}'),
            (
                operations.evaluations(client),
                f'{{"end":null,"data":[{listed}"2026-11-20T20:07:08"}}]}}',
            ),
            (operations.problems(client), '{"end":null,"data":[{"name":"a"}]}'),
            (operations.problems(client), '{"end":null,"data":[{"name":"a","title":"a"}]}'),
        ):
            steps, result = play(operation, json_response(body))
            self.assertIsInstance(result, Unavailable, body)
            self.assertIn("unexpected answer", str(result))
            self.assertEqual(len(steps), 1)

    def test_page_must_begin_at_the_cursor(self) -> None:
        page = json_response('{"begin":"9","end":"10","data":[]}')
        _, result = play(operations.pages(self.client, "x", "8"), page)
        self.assertIn("it begins at '9'", str(result))

    def test_404_means_unknown_before_the_first_page_and_gone_after_it(self) -> None:
        page = json_response('{"begin":null,"end":"1","data":[]}')
        unknown = json_response("{}", 404)
        _, result = play(operations.events(self.client, "x"), unknown)
        self.assertIsInstance(result, UnknownEvaluation)
        steps, result = play(operations.events(self.client, "x"), page, unknown)
        self.assertIsInstance(result, EvaluationGone)
        self.assertEqual(steps[1], Pause(0.5))
        held = json_response(
            '{"begin":null,"end":"1","data":[]}', **{"preference-applied": "wait=25"}
        )
        for seconds, pauses in ((0.4, [Pause(0.5)]), (0.6, [])):
            clock = itertools.count(1000, seconds)
            self.client.get_time = lambda clock=clock: next(clock)
            steps, _ = play(operations.events(self.client, "x"), held, unknown)
            self.assertEqual([step for step in steps if isinstance(step, Pause)], pauses)

    def test_list_that_repeats_a_cursor_is_refused(self) -> None:
        parts = [json_response(f'{{"end":"{end}","data":[]}}') for end in "121"]
        _, result = play(operations.problems(self.client), *parts)
        self.assertIn("the cursor '1' comes twice in a list", str(result))

    def test_item_in_two_parts_of_a_list_is_returned_once(self) -> None:
        best = '{"evaluation_id":"x","state":"queued","created":"2026-11-20T20:07:08Z"}'
        one, two = (f'{{"caller":"{name}","problem":"p","best":{best}}}' for name in ("a", "b"))
        client, query = self.client, "problem=p&caller=c"
        for listing, items, found in (
            (operations.evaluations(client, problem="p", caller="c"), [best, best], ["x"]),
            (
                operations.standings(client, problem="p", caller="c"),
                [one, f"{one},{two}"],
                ["a", "b"],
            ),
        ):
            steps, listed = play(
                listing,
                json_response(f'{{"end":"1","data":[{items[0]}]}}'),
                json_response(f'{{"end":null,"data":[{items[1]}]}}'),
            )
            keys = [item.get("caller") or item["evaluation_id"] for item in listed]
            self.assertEqual(keys, found)
            sent = [step.url.partition("?")[2] for step in steps]
            self.assertEqual(sent, [query, f"after=1&{query}"])

    def test_daemons_without_an_answer_are_named_at_the_end_of_a_list(self) -> None:
        away: list[str] = []
        listing = operations.evaluations(self.client, on_unreachable_daemons=away.extend)
        play(listing, json_response('{"end":null,"data":[],"away":["b"]}'))
        self.assertEqual(away, ["b"])

    def test_too_deeply_nested_document_is_refused(self) -> None:
        response = json_response('{"state":' + "[" * 100_000)
        _, result = play(operations.status(self.client, "x"), response, response)
        self.assertIn("unexpected answer", str(result))
