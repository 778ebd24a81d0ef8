"""`web.lists`: `GET /evaluations` over several daemons, each of which is asked in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import msgspec
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionRefusedError as ConnectionRefused
from twisted.internet.interfaces import IProtocol
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import ResponseDone
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IBodyProducer
from zope.interface import implementer

from tawebeval.config import CallerSettings, Configuration, ServiceSettings
from tawebeval.core.hosts import HostPolicy, IPAddress, ServerAddress
from tawebeval.core.tokens import generate_token
from tawebeval.errors import ServerBusy
from tawebeval.pinned_agent import CheckedResolver, PinnedAgent, ResponseSizeLimit
from tawebeval.web import lists
from tawebeval.web.lists import EvaluationLists, make_evaluation_lists
from tests.cases import described
from tests.fakes.clients import MULTIPART, Answer, Connection, Service, form, parts
from tests.fakes.resolver import FakeResolver

NAMES = ("a", "b", "c")
URLS = {name: f"http://{name}.example:8080" for name in NAMES}


@attrs.frozen
class MadeResponse:
    """A response out of nothing."""

    code: int
    body: bytes

    @property
    def length(self) -> int:
        return len(self.body)

    def deliverBody(self, protocol: IProtocol) -> None:
        protocol.dataReceived(self.body)
        protocol.connectionLost(Failure(ResponseDone()))


@implementer(IAgent)
@attrs.define
class DirectAgent:
    """Hands requests to the site of a service; or does what `fates` has for the host."""

    services: dict[str, Service]
    fates: dict[str, Callable[[], Deferred[Any]]]
    asked: list[tuple[str, Headers]] = attrs.field(factory=list)

    def request(
        self,
        method: bytes,
        uri: bytes,
        headers: Headers | None = None,
        bodyProducer: IBodyProducer | None = None,  # noqa: N803  (Twisted's name)
    ) -> Deferred[Any]:
        assert headers is not None
        url = uri.decode()
        name = url.removeprefix("http://").partition(".")[0]
        self.asked.append((url, headers))
        if name in self.fates:
            return self.fates[name]()
        connection = self.services[name].connect()
        pairs = {key.decode(): values[0].decode() for key, values in headers.getAllRawHeaders()}
        connection.request(f"{method.decode()} /{url.split('/', 3)[3]}", **pairs)
        answer = connection.answer()
        return succeed(MadeResponse(answer.status, answer.body))


class SeveralTestCase(SynchronousTestCase):
    """Three services with the same tokens, of which each knows the others."""

    def setUp(self) -> None:
        made = {name: generate_token(name, os.urandom) for name in ("alice", "bob")}
        self.tokens = {name: token for name, (token, _) in made.items()}
        self.file = Path(self.mktemp())
        self.file.write_text("\n".join(line for _, line in made.values()))
        self.reactor = MemoryReactorClock()
        self.services = {name: self.make_service(name) for name in NAMES}
        self.fates: dict[str, Callable[[], Deferred[Any]]] = {}
        self.agent = DirectAgent(self.services, self.fates)
        for service in self.services.values():
            self.connect_peers(service)

    def make_service(self, name: str, **changes: Any) -> Service:
        configuration = Configuration(
            service=ServiceSettings(name=name, peers=URLS),
            callers=CallerSettings(**{"requests_per_minute": 0, **changes}),
        )
        root = Path(self.mktemp()).resolve()
        service = Service(
            root, configuration, queued=1000, reactor=self.reactor, tokens=self.file,
            random=os.urandom,
        )  # fmt: skip
        self.addCleanup(service.close)
        return service

    def connect_peers(self, service: Service) -> None:
        policy = HostPolicy(allowed_private_networks=("0.0.0.0/0",))
        resolver = CheckedResolver(policy, FakeResolver(["10.0.0.2"]), self.reactor)
        service.context.evaluation_lists = EvaluationLists(
            service.registry, self.reactor, resolver, lambda *_: self.agent
        )

    def evaluate(self, name: str, caller: str = "alice", **fields: bytes) -> str:
        connection = self.services[name].connect()
        connection.request(
            "POST /evaluate",
            form(parts(**fields)),
            Content_Type=MULTIPART,
            Authorization=f"Bearer {self.tokens[caller]}",
        )
        self.reactor.advance(1)
        identifier: str = connection.answer().json()["evaluation_id"]
        return identifier

    def send(self, name: str, query: str = "", caller: str = "alice", **more: str) -> Connection:
        connection = self.services[name].connect()
        headers = {"Authorization": f"Bearer {self.tokens[caller]}", **more}
        connection.request(f"GET /evaluations{query}", **headers)
        return connection

    def ask(self, name: str, query: str = "", status: int = 200, **more: str) -> Answer:
        answer = self.send(name, query, **more).answer()
        self.assertEqual(answer.status, status, answer.body)
        pairs = {key.lower(): value for key, value in answer.headers.items()}
        described.check("GET", "/evaluations", Answer(answer.status, pairs, answer.body))  # type: ignore[arg-type]
        return answer

    def list_all(self, *names: str, query: str = "") -> list[str]:
        """Return the identifiers of a list whose parts come from these daemons by turns."""
        found: list[str] = []
        after = ""
        for turn in range(100):
            name = names[turn % len(names)]
            listing = self.ask(name, f"?after={after}{query}").json()
            self.assertEqual(listing["begin"], after or None)
            found += [one["evaluation_id"] for one in listing["data"]]
            after = listing["end"]
            if after is None:
                self.assertEqual(listing["away"], [])
                return found
        raise AssertionError("the list has no end")


class JointListTests(SeveralTestCase):
    def test_any_daemon_lists_the_evaluations_of_all_in_order(self) -> None:
        mine = [self.evaluate(name) for name in ("a", "b", "c", "a", "b")]
        theirs = self.evaluate("b", "bob")
        for name in NAMES:
            listing = self.ask(name).json()
            self.assertEqual([one["evaluation_id"] for one in listing["data"]], mine)
            self.assertEqual((listing["end"], listing["away"]), (None, []))
        (one,) = self.ask("c", caller="bob").json()["data"]
        self.assertEqual(one["evaluation_id"], theirs)

    def test_list_filter_applies_to_every_daemon(self) -> None:
        wanted = [self.evaluate(name, **{"metadata[team]": b"x y"}) for name in NAMES]
        self.evaluate("b")
        self.assertEqual(self.list_all("a", query="&metadata[team]=x+y"), wanted)
        self.assertIn("state: 'x' is no state", self.ask("a", "?state=x", 400).json()["detail"])

    def test_daemon_asked_by_a_peer_lists_own_evaluations_and_asks_no_other_peer(self) -> None:
        self.evaluate("a")
        mine = [self.evaluate("b") for _ in range(3)]
        listing = self.ask("b", Tawebeval_Own_List="2").json()
        self.assertEqual([one["evaluation_id"] for one in listing["data"]], mine[:2])
        self.assertEqual(set(listing), {"daemon", "begin", "end", "data"})
        self.assertEqual(listing["daemon"], "b")
        self.assertEqual(self.agent.asked, [])
        rest = self.ask("b", f"?after={listing['end']}", Tawebeval_Own_List="100").json()
        self.assertEqual([one["evaluation_id"] for one in rest["data"]], mine[2:])
        for value in ("0", "x", "-1", "", "101"):
            self.ask("b", status=400, Tawebeval_Own_List=value)

    def test_daemon_without_peers_lists_only_its_own_evaluations(self) -> None:
        context = self.services["a"].registry.context
        alone = msgspec.structs.replace(context.configuration, service=ServiceSettings(name="a"))
        self.evaluate("b")
        context.configuration = alone  # as a reload does
        self.assertEqual(self.ask("a").json(), {"begin": None, "end": None, "data": []})

    def test_foreign_or_stale_cursor_is_refused(self) -> None:
        for name in NAMES:
            for _ in range(34):
                self.evaluate(name)
        end = self.ask("a").json()["end"]
        for name in ("b", "a"):
            self.services[name] = self.make_service(name)  # which has lost its evaluations
            self.connect_peers(self.services[name])
            for asked in NAMES:
                problem = self.ask(asked, f"?after={end}", 400).json()
                self.assertIn("begin again without `after`", problem["detail"])
        alone = self.ask("c", Tawebeval_Own_List="1").json()["end"]
        for cursor in (alone, "d", "a_a", "end", "1"):
            self.ask("c", f"?after={cursor}", 400)
            self.assertEqual(self.ask("c", f"?after=a_b_c-{alone}").status, 200)


class UnavailablePeerTests(SeveralTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.mine = [self.evaluate(name) for name in ("a", "b", "c")]
        self.events: list[Any] = []
        globalLogPublisher.addObserver(self.events.append)
        self.addCleanup(globalLogPublisher.removeObserver, self.events.append)

    @property
    def warnings(self) -> list[str]:
        return [
            event["reason"] for event in self.events if "left out" in event.get("log_format", "")
        ]

    def list_without(self, fate: Callable[[], Deferred[Any]]) -> None:
        """Hold that a list of a is without b, but whole besides."""
        self.fates["b"] = fate
        listing = self.ask("a").json()
        self.assertEqual(listing["away"], ["b"])
        found = [one["evaluation_id"] for one in listing["data"]]
        self.assertEqual(found, [self.mine[0], self.mine[2]])
        self.assertEqual(listing["end"], "a_c")

    def test_list_leaves_out_a_stopped_daemon_until_it_is_back(self) -> None:
        self.list_without(lambda: fail(ConnectionRefused()))
        (reason,) = self.warnings
        self.assertIn("cannot connect to b.example: connection was refused", reason)
        last = self.ask("a", "?after=a_c").json()
        self.assertEqual(last, {"begin": "a_c", "end": None, "data": [], "away": ["b"]})
        del self.fates["b"]
        found = self.ask("c", "?after=a_c").json()
        self.assertEqual([one["evaluation_id"] for one in found["data"]], [self.mine[1]])
        self.assertEqual((found["end"], found["away"]), (None, []))

    def test_invalid_answer_of_a_peer_is_left_out_and_logged_once(self) -> None:
        for status, body, reason in (
            (200, b"<html>", "the answer is not a list of evaluations"),
            (200, b'{"daemon":"c","end":null,"data":[]}', "the answer is of the daemon 'c'"),
            (302, b"", "status 302"),
            (401, b"", "status 401; are its callers.tokens the same?"),
            (503, b"", "status 503"),
        ):
            made = MadeResponse(status, body)
            self.list_without(lambda made=made: succeed(made))  # type: ignore[misc]
            self.list_without(lambda made=made: succeed(made))  # type: ignore[misc]
            self.assertEqual(self.warnings, [reason])
            del self.fates["b"]
            self.ask("a")
            self.events.clear()

    def test_list_leaves_out_the_serving_daemon_if_its_disk_does_not_answer(self) -> None:
        registry = self.services["a"].context.registry
        busy = mock.AsyncMock(side_effect=ServerBusy("the disk does not answer", 5))
        with mock.patch.object(registry, "lister", mock.Mock(list_evaluations=busy)):
            self.assertEqual(self.ask("a").json()["away"], ["a"])

    def test_defect_leaves_one_daemon_out_of_the_list(self) -> None:
        self.list_without(lambda: fail(ZeroDivisionError()))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(self.services["a"].context.evaluation_lists.joint_lists_budget.used, 0)

    def test_peer_without_an_answer_in_two_seconds_is_left_out(self) -> None:
        cancelled: list[Any] = []
        self.fates["b"] = lambda: Deferred(cancelled.append)
        asked = self.send("a")
        self.assertEqual(asked.received, b"")
        self.reactor.advance(lists.PEER_TIMEOUT)
        self.assertEqual(asked.answer().json()["away"], ["b"])
        self.assertEqual(len(cancelled), 1)
        self.assertEqual(self.warnings, ["no answer within 2 seconds"])
        del self.fates["b"]
        self.assertEqual(self.ask("a").json()["away"], [])

    def test_peer_that_answers_429_is_left_out_without_a_warning(self) -> None:
        self.list_without(lambda: succeed(MadeResponse(429, b"")))
        self.assertEqual(self.warnings, [])

    def test_cursor_that_a_peer_refuses_is_400(self) -> None:
        for _ in range(34):
            for name in NAMES:
                self.evaluate(name)
        end = self.ask("a").json()["end"]
        self.fates["b"] = lambda: succeed(MadeResponse(400, b""))
        self.ask("a", f"?after={end}", 400)
        self.assertEqual(self.warnings, [])

    def test_concurrent_joint_lists_are_limited_per_caller_and_in_total(self) -> None:
        budget = self.services["a"].context.evaluation_lists.joint_lists_budget
        waiting: list[Deferred[Any]] = []

        def wait() -> Deferred[Any]:
            waiting.append(Deferred())
            return waiting[-1]

        self.fates["b"] = wait
        for bound, status in (("caller_quota", 429), ("total", 503)):
            with mock.patch.object(budget, bound, 2):
                first, second = self.send("a"), self.send("a")
                refused = self.ask("a", status=status)
                self.assertEqual(refused.headers["Retry-After"], "1")
                self.assertIn("too many lists over all daemons", refused.json()["detail"])
                first.lose()  # which ends its list
                third = self.send("a")
                del waiting[0]  # it is cancelled
                while waiting:
                    waiting.pop().callback(MadeResponse(503, b""))
                for answered in (second, third):
                    self.assertEqual(answered.answer().json()["away"], ["b"])
            self.assertEqual(budget.used, 0)


class RequestTests(SeveralTestCase):
    def test_request_to_a_peer_carries_the_token_but_no_other_client_header(self) -> None:
        self.ask("a", "?state=failed&other=1", Cookie="x=1", X_Forwarded_For="10.0.0.1")
        urls = [url for url, _ in self.agent.asked]
        query = "/evaluations?state=failed"
        self.assertEqual(urls, [f"{URLS['b']}{query}", f"{URLS['c']}{query}"])
        for _, headers in self.agent.asked:
            pairs = {key.decode().lower(): values for key, values in headers.getAllRawHeaders()}
            self.assertEqual(pairs["authorization"], [f"Bearer {self.tokens['alice']}".encode()])
            self.assertEqual(pairs["tawebeval-own-list"], [b"33"])
            self.assertEqual(set(pairs) & {"cookie", "x-forwarded-for", "origin"}, set())

    def test_unauthorized_request_is_not_sent_to_peers(self) -> None:
        connection = self.services["a"].connect()
        connection.request("GET /evaluations")
        self.assertEqual(connection.answer().status, 401)
        self.assertEqual(self.agent.asked, [])

    def test_size_limit_of_a_peer_answer_grows_with_the_number_of_entries(self) -> None:
        limits: list[ResponseSizeLimit] = []
        service = self.services["a"]
        made = make_evaluation_lists(service.registry, FakeResolver(["10.0.0.9"]), self.reactor)
        make = made._agent

        def agent(
            server: ServerAddress, addresses: Sequence[IPAddress], limit: ResponseSizeLimit
        ) -> IAgent:
            limits.append(limit)
            pinned = make(server, addresses, limit)
            self.assertIsInstance(pinned, PinnedAgent)
            return pinned

        made._agent = agent
        service.context.evaluation_lists = made
        asked = self.send("a")
        self.assertEqual(limits[0].remaining_bytes, 16 * 1024 + 33 * lists.MAX_LIST_ENTRY_BYTES)
        self.assertEqual(self.reactor.tcpClients[0][:2], ("10.0.0.9", 8080))
        self.reactor.advance(lists.PEER_TIMEOUT)
        self.assertEqual(asked.answer().json()["away"], ["b", "c"])
