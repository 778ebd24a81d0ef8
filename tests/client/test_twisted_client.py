"""`client.twisted_client`: when a request is repeated, and when not."""

from __future__ import annotations

import gzip
from typing import Any

from OpenSSL.SSL import Error as TlsError
from OpenSSL.SSL import SysCallError
from service_identity import VerificationError
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectError, ConnectionLost, DNSLookupError, NoRouteError
from twisted.internet.error import ConnectionRefusedError as ConnectionRefused
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.web._newclient import ParseError, RequestTransmissionFailed, ResponseNeverReceived
from twisted.web.client import ResponseDone
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IResponse
from zope.interface import implementer

from tawebeval.client import Unavailable, twisted_client
from tawebeval.client.http import HttpRequest
from tawebeval.client.twisted_client import TwistedClient
from tawebeval.core.backoff import Backoff
from tests.cases.agents import BreakingAgent, Fate, MadeResponse
from tests.cases.client import ClientTestCase


class RepeatTests(ClientTestCase):
    """Requests of a client, over a line that breaks."""

    def test_each_failure_is_reported_repeated_and_recovered_from(self) -> None:
        answered: list[bool] = []
        self.line = self.make(client={"on_recovery": lambda: answered.append(True)})
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

    def break_off(
        self,
        *errors: Exception | None,
        base: str = "http://localhost:8080",
    ) -> str:
        """Have each of two attempts end by an error; return the message of Unavailable.

        The last error counts for all further attempts; None is a response that says "later".
        """
        coming = iter(errors)
        self.attempts = 0

        def request(_: object, method: bytes, uri: bytes, *__: object) -> Deferred[Any]:
            self.attempts += 1
            error = next(coming, errors[-1])
            return succeed(MadeResponse(503, b"")) if error is None else fail(error)

        self.patch(BreakingAgent, "request", request)
        client = TwistedClient(
            base,
            reactor=self.line.service.reactor,
            agent=self.line.agent,
            request_backoff=Backoff(2, 1, 10),
        )
        with self.assertRaises(Unavailable) as caught:
            self.line.wait(client.status("x"))
        self.refused = caught.exception.is_refused_connection
        return str(caught.exception)

    def test_permanent_tls_and_http_errors_are_not_repeated(self) -> None:
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
        message = self.break_off(ResponseNeverReceived([Failure(ParseError("x", b"\x15\x03"))]))
        self.assertIn("check the URL, or try https://localhost:8080", message)

    def test_silent_server_is_asked_again(self) -> None:
        self.line.agent.fate = lambda: Fate.SILENT
        secure = TwistedClient(
            "https://a",
            reactor=self.line.service.reactor,
            agent=self.line.agent,
            request_backoff=Backoff(2, 1, 10),
        )
        error = self.assertRaises(Unavailable, self.line.wait, secure.status("x"))
        self.assertEqual(str(error), "no answer from https://a within 60 seconds")
        self.assertEqual(len(self.line.agent.asked), 2)

    def test_unknown_host_is_final_unless_the_server_has_answered_before(self) -> None:
        message = self.break_off(DNSLookupError("x"))
        self.assertIn(
            "cannot connect to http://localhost:8080: no address is known for the host localhost;"
            " check the URL, and the name service (DNS)",
            message,
        )
        self.assertEqual(self.attempts, 1)
        self.break_off(None, DNSLookupError("x"))
        self.assertEqual(self.attempts, 2)

    def test_server_may_be_an_ipv6_address_or_an_international_name(self) -> None:
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

            client = TwistedClient(server, reactor=Clock(), agent=Recorder())
            self.failureResultOf(Deferred.fromCoroutine(client.status("x")), Unavailable)
            self.assertEqual(asked, [sent + b"evaluation/x"])

    def test_encodings(self) -> None:
        """A body compressed more than once is not decoded: 1 KiB of it may be 1 GiB."""
        once = gzip.compress(b'{"state":"running"}')
        for encoding, body in ((b"gzip", once), (b"gzip, gzip", gzip.compress(once))):

            @implementer(IAgent, IResponse)
            class Encoded:
                """An agent, and its response."""

                code = 200
                headers = Headers({"Content-Encoding": [encoding]})
                sent = body

                def request(self, *_: object) -> Deferred[Any]:
                    return succeed(self)

                def deliverBody(self, protocol: Any) -> None:
                    protocol.dataReceived(self.sent)
                    protocol.connectionLost(Failure(ResponseDone()))

            client = TwistedClient(
                "http://a", reactor=Clock(), agent=Encoded(), request_backoff=Backoff(1, 0, 0)
            )
            asked = Deferred.fromCoroutine(client.status("x"))
            if encoding == b"gzip":
                self.assertEqual(self.successResultOf(asked), {"state": "running"})
            else:
                self.failureResultOf(asked, Unavailable)

    def test_connection_may_take_as_long_as_the_step_allows(self) -> None:
        limits: list[Any] = []

        def make_agent(_: object, **settings: object) -> BreakingAgent:
            limits.append(settings["connectTimeout"])
            return self.line.agent

        self.patch(twisted_client, "Agent", make_agent)
        client = TwistedClient("http://a", reactor=self.line.service.reactor)
        for seconds in (5, 30):
            send = HttpRequest("GET", "http://a/health", connect_timeout=seconds)
            self.line.wait(client.execute_step(send))
        self.assertEqual(limits, [5, 30])

    def test_connect_errors_use_the_words_of_the_system(self) -> None:
        for error, words, refused in (
            (ConnectionRefused(111, "Connection refused"), "connection refused", True),
            (NoRouteError(113, "No route to host"), "no route to host", False),
            (ConnectError(string="out of sockets"), "out of sockets", False),
        ):
            message = self.break_off(error)
            self.assertTrue(message.startswith("cannot connect to http://localhost:8080: "))
            self.assertTrue(message.endswith(words), message)
            self.assertEqual((self.attempts, self.refused), (1 if refused else 2, refused))

    def test_impossible_host_name_is_refused_without_a_request(self) -> None:
        client = TwistedClient(
            "http://a..b", reactor=self.line.service.reactor, agent=self.line.agent
        )
        error = self.assertRaises(Unavailable, self.line.wait, client.status("x"))
        self.assertIn("http://a..b: ", str(error))
        self.assertEqual(self.line.agent.asked, [])
