"""`webhooks.deliveries`: the result of one attempt; the agent that is pinned to addresses."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from socket import EAI_AGAIN, gaierror
from typing import Any

from OpenSSL.SSL import Error as TlsError
from service_identity import VerificationError
from treq.testing import RequestTraversalAgent
from twisted.internet.address import IPv4Address
from twisted.internet.defer import CancelledError, Deferred, fail
from twisted.internet.error import (
    ConnectError,
    ConnectingCancelledError,
    ConnectionLost,
    NoRouteError,
    TCPTimedOutError,
)
from twisted.internet.task import Clock, deferLater
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import (
    BrowserLikePolicyForHTTPS,
    RequestTransmissionFailed,
    ResponseFailed,
    ResponseNeverReceived,
)
from twisted.web.http import datetimeToString
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IPolicyForHTTPS, IResponse
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET
from zope.interface import implementer

from tawebeval.config import CallbackSettings
from tawebeval.core.hosts import HostPolicy, IPAddress, ServerAddress
from tawebeval.deferreds import FairQueue
from tawebeval.errors import ForbiddenURLHost
from tawebeval.pinned_agent import (
    MAX_RESPONSE_BYTES,
    CachedPolicyForHTTPS,
    CheckedResolver,
    PinnedAgent,
    SystemResolver,
)
from tawebeval.webhooks.deliveries import (
    ATTEMPT_TIMEOUT,
    AttemptResult,
    WebhookSender,
    make_callback_queue,
)
from tawebeval.webhooks.records import parse_callback_url
from tawebeval_client.backoff import RequestOutcome
from tests.cases.secrets import OLD, format_secret
from tests.fakes.resolver import FakeResolver
from tests.fakes.world import EPOCH
from tests.webhooks.test_deliveries import end_all_deliveries

URL = "http://receiver.example/hook?key=1"
HEAD = b"HTTP/1.1 200 OK\r\n"


class Receiver(Resource):
    isLeaf = True  # noqa: N815  (Twisted's name)

    def __init__(self) -> None:
        super().__init__()
        self.status = 204
        self.headers: dict[str, str] = {}
        self.answer: Any = b""
        self.received: list[tuple[bytes, bytes, Headers, bytes]] = []

    def render(self, request: Any) -> Any:
        body = request.content.read()
        self.received.append((request.method, request.uri, request.requestHeaders, body))
        request.setResponseCode(self.status)
        for name, value in self.headers.items():
            request.setHeader(name, value)
        if self.answer is NOT_DONE_YET and self.status < 400:
            request.write(b"the first of many")
        return self.answer


@implementer(IAgent)
class Broken:
    def __init__(self, outcome: Callable[[], Deferred[Any]]) -> None:
        self._outcome = outcome

    def request(self, *_: Any, **__: Any) -> Deferred[Any]:
        return self._outcome()


class Transport(StringTransport):
    """Notes that it was aborted, and loses the connection by that."""

    aborted = False

    def abortConnection(self) -> None:
        self.aborted = True


@implementer(IPolicyForHTTPS)
class Policy:
    def __init__(self) -> None:
        self.asked: list[tuple[bytes, int]] = []

    def creatorForNetloc(self, hostname: bytes, port: int) -> Any:
        self.asked.append((hostname, port))
        return BrowserLikePolicyForHTTPS().creatorForNetloc(hostname, port)


class SenderTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.receiver = Receiver()
        self.agent: Any = RequestTraversalAgent(self.receiver)
        self.resolver = FakeResolver()
        self.policy = HostPolicy(settings_section="callbacks")
        self.reached: list[tuple[str, str]] = []

    def sender(self) -> WebhookSender:
        def agent(target: ServerAddress, addresses: Sequence[IPAddress]) -> Any:
            self.reached.append((target.host, str(addresses[0])))
            return self.agent

        return WebhookSender(
            CheckedResolver(self.policy, self.resolver, self.clock),
            agent,
            self.clock,
            lambda: EPOCH + self.clock.seconds(),
        )

    def post(self, url: str = URL) -> Deferred[AttemptResult]:
        sender = self.sender()
        posted = Deferred.fromCoroutine(
            sender.post_document(url, {"Webhook-Id": "evt_1"}, b'{"a": 1}', "alice")
        )
        if isinstance(self.agent, RequestTraversalAgent):
            self.agent.flush()
        return posted

    def result(self, url: str = URL) -> AttemptResult:
        return self.successResultOf(self.post(url))


class ExchangeTests(SenderTestCase):
    def test_document_arrives_with_type_and_headers(self) -> None:
        self.assertEqual(
            self.result(),
            AttemptResult(RequestOutcome.ACCEPTED, "the receiver answered with status 204"),
        )
        ((method, uri, headers, body),) = self.receiver.received
        self.assertEqual((method, uri, body), (b"POST", b"/hook?key=1", b'{"a": 1}'))
        for name, value in (
            *(("Content-Type", "application/json"), ("Content-Length", "8")),
            *(("Webhook-Id", "evt_1"), ("Host", "receiver.example")),
        ):
            self.assertEqual(headers.getRawHeaders(name), [value])
        self.assertIn("tawebeval/", (headers.getRawHeaders("User-Agent") or [""])[0])
        self.assertEqual(self.reached, [("receiver.example", "8.8.8.8")])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_outcome_follows_the_status_and_redirects_are_not_followed(self) -> None:
        self.receiver.headers = {"Location": "http://elsewhere.example/"}
        self.receiver.answer = b"x" * 100_000
        accepted, refused, retry = RequestOutcome
        outcomes = {200: accepted, 302: refused, 307: refused, 404: refused, 429: retry, 500: retry}
        for self.receiver.status, expected in outcomes.items():
            said = f"the receiver answered with status {self.receiver.status}"
            self.assertEqual(self.result(), AttemptResult(expected, said))
        self.assertEqual(len(self.receiver.received), 6)
        self.assertEqual({host for host, _ in self.reached}, {"receiver.example"})

    def test_url_is_requested_as_written(self) -> None:
        for path in ("/a%2Fb%20c?x=%41&&y;z=a+b=", "/a//../b?/?", "/:@!$&'()*,;="):
            self.result(f"http://receiver.example{path}")
            self.assertEqual(self.receiver.received[-1][1].decode(), path)

    def test_retry_after_is_seconds_or_a_date(self) -> None:
        self.receiver.status = 503
        for value, asked in (
            ("7", 7),
            ("soon", 0),
            (datetimeToString(EPOCH + 90).decode(), 90),
        ):
            self.receiver.headers = {"Retry-After": value}
            self.assertEqual(self.result().retry_after, asked, value)

    def test_attempt_cut_off_after_15_seconds_is_accepted_only_with_a_2xx_status(self) -> None:
        self.receiver.answer = NOT_DONE_YET
        for status, expected in (
            (500, AttemptResult(RequestOutcome.RETRY, "no answer within 15 seconds")),
            (200, AttemptResult(RequestOutcome.ACCEPTED, "the receiver answered with status 200")),
        ):
            self.receiver.status = status
            posted = self.post()
            self.clock.advance(14.9)
            self.assertNoResult(posted)
            self.clock.advance(0.1)
            self.assertEqual(self.successResultOf(posted), expected)

    def test_cancelled_attempt_is_accepted_if_its_2xx_status_has_come(self) -> None:
        self.receiver.answer = NOT_DONE_YET
        self.receiver.status = 500
        posted = self.post()
        posted.cancel()
        self.failureResultOf(posted, CancelledError)
        self.receiver.status = 200
        posted = self.post()
        posted.cancel()
        self.assertIs(self.successResultOf(posted).outcome, RequestOutcome.ACCEPTED)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class FailureTests(SenderTestCase):
    def test_forbidden_host_is_refused_and_an_unknown_host_is_retried(self) -> None:
        for answers in (["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::1"]):
            self.resolver = FakeResolver(answers)
            result = self.result()
            self.assertIs(result.outcome, RequestOutcome.REFUSED)
            self.assertIn("callbacks.private_networks", result.reason)
            self.assertNotIn(answers[-1], result.reason)
        self.assertIs(self.result("http://127.0.0.1/").outcome, RequestOutcome.REFUSED)
        self.policy = HostPolicy(["other.example"], settings_section="callbacks")
        self.assertIn("callbacks.allow_hosts", self.result().reason)
        self.policy = HostPolicy()
        self.resolver = FakeResolver([], gaierror(EAI_AGAIN, "Temporary failure"))
        for words in (
            "the host receiver.example does not exist",
            "host receiver.example failed: Temporary",
        ):
            result = self.result()
            self.assertIs(result.outcome, RequestOutcome.RETRY)
            self.assertIn(words, result.reason)
        self.assertEqual(self.reached, [])

    def test_host_name_is_looked_up_for_each_attempt(self) -> None:
        self.resolver = FakeResolver(["8.8.8.8"], ["8.8.4.4"], ["127.0.0.1"])
        verdicts = [self.result().outcome for _ in range(3)]
        self.assertEqual(
            verdicts, [RequestOutcome.ACCEPTED, RequestOutcome.ACCEPTED, RequestOutcome.REFUSED]
        )
        self.assertEqual([address for _, address in self.reached], ["8.8.8.8", "8.8.4.4"])

    def test_reason_of_a_failed_attempt_has_no_received_bytes(self) -> None:
        banner = [Failure(ValueError("SSH-2.0-secret"))]
        tls = [Failure(TlsError([("", "", "verify failed")]))]
        for error, words in (
            (ConnectError(string="no route"), "cannot connect to receiver.example: no route"),
            (ConnectError(), "cannot connect to receiver.example"),
            (ResponseFailed(banner), "incomplete or not HTTP"),
            (RequestTransmissionFailed(banner), "incomplete or not HTTP"),
            (ResponseNeverReceived(tls), "TLS failed"),
            (ResponseNeverReceived([Failure(VerificationError([]))]), "TLS failed"),
        ):
            self.agent = Broken(lambda error=error: fail(error))  # type: ignore[misc]
            result = self.result()
            self.assertIs(result.outcome, RequestOutcome.RETRY)
            self.assertIn(words, result.reason)
            self.assertNotIn("secret", result.reason)

    def test_host_that_is_no_idna_name_is_refused(self) -> None:
        for url in ("http://a-.example/", "http://a_b.example/", "http://xn--a.example/"):
            result = self.result(url)
            self.assertIs(result.outcome, RequestOutcome.REFUSED)
            self.assertIn("is not a valid name", result.reason)

    def test_reason_names_the_timeout_if_no_connection_is_made_in_time(self) -> None:
        error = ConnectingCancelledError(IPv4Address("TCP", "8.8.8.8", 80))
        self.agent = Broken(lambda: Deferred(lambda connecting: connecting.errback(error)))
        posted = self.post()
        self.clock.advance(15)
        self.assertIn("within 15 seconds", self.successResultOf(posted).reason)


class PinnedAgentTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.reactor: Any = MemoryReactorClock()
        self.policy = Policy()
        self.transport = Transport()

    def ask(
        self, url: str = "http://name.example/x?y=z", *addresses: str, **headers: str
    ) -> Deferred[IResponse]:
        target = parse_callback_url(url)
        pinned = list(map(ip_address, addresses or ["8.8.8.8"]))
        agent = PinnedAgent(self.reactor, self.policy, 15, target, pinned)
        sent = Headers({name: [value] for name, value in headers.items()})
        return agent.request(b"POST", url.encode(), sent, None)

    def connect(self) -> Any:
        protocol = self.reactor.tcpClients[0][2].buildProtocol(None)
        protocol.makeConnection(self.transport)
        return protocol

    def test_connection_goes_to_the_address_and_the_request_names_the_host(self) -> None:
        for url, address, port in (
            ("http://name.example/x", "8.8.8.8", 80),
            ("http://name.example:8080/x", "2001:4860::8888", 8080),
            ("https://name.example/x", "8.8.4.4", 443),
        ):
            self.ask(url, address)
            self.assertEqual(self.reactor.tcpClients[-1][:2], (address, port))
        self.assertEqual(self.policy.asked, [(b"name.example", 443)])
        self.connect()
        lines = self.transport.value().split(b"\r\n")
        self.assertEqual(lines[0], b"POST /x HTTP/1.1")
        self.assertIn(b"Host: name.example", lines)
        self.assertIn(b"Connection: close", lines)

    def test_next_address_is_tried_only_if_the_connection_failed(self) -> None:
        asked = self.ask("http://name.example/", "2606::1", "8.8.8.8", "2606::2")
        clients = self.reactor.tcpClients
        clients[0][2].clientConnectionFailed(None, Failure(NoRouteError()))
        self.assertEqual([one[:2] for one in clients], [("2606::1", 80), ("8.8.8.8", 80)])
        self.assertEqual([one[3] for one in clients], [5, 5])
        protocol = clients[1][2].buildProtocol(None)
        protocol.makeConnection(self.transport)
        protocol.connectionLost(Failure(ConnectionLost()))
        self.failureResultOf(asked, ResponseFailed)
        self.assertEqual(len(clients), 2)

    def test_last_connection_error_is_raised_and_no_address_is_tried_after_a_cancellation(
        self,
    ) -> None:
        asked = self.ask("http://name.example/", "2606::1", "8.8.8.8")
        for client, error in ((0, TCPTimedOutError()), (1, NoRouteError())):
            self.reactor.tcpClients[client][2].clientConnectionFailed(None, Failure(error))
        self.failureResultOf(asked, NoRouteError)
        asked = self.ask("http://name.example/", "2606::1", "8.8.8.8")
        asked.cancel()
        self.failureResultOf(asked, ConnectingCancelledError)
        self.assertEqual(len(self.reactor.tcpClients), 3)

    def test_certificate_policy_is_made_once_for_each_host(self) -> None:
        trust = CachedPolicyForHTTPS(self.policy)
        one = trust.creatorForNetloc(b"a.example", 443)
        self.assertIs(trust.creatorForNetloc(b"a.example", 443), one)
        self.assertIsNot(trust.creatorForNetloc(b"b.example", 443), one)
        self.assertEqual(self.policy.asked, [(b"a.example", 443), (b"b.example", 443)])

    def test_no_compressed_answer_is_requested(self) -> None:
        asked = self.ask(**{"Accept-Encoding": "gzip", "X-Own": "1"})
        protocol = self.connect()
        self.assertNotIn(b"accept-encoding", self.transport.value().lower())
        self.assertIn(b"X-Own: 1", self.transport.value())
        protocol.dataReceived(
            HEAD + b"Content-Encoding: gzip\r\nSet-Cookie: a=b\r\nRetry-After: 7\r\n"
            b"Content-Length: 0\r\n\r\n"
        )
        headers = self.successResultOf(asked).headers
        self.assertEqual(list(headers.getAllRawHeaders()), [(b"Retry-After", [b"7"])])

    def test_endless_answer_is_cut_off(self) -> None:
        for end in (b"", b"\r\n"):
            self.setUp()
            asked = self.ask()
            protocol = self.connect()
            protocol.dataReceived(HEAD + end)
            left = MAX_RESPONSE_BYTES - len(HEAD + end)
            line = b"X-Y: " + b"z" * 994 + b"\r\n"
            while left >= len(line):
                protocol.dataReceived(line)
                left -= len(line)
            protocol.dataReceived(line[:left])
            self.assertFalse(self.transport.aborted)
            protocol.dataReceived(b"z")
            self.assertTrue(self.transport.aborted)
            protocol.connectionLost(Failure(ConnectionLost()))
            if end:
                self.assertEqual(self.successResultOf(asked).code, 200)
            else:
                self.failureResultOf(asked, ResponseFailed)

    def test_connection_kept_open_is_aborted_in_time(self) -> None:
        self.ask()
        protocol = self.connect()
        protocol.dataReceived(HEAD + b"\r\n")
        self.reactor.advance(14.9)
        self.assertFalse(self.transport.aborted)
        self.reactor.advance(0.2)
        self.assertTrue(self.transport.aborted)
        protocol.connectionLost(Failure(ConnectionLost()))
        self.setUp()
        asked = self.ask()
        self.connect().connectionLost(Failure(ConnectionLost()))
        self.failureResultOf(asked, ResponseFailed)
        self.assertEqual(self.reactor.getDelayedCalls(), [])


class OpenTests(SynchronousTestCase):
    def test_hosts_and_networks_are_those_of_the_settings(self) -> None:
        reactor: Any = MemoryReactorClock()
        settings = CallbackSettings(
            allow_hosts=("8.8.8.8", "10.0.0.1", "10.1.0.1"), private_networks=("10.0.0.0/24",)
        )
        queue = make_callback_queue(settings, {}, FakeResolver(), reactor, bytes, lambda: EPOCH)
        sender = queue._sender
        for host, word in (
            ("1.1.1.1", "callbacks.allow_hosts"),
            ("10.1.0.1", "callbacks.private_networks"),
        ):
            error = self.assertRaises(ForbiddenURLHost, sender.check_url, f"http://{host}/")
            self.assertIn(word, str(error))
        for host in ("8.8.8.8", "10.0.0.1"):
            sender.check_url(f"http://{host}/")


class MinuteThreads:
    """Eight threads, each of which is busy for a minute with any call."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free = 8
        self.waiting: list[Deferred[None]] = []

    async def run_in_thread(self, call: Callable[[], object]) -> Sequence[IPAddress]:
        if not self.free:
            self.waiting.append(Deferred())
            await self.waiting[-1]
        self.free -= 1
        call()
        await deferLater(self.clock, 60)
        self.free += 1
        if self.waiting:
            self.waiting.pop(0).callback(None)
        return ()


