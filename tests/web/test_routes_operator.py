"""`web.routes`: what the operator's programs ask."""

from __future__ import annotations

from hashlib import sha256

from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.interfaces import IAddress

from tawebeval import __version__
from tawebeval.web.auth import Authentication, RateLimit
from tawebeval.web.context import HealthAndMetrics
from tawebeval.web.routes import METRICS_MEDIA_TYPE
from tests.cases.polls import TOKENS
from tests.cases.web import WebTestCase
from tests.fakes.clients import Answer
from tests.fakes.world import read_again

TOKEN = "tawebeval_metrics"


class OperationsTestCase(WebTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.obstacles: list[str] = []
        self.let_read_metrics(None)

    def let_read_metrics(self, authentication: Authentication | None) -> None:
        """Let those read the metrics whom `authentication` knows; None: this machine."""
        metrics = HealthAndMetrics(lambda: self.obstacles, lambda: b"some 1\n", authentication)
        self.set("health_and_metrics", metrics)

    def set(self, name: str, value: object) -> None:
        object.__setattr__(self.service.context, name, value)

    def metrics(self, status: int, address: IAddress | None = None, **headers: str) -> Answer:
        connection = self.service.connect(address)
        connection.request("GET /metrics", **headers)
        answer = connection.answer()
        self.assertEqual(answer.status, status, answer.body)
        if status == 200:
            self.assertEqual(answer.body, b"some 1\n")
            self.assertEqual(answer.headers["Content-Type"], METRICS_MEDIA_TYPE.decode())
        else:
            self.assertEqual(answer.headers["Content-Type"], "application/problem+json")
            self.assertNotIn(b"some", answer.body)
        return answer


class HealthTests(OperationsTestCase):
    def test_health_is_200_whatever_is_wrong(self) -> None:
        self.obstacles.append("no disk")
        self.assertEqual(
            self.request("GET", "/health").json(), {"status": "ok", "version": __version__}
        )

    def test_ready_is_200(self) -> None:
        answer = self.request("GET", "/health/ready").json()
        self.assertEqual(answer, {"status": "ready", "version": __version__})

    def test_not_ready_is_503_with_the_reasons(self) -> None:
        self.obstacles += ["no disk", "no queue"]
        problem = self.request("GET", "/health/ready", 503).json()
        self.assertEqual(problem["reasons"], ["no disk", "no queue"])
        self.assertEqual(problem["detail"], "no disk; no queue")

    def test_health_needs_no_token(self) -> None:
        self.service.access.token_file = self.root / "callers"
        self.service.access.token_file.write_text(TOKENS)
        read_again(self.service.access)
        for path, status in (
            *(
                ("/health", 200),
                ("/health/ready", 200),
                ("/metrics", 200),
                ("//health//ready", 200),
            ),
            *(("/health/else", 401), ("/metrics/else", 401), ("/evaluations", 401)),
        ):
            connection = self.service.connect()
            connection.request(f"GET {path}")
            self.assertEqual(connection.answer().status, status, path)


class MetricsTests(OperationsTestCase):
    def test_metrics_are_for_programs_of_this_machine(self) -> None:
        for host in ("127.0.0.1", "127.8.8.8"):
            self.metrics(200, IPv4Address("TCP", host, 1))
        for host in ("::1", "::ffff:127.0.0.1"):
            self.metrics(200, IPv6Address("TCP", host, 1))
        self.metrics(403, IPv4Address("TCP", "192.0.2.7", 1))
        self.metrics(403, IPv6Address("TCP", "2001:db8::1", 1))
        self.metrics(403, IPv6Address("TCP", "fe80::1%eth0", 1))
        self.metrics(403, UNIXAddress(None))

    def test_metrics_are_collected_at_most_once_a_second(self) -> None:
        collected: list[int] = []

        def collect() -> bytes:
            collected.append(1)
            return b"some 1\n"

        self.set("health_and_metrics", HealthAndMetrics(collect_metrics=collect))
        for seconds, times in ((0.9, 1), (0.2, 1), (0.5, 2)):
            self.metrics(200)
            self.metrics(200)
            self.assertEqual(len(collected), times)
            self.service.reactor.advance(seconds)

    def test_metrics_are_not_for_clients_behind_a_local_proxy(self) -> None:
        for name in ("Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP", "Via"):
            self.metrics(403, **{name.replace("-", "_"): "x"})

    def test_metrics_are_not_for_pages_of_a_browser(self) -> None:
        self.metrics(200, Origin="http://localhost")
        self.metrics(403, Origin="https://evil.example")
        self.metrics(403, Origin="null")
        connection = self.service.connect()
        connection.send(b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        self.assertEqual(connection.answer().status, 403)
        connection.send(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n\r\n")
        self.assertEqual(connection.answer().status, 200)

    def test_metrics_with_tokens_are_for_their_holders_only(self) -> None:
        tokens = self.root / "tokens"
        tokens.write_text(f"prometheus sha256:{sha256(TOKEN.encode()).hexdigest()}\n")
        rate = RateLimit(0, self.service.reactor.seconds)
        self.let_read_metrics(Authentication(rate, tokens))
        far = IPv4Address("TCP", "192.0.2.7", 1)
        self.metrics(200, far, Authorization=f"Bearer {TOKEN}", X_Forwarded_For="x")
        answer = self.metrics(401, far, Authorization="Bearer tawebeval_other")
        self.assertEqual(answer.headers["WWW-Authenticate"], "Bearer")
        self.metrics(401)
