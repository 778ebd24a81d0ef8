"""`client.blocking`: the same client, for those who may wait."""

from __future__ import annotations

import inspect
import sys
import threading
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase, TestCase

from tawebeval.client import Client, Refused
from tawebeval.client.blocking import BlockingClient
from tests.cases.agents import MadeResponse
from tests.cases.own_python import run_script
from tests.cases.patience import PATIENCE
from tests.fakes.world import OID

PAGES = {
    "/evaluation/x/events": b'{"begin":null,"end":"2","data":[{"type":"text","payload":"a"},'
    b'{"type":"data","payload":1}]}',
    "/evaluation/x/events?after=2": b'{"begin":"2","end":"end","data":[{"type":"text",'
    b'"payload":"b"}]}',
    "/evaluation/x/events?after=end": b'{"begin":"end","end":null,"data":[]}',
    "/evaluation/x/events?after=2&times=1": b'{"begin":"2","end":"end","data":[{"type":"text",'
    b'"payload":"b","time":"2026-11-20T20:07:08Z"}]}',
    "/evaluation/x/events?after=end&times=1": b'{"begin":"end","end":null,"data":[]}',
    "/evaluation/x": b'{"state":"running"}',
    "/evaluate": b'{"evaluation_id":"x"}',
    "/evaluations": b'{"begin":null,"end":null,'
    b'"data":[{"evaluation_id":"x","state":"running","created":"now"}]}',
}

SCRIPT = """
import sys, threading
from tawebeval.client import Unavailable
from tawebeval.client.blocking import BlockingClient
from tawebeval.core.backoff import Backoff

once = Backoff(1, 0.01, 0.01)
for attempt in range(2):  # the second finds a reactor that runs
    with BlockingClient("http://127.0.0.1:9", asking=once) as client:
        try:
            client.status("x")
        except Unavailable as error:
            print("unavailable:", "refused" in str(error))
print([t.name for t in threading.enumerate() if "tawebeval" in t.name])
"""


class Agent:
    """Answers as `PAGES` say, and notes in which thread it was asked."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.held: Deferred[Any] | None = None

    def request(self, method: bytes, uri: bytes, headers: Any, body: Any) -> Deferred[Any]:
        """Answer."""
        self.threads.add(threading.current_thread().name)
        answer: Deferred[Any] = Deferred()
        path = uri.decode().removeprefix("http://localhost")
        if path == "/evaluation/held":
            self.held = answer
            return answer
        body = PAGES.get(path)
        answer.callback(MadeResponse(404 if body is None else 200, body or b""))
        return answer


class BlockingTests(TestCase):
    """In a thread, beside trial's reactor."""

    timeout = PATIENCE

    async def setUp(self) -> None:
        await deferLater(reactor, 0)  # from here on trial's reactor runs

    async def test_all(self) -> None:
        """Each method waits for what that of the client comes to, in the reactor's thread."""
        agent = Agent()

        def script() -> list[Any]:
            with BlockingClient("http://localhost", agent=agent) as client:
                identifier = client.evaluate(
                    {"source": "x"}, repository="u", commit=OID, evaluator_cmd="c"
                )
                events = list(client.events(identifier))
                found = [
                    [getattr(event, "text", None) for event in events],
                    [event.cursor for event in events],
                    [event.cursor for event in client.events("x", "+1")],
                    [page.end for page in client.pages("x", "2")],
                    [event.time.year for event in client.events("x", "2", times=True)],
                    client.status("x"),
                    list(client.evaluations()),
                ]
                with self.assertRaises(Refused):
                    client.cancel("y")
                return found

        found = await deferToThread(script)
        self.assertEqual(found[0], ["a", None, "b"])
        self.assertEqual(found[1], ["+1", "2", "end"])
        self.assertEqual(found[2], ["2", "end"])
        self.assertEqual(found[3], ["end"])
        self.assertEqual(found[4], [2026])
        self.assertEqual(found[5], {"state": "running"})
        self.assertEqual([one["evaluation_id"] for one in found[6]], ["x"])
        self.assertEqual(agent.threads, {threading.current_thread().name})

    async def test_in_the_reactor(self) -> None:
        """In the reactor's own thread it would wait for itself, and says so."""
        with self.assertRaises(RuntimeError) as caught:
            BlockingClient("http://localhost")
        self.assertIn("use Client", str(caught.exception))

    async def test_interrupt(self) -> None:
        """Who stops waiting, as by Ctrl-C, ends the question."""
        agent = Agent()
        client = await deferToThread(BlockingClient, "http://localhost", agent=agent)
        cancelled: list[bool] = []

        def interrupted(_: Any, function: Any) -> Any:
            reactor.callFromThread(function)
            raise KeyboardInterrupt

        self.patch(sys.modules[BlockingClient.__module__], "blockingCallFromThread", interrupted)

        def script() -> None:
            try:
                client.status("held")
            except KeyboardInterrupt:
                cancelled.append(True)

        await deferToThread(script)
        await deferLater(reactor, 0)
        self.assertEqual(cancelled, [True])
        assert agent.held is not None
        self.assertTrue(agent.held.called)


class ScriptTests(SynchronousTestCase):
    """As people use it."""

    def test_program(self) -> None:
        """A program without a reactor gets its answers, and ends when its last line has run."""
        done = run_script(SCRIPT)
        self.assertEqual(
            done.stdout, "unavailable: True\nunavailable: True\n['tawebeval-client']\n"
        )
        self.assertEqual(done.stderr, "")

    def test_same(self) -> None:
        """It has every method of the asynchronous client, with the same arguments."""
        for name, method in inspect.getmembers(Client, inspect.isfunction):
            if not name.startswith("_"):
                own = inspect.signature(getattr(BlockingClient, name))
                self.assertEqual(list(own.parameters), list(inspect.signature(method).parameters))