class LookupTests(SynchronousTestCase):
    def test_slow_lookups_of_one_caller_do_not_delay_those_of_another(self) -> None:
        asked: list[str] = []
        self.patch(socket, "getaddrinfo", lambda host, *_, **__: asked.append(host) or ())
        secrets = Path(self.mktemp())
        secrets.write_text(f"alice {format_secret(OLD)}\nbob {format_secret(OLD)}")
        clock = MemoryReactorClock()
        threads: Any = MinuteThreads(clock)
        callbacks = make_callback_queue(
            CallbackSettings(secrets=str(secrets)),
            {},
            SystemResolver(threads, FairQueue(8, running_per_caller=4)),
            clock,
            lambda size: bytes(size - 2) + len(asked).to_bytes(2, "big"),
            clock.seconds,
        )

        def send(caller: str, host: str) -> None:
            callback = callbacks.create_callback(f"https://{host}/", caller)
            callback.webhook_id = host
            callbacks.start_delivery(callback, "some")

        for number in range(200):
            send("alice", f"host{number}.example")
        for _ in range(120):
            clock.advance(1)
        send("bob", "bob.example")
        for _ in range(ATTEMPT_TIMEOUT - 1):
            clock.advance(1)
        self.assertIn("bob.example", asked)
        end_all_deliveries(callbacks)
        for _ in range(60):  # no look-up may wake another while the garbage is collected
            clock.advance(60)
        self.assertEqual((threads.free, threads.waiting), (8, []))
