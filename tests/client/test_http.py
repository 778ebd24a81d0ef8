"""`client.http`: when a request is repeated, and when not."""

from __future__ import annotations

import random
from typing import Any

import attrs
from OpenSSL.SSL import Error as TlsError
from OpenSSL.SSL import SysCallError
from service_identity import VerificationError
from treq.client import HTTPClient
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectError, ConnectionLost, DNSLookupError, NoRouteError
from twisted.internet.error import ConnectionRefusedError as ConnectionRefused
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock, Cooperator
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase
from twisted.web._newclient import ParseError, RequestTransmissionFailed, ResponseNeverReceived
from twisted.web.http import datetimeToString
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IResponse
from zope.interface import implementer

from tawebeval.client import (
    Client,
    EvaluationGone,
    Forbidden,
    InvalidRequest,
    Refused,
    Unavailable,
    UnknownEvaluation,
)
from tawebeval.client import client as client_module
from tawebeval.client.http import Request, Session, is_plain_http
from tawebeval.core.backoff import Backoff
from tests.cases.agents import BreakingAgent, Fate, MadeResponse
from tests.cases.client import REQUEST, ClientTestCase, gathered, text
from tests.integration.receivers import full_socket

reactor: Any = installed

OTHER_SERVER = "is it a tawebeval server? Check https:// and the path of the URL"


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
            (b"", "a body of no declared type"),
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
                said = f"is not a tawebeval server: it sends {named} instead of JSON; check the URL"
                self.assertEqual(str(caught.exception), f"http://localhost:8080 {said}")
                self.assertEqual(len(self.line.agent.asked), 1)

    def break_off(
        self, *errors: Exception, base: str = "http://localhost:8080", plain: Any = None
    ) -> str:
        """Have each of two attempts end by an error; return the message of Unavailable.

        The last error counts for all further attempts; None is a response that says "later".
        `plain()` answers whether the server speaks plain HTTP.
        """
        coming = iter(errors)
        asked: list[object] = []

        def request(*arguments: object) -> Deferred[Any]:
            asked.append(arguments)
            error = next(coming, errors[-1])
            return succeed(MadeResponse(503, b"")) if error is None else fail(error)

        async def is_plain_http() -> bool:
            self.probes += 1
            return bool(plain and plain())

        self.probes = 0
        self.patch(BreakingAgent, "request", request)
        clock = self.line.service.reactor
        session = Session(
            HTTPClient(self.line.agent),
            base,
            {},
            clock,
            Cooperator(scheduler=lambda call: clock.callLater(0, call)),
            random.random,
            clock.seconds,
            lambda why, seconds: None,
            lambda: None,
            lambda sent, total: None,
            is_plain_http,
        )
        with self.assertRaises(Unavailable) as caught:
            self.line.wait(
                session.send_request(Request("GET", "/"), Backoff(2, 1, 10), lambda _: None)
            )
        self.attempts = len(asked)
        self.refused = caught.exception.is_refused_connection
        return str(caught.exception)

    def test_no_server_for_this(self) -> None:
        """What TLS and HTTP cannot mend is told at once; what may have broken is tried again."""
        unknown = TlsError([("SSL routines", "", "certificate verify failed")])
        version = TlsError([("SSL routines", "", "wrong version number")])
        for reason, words, attempts in (
            (
                unknown,
                "is not trusted (certificate verify failed); if you trust it, set SSL_CERT",
                1,
            ),
            (VerificationError([]), "the certificate of https://localhost is for another host", 1),
            (version, "does not speak TLS as expected (wrong version number); check the URL", 1),
            (ParseError("wrong number of parts", b"SSH-2.0"), "does not speak HTTP", 1),
            (SysCallError(-1, "Unexpected EOF"), "the connection to https://localhost broke: ", 2),
            (ConnectionLost(), "the connection to https://localhost broke: ", 2),
        ):
            for kind in (ResponseNeverReceived, RequestTransmissionFailed):
                message = self.break_off(kind([Failure(reason)]), base="https://localhost")
                self.assertIn(words, message)
                self.assertEqual(self.attempts, attempts, reason)
                certificate = "certificate" in message
                self.assertEqual(self.probes, 0 if certificate else attempts, message)
        message = self.break_off(ResponseNeverReceived([Failure(ParseError("x", b"\x15\x03"))]))
        self.assertIn("check the URL, or try https://localhost:8080", message)

    def test_plain_http(self) -> None:
        """An https URL of a server without TLS fails at once, and the right URL is proposed."""
        expected = "https://a:81/b speaks plain HTTP, not TLS; use http://a:81/b"
        for reason in (ConnectionLost(), TlsError([("", "", "wrong version number")])):
            broken = ResponseNeverReceived([Failure(reason)])
            message = self.break_off(broken, base="https://a:81/b", plain=lambda: True)
            self.assertEqual((message, self.attempts, self.probes), (expected, 1, 1))
        self.break_off(ResponseNeverReceived([Failure(ConnectionLost())]), plain=lambda: True)
        self.assertEqual((self.attempts, self.probes), (2, 0))  # an http URL

    def test_silent_plain_http(self) -> None:
        """A server that is silent for a second is asked without TLS, once."""
        for plain, attempts, words in (
            (True, 1, "https://a speaks plain HTTP, not TLS; use http://a"),
            (False, 2, "no answer from https://a within 60 seconds"),
        ):
            self.line = self.make()
            clock = self.line.service.reactor
            begun = clock.seconds()
            probes: list[float] = []
            self.patch(client_module, "is_plain_http", Probe(plain, clock, probes))
            self.line.agent.fate = lambda: Fate.SILENT
            secure = Client(
                "https://a", reactor=clock, agent=self.line.agent, asking=Backoff(2, 1, 10)
            )
            with self.assertRaises(Unavailable) as caught:
                self.line.wait(secure.status("x"))
            self.assertEqual(str(caught.exception), words)
            self.assertEqual(len(self.line.agent.asked), attempts)
            self.assertEqual(len(probes), attempts)
            self.assertEqual(probes[0] - begun, 1)

    def test_no_host(self) -> None:
        """A host without an address fails at once; one that has answered is looked up again."""
        message = self.break_off(DNSLookupError("x"))
        self.assertIn(
            "cannot connect to http://localhost:8080: no address is known for the host localhost;"
            " check the URL, and the name service (DNS)",
            message,
        )
        self.assertEqual(self.attempts, 1)
        self.break_off(None, DNSLookupError("x"))
        self.assertEqual(self.attempts, 2)

    def test_addresses(self) -> None:
        """A server may be named by an IPv6 address, and by a name that is not in ASCII."""
        for server, sent in (
            ("http://[::1]:8080", b"http://[::1]:8080/"),
            ("http://münchen.example/base", b"http://xn--mnchen-3ya.example/base/"),
        ):
            asked: list[bytes] = []

            @implementer(IAgent)
            class Recorder:
                """An agent that only notes the URL."""

                def request(
                    self,
                    method: bytes,
                    uri: bytes,
                    *_: object,
                    asked: list[bytes] = asked,
                    **__: object,
                ) -> Deferred[IResponse]:
                    asked.append(uri)
                    return fail(DNSLookupError("x"))

            client = Client(server, reactor=Clock(), agent=Recorder())
            self.failureResultOf(Deferred.fromCoroutine(client.status("x")), Unavailable)
            self.assertEqual(asked, [sent + b"evaluation/x"])

    def test_no_connection(self) -> None:
        """The system's words tell why there is no connection; only a refused one is marked."""
        for error, words, refused in (
            (ConnectionRefused(111, "Connection refused"), "connection refused", True),
            (NoRouteError(113, "No route to host"), "no route to host", False),
            (ConnectError(string="out of sockets"), "out of sockets", False),
        ):
            message = self.break_off(error)
            self.assertTrue(message.startswith("cannot connect to http://localhost:8080: "))
            self.assertTrue(message.endswith(words), message)
            self.assertEqual((self.attempts, self.refused), (1 if refused else 2, refused))

    def test_no_daemon(self) -> None:
        """On this machine a refused connection is final, until the server has answered."""
        refused = ConnectionRefused(111, "Connection refused")
        for base, attempts in (
            ("http://127.0.0.1:8080", 1),
            ("http://localhost", 1),
            ("http://192.0.2.1:8080", 2),
            ("http://judge.example.org", 2),
        ):
            self.break_off(refused, base=base)
            self.assertEqual((self.attempts, self.refused), (attempts, True), base)
        self.break_off(None, refused)
        self.assertEqual(self.attempts, 2)

    def test_no_daemon_for_events(self) -> None:
        """A request for events is repeated: its evaluation is under way."""
        identifier = self.line.begin()
        self.line.child.print(b"a\n")
        self.line.fail_once(Fate.REFUSED)
        other = Client(
            "http://localhost:8080", reactor=self.line.service.reactor, agent=self.line.agent
        )
        page = self.line.wait(anext(other.pages(identifier)))
        self.assertEqual(text(list(page.events)), "a")

    def test_host(self) -> None:
        """A name that no host can have is not asked for again and again."""
        client = Client("http://a..b", reactor=self.line.service.reactor, agent=self.line.agent)
        with self.assertRaises(Unavailable) as caught:
            self.line.wait(client.status("x"))
        self.assertIn("http://a..b: ", str(caught.exception))
        self.assertEqual(self.line.agent.asked, [])

    def test_in_the_end(self) -> None:
        """After the last attempt the error tells what was wrong with it."""
        self.line.agent.fate = lambda: Fate.LOST
        self.line.client.asking = Backoff(3, 1, 10)
        with self.assertRaises(Unavailable) as caught:
            self.line.begin()
        self.assertIn("http://localhost:8080", str(caught.exception))
        self.assertEqual(len(self.line.agent.asked), 3)
        self.assertEqual(len(self.line.told), 2)

    def test_refusals(self) -> None:
        """Other statuses are told at once, with the server's words or without; redirects too."""
        for status, body, kind, words in (
            (301, b"", Refused, f"301 Moved Permanently without an explanation; {OTHER_SERVER}"),
            (400, b'{"message": "no"}', InvalidRequest, "no"),
            (400, b'{"detail": "not"}', InvalidRequest, "not"),
            (401, b"", Forbidden, "401 Unauthorized"),
            (403, b"<html>", Forbidden, "403"),
            (404, b"[" * 100_000, UnknownEvaluation, OTHER_SERVER),
            (405, b"<html>", InvalidRequest, OTHER_SERVER),
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


@attrs.frozen
class Probe:
    """Answers whether a server speaks plain HTTP, and notes when it is asked."""

    answer: bool
    clock: Any
    asked: list[float]

    async def __call__(self, reactor: Any, base: str) -> bool:
        self.asked.append(self.clock.seconds())
        return self.answer


class PlainHttpTests(TestCase):
    """Real servers, asked without TLS."""

    async def test_answers(self) -> None:
        """An answer of HTTP counts, unless it is the 400 of a server that expects TLS."""
        for says, plain in (
            (b"HTTP/1.1 200 OK\r\n\r\n", True),
            (b"HTTP/1.0 401 Unauthorized\r\n\r\n", True),
            (b"HTTP/1.1 400 The plain HTTP request was sent to HTTPS port\r\n\r\n", False),
            (b"SSH-2.0-OpenSSH_9.2\r\n", False),
            (b"\x15\x03\x01\x00\x02\x02\x46", False),
            (b"", False),
        ):
            answering = Factory.forProtocol(Answering)
            answering.says = says
            port = reactor.listenTCP(0, answering, interface="127.0.0.1")
            url = f"https://127.0.0.1:{port.getHost().port}/base"
            self.assertIs(await is_plain_http(reactor, url), plain, says)
            await port.stopListening()
        self.assertIs(await is_plain_http(reactor, url), False)

    async def test_no_answer(self) -> None:
        """A server that is silent, and a port that nobody can connect to, do not speak it."""
        silent = reactor.listenTCP(0, Factory.forProtocol(Protocol), interface="127.0.0.1")
        self.addCleanup(silent.stopListening)
        with full_socket() as full:
            for port in (silent.getHost().port, full):
                url = f"https://127.0.0.1:{port}"
                self.assertIs(await is_plain_http(reactor, url, timeout=0.2), False)


class Answering(Protocol):
    """A server that says the same to everybody."""

    factory: Any

    def dataReceived(self, data: bytes) -> None:
        """Answer."""
        assert self.transport is not None
        self.transport.write(self.factory.says)
        self.transport.loseConnection()
