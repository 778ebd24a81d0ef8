"""The daemon behind HAProxy."""

from __future__ import annotations

from typing import Any

from tests.integration.harness import until
from tests.integration.proxies import BELOW, HAProxy, HAProxyBeforeSeveral, ImpatientHAProxy
from tests.integration.proxy_case import (
    AddressTests,
    FollowingTests,
    Http2RefusalTests,
    Http2Tests,
    PathTests,
    ProxyTestCase,
    StreamTests,
    SurfaceTests,
    lacking,
    settings,
)
from tests.integration.raw import Connection, chunked, head_of, part
from tests.integration.uploads import MIB


class RefusalTests:
    async def test_broken_body_is_answered_with_a_problem(self: Any) -> None:
        head = head_of(None, "Transfer-Encoding: chunked", target=f"{self.base_path}/evaluate")
        with Connection(self.proxy.port) as connection:
            connection.send(
                head + chunked(part("submission[a]", b"b" * MIB), MIB).removesuffix(b"0\r\n\r\n")
            )
            await until(lambda: self.arrived() > 0, "a part of it is there")
            connection.ask(b"no chunk\r\n").problem(400)


class HAProxyTests(
    StreamTests, SurfaceTests, Http2Tests, RefusalTests, Http2RefusalTests, ProxyTestCase
):
    skip = lacking(HAProxy)
    proxy_type = HAProxy
    configuration = settings()


class HAProxyBelowTests(PathTests, ProxyTestCase):
    skip = lacking(HAProxy)
    proxy_type = HAProxy
    below = True
    configuration = settings(BELOW)


class HAProxyImpatientTests(ProxyTestCase):
    skip = lacking(ImpatientHAProxy)
    proxy_type = ImpatientHAProxy
    configuration = settings()

    async def test_slow_daemon_is_answered_with_a_504_document(self) -> None:
        identifier = await self.begin_by(self.client, "exec sleep 600")
        answer = await self.plain.get(f"/evaluation/{identifier}/events?wait=20")
        answer.problem(504)
        self.assertEqual(answer.header("Retry-After"), "5")


class HAProxyBeforeSeveralTests(FollowingTests, AddressTests, ProxyTestCase):
    """HAProxy before several daemons. All are the same one here; `test_several` has three."""

    skip = lacking(HAProxyBeforeSeveral)
    proxy_type = HAProxyBeforeSeveral
    configuration = settings()
    daemon_name = "a"

    def upstream(self) -> str:
        return " ".join([super().upstream()] * 3)
