"""`client.http`: when a request is repeated, and when not."""

from __future__ import annotations

import random
import socket
from typing import Any

from OpenSSL.SSL import Error as TlsError
from OpenSSL.SSL import SysCallError
from service_identity import VerificationError
from treq.client import HTTPClient
from twisted.internet import reactor
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionLost, DNSLookupError
from twisted.internet.task import Cooperator
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase
from twisted.web._newclient import ParseError, RequestTransmissionFailed, ResponseNeverReceived
from twisted.web.http import datetimeToString
from twisted.web.http_headers import Headers

from tawebeval.client import (
    Client,
    EvaluationGone,
    Forbidden,
    InvalidRequest,
    Refused,
    Unavailable,
    UnknownEvaluation,
)
from tawebeval.client.http import Request, Session, is_unknown
from tawebeval.core.backoff import Backoff
from tests.cases.agents import BreakingAgent, Fate, MadeResponse
from tests.cases.client import REQUEST, ClientTestCase, gathered


class RepeatTests(ClientTestCase):
    """Requests of a client, over a line that breaks."""

    def test_each_fate(self) -> None:
        """Each kind of failure is reported, and the same request repeated; so is the recovery."""
        answered: list[bool] = []
        self.line = self.make(client={"answered": lambda: answered.append(True)})
        identifier = self.line.begin()
        self.assertEqual(answered, [])
        failures = [fate for fate in Fate if fate.passes]
        for fate in failures:
            self.line.fail_once(fate)
            self.line.told.clear()
            self.line.agent.asked.clear()
            status = self.line.wait(self.line.client.status(identifier))
            self.assertEqual(status["state"], "running")
            ((why, seconds),) = self.line.told
            self.assertTrue(why)
            self.assertGreater(seconds, 0)
            first, second = self.line.agent.asked
            self.assertEqual(first, second)
        self.assertEqual(len(answered), len(failures))
        self.assertEqual(self.line.agent.cancelled, 1)

    def test_retry_after(self) -> None:
        """Retry-After is respected, in seconds or as a date; too long a pause is refused."""
        self.line = self.make(client={"time": lambda: 1000.0})
        identifier = self.line.begin()
        for value, least in ((b"7", 7), (datetimeToString(1005), 5), (b"soon", 0), (b"100", 100)):
            self.line.fail_once(Fate.BUSY)
            self.line.agent.retry_after = value
            self.line.told.clear()
            self.line.wait(self.line.client.status(identifier))
            ((why, seconds),) = self.line.told
            self.assertIn("503", why)
            self.assertTrue(least <= seconds <= least + 1, (value, seconds))
        self.line.fail_once(Fate.BUSY)
        self.line.agent.retry_after = b"86400"
        self.line.agent.asked.clear()
        with self.assertRaises(Unavailable) as caught:
            self.line.wait(self.line.client.status(identifier))
        self.assertIn("86400 seconds", str(caught.exception))
        self.assertEqual(len(self.line.agent.asked), 1)

    def test_text(self) -> None:
        """What cannot be UTF-8 is refused before anybody is asked, with the field's name."""
        for fields, words in (
            ({"submission": {"source": "\udcff"}}, "submission[source]: must be UTF-8"),
            ({"evaluator_cmd": "echo \udcff"}, "evaluator_cmd: must be UTF-8"),
        ):
            with self.assertRaises(ValueError) as caught:
                self.line.begin(**fields)
            self.assertEqual(str(caught.exception), words)
        self.assertEqual(self.line.agent.asked, [])

    def test_shape(self) -> None:
        """An answer without what every one has is none, and there will be no other."""
        self.line.agent.kind = b"Application/JSON; charset=utf-8"
        self.line.agent.fate = lambda: Fate.NONSENSE
        listing = b'{"end":null,"data":[{"evaluation_id":"x","state":"running"}]}'
        for question, body, words in (
            (self.line.client.status("x"), b"{}", "it has no state"),
            (gathered(self.line.client.evaluations()), listing, "it has no created"),
        ):
            self.line.agent.nonsense = body
            with self.assertRaises(Unavailable) as caught:
                self.line.wait(question)
            self.assertIn(words, str(caught.exception))
        self.assertEqual(len(self.line.agent.asked), 2)

    def test_something_else(self) -> None:
        """Where something else answers no question is repeated, whatever it is."""
        identifier = self.line.begin()
        self.line.agent.fate = lambda: Fate.NONSENSE
        for kind, named in (
            (b"text/html; charset=utf-8", "text/html"),
            (b"", "of no declared type"),
        ):
            self.line.agent.kind = kind
            for question in (
                self.line.client.evaluate({"source": "x"}, **REQUEST),
                self.line.client.status(identifier),
                self.line.client.cancel(identifier),
                gathered(self.line.client.evaluations()),
                gathered(self.line.client.events(identifier)),
            ):
                self.line.agent.asked.clear()
                with self.assertRaises(Unavailable) as caught:
                    self.line.wait(question)
                said = f"no tawebeval answers there: the answer is {named}, not JSON; check the URL"
                self.assertEqual(str(caught.exception), f"http://localhost:8080: {said}")
                self.assertEqual(len(self.line.agent.asked), 1)

    def fail(self, error: Exception, *, unknown: bool = False) -> str:
        """Have each of two attempts end by an error; return the message of Unavailable."""
        asked: list[object] = []

        def request(*arguments: object) -> Deferred[Any]:
            asked.append(arguments)
            return fail(error)

        async def is_unknown(host: str) -> bool:
            self.assertEqual(host, "localhost")
            return unknown

        self.patch(BreakingAgent, "request", request)
        clock = self.line.service.reactor
        session = Session(
            HTTPClient(self.line.agent),
            "http://localhost:8080",
            {},
            clock,
            Cooperator(scheduler=lambda call: clock.callLater(0, call)),
            random.random,
            clock.seconds,
            lambda why, seconds: None,
            lambda: None,
            is_unknown,
        )
        with self.assertRaises(Unavailable) as caught:
            self.line.wait(session.send(Request("GET", "/"), Backoff(2, 1, 10), lambda _: None))
        self.attempts = len(asked)
        return str(caught.exception)

    def test_no_server_for_this(self) -> None:
        """What TLS and HTTP cannot mend is told at once; what may have broken is tried again."""
        unknown = TlsError([("SSL routines", "", "certificate verify failed")])
        for reason, words, attempts in (
            (unknown, "TLS has failed: certificate verify failed (", 1),
            (VerificationError([]), "TLS has failed: ", 1),
            (ParseError("wrong number of parts", b"SSH-2.0"), "does not speak HTTP", 1),
            (SysCallError(-1, "Unexpected EOF"), "the connection broke: ", 2),
            (ConnectionLost(), "the connection broke: ", 2),
        ):
            for kind in (ResponseNeverReceived, RequestTransmissionFailed):
                self.assertIn(words, self.fail(kind([Failure(reason)])))
                self.assertEqual(self.attempts, attempts, reason)

    def test_no_host(self) -> None:
        """A host that does not exist fails at once; without an answer it is asked for again."""
        for unknown, attempts in ((True, 1), (False, 2)):
            message = self.fail(DNSLookupError("x"), unknown=unknown)
            self.assertIn("no connection: DNS lookup failed", message)
            self.assertEqual(self.attempts, attempts)

    def test_host(self) -> None:
        """A name that no host can have is not asked for again and again."""
        client = Client("http://a..b", reactor=self.line.service.reactor, agent=self.line.agent)
        with self.assertRaises(Unavailable) as caught:
            self.line.wait(client.status("x"))
        self.assertIn("http://a..b: ", str(caught.exception))
        self.assertEqual(self.line.agent.asked, [])

    def test_in_the_end(self) -> None:
        """After so many attempts it is told what was wrong with the last."""
        self.line.agent.fate = lambda: Fate.REFUSED
        self.line.client.asking = Backoff(3, 1, 10)
        with self.assertRaises(Unavailable) as caught:
            self.line.begin()
        self.assertIn("http://localhost:8080", str(caught.exception))
        self.assertIn("refused", str(caught.exception).lower())
        self.assertEqual(len(self.line.agent.asked), 3)
        self.assertEqual(len(self.line.told), 2)

    def test_refusals(self) -> None:
        """Other statuses are told at once, with the server's words or without; redirects too."""
        for status, body, kind, words in (
            (301, b"", Refused, "301 Moved Permanently"),
            (400, b'{"message": "no"}', InvalidRequest, "no"),
            (400, b'{"detail": "not"}', InvalidRequest, "not"),
            (401, b"", Forbidden, "401 Unauthorized"),
            (403, b"<html>", Forbidden, "403"),
            (404, b"[" * 100_000, UnknownEvaluation, "404"),
            (410, b"[]", EvaluationGone, "410"),
            (499, b'{"message": 5}', InvalidRequest, "499"),
            (501, b"<html>", Refused, "501 Not Implemented"),
        ):
            made = MadeResponse(status, body, Headers())
            self.patch(BreakingAgent, "request", lambda *_, made=made: succeed(made))
            with self.assertRaises(kind) as caught:
                self.line.wait(self.line.client.status("x"))
            self.assertIn(words, str(caught.exception))
            self.assertEqual(caught.exception.status, status)
            self.assertEqual(self.line.told, [])


class UnknownHostTests(TestCase):
    """Hosts that there are not, and those of which nobody knows just now."""

    async def test_answers(self) -> None:
        """What name servers say counts, not that they say nothing."""
        for number, unknown in (
            (socket.EAI_NONAME, True),
            (socket.EAI_NODATA, True),
            (socket.EAI_AGAIN, False),
            (socket.EAI_FAIL, False),
            (None, False),
        ):

            def look(*_: object, number: int | None = number) -> None:
                if number is not None:
                    raise socket.gaierror(number, "why")

            self.patch(socket, "getaddrinfo", look)
            self.assertIs(await is_unknown(reactor, "host.example"), unknown)
