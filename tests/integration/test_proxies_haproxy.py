"""The daemon behind HAProxy."""

from __future__ import annotations

from tests.integration.proxies import BELOW, HAProxy
from tests.integration.proxy_case import (
    FollowingTests,
    ProxyTestCase,
    SurfaceTests,
    lacking,
    settings,
)


class HAProxyTests(FollowingTests, SurfaceTests, ProxyTestCase):
    """HAProxy."""

    skip = lacking(HAProxy)
    proxy_type = HAProxy
    configuration = settings()


class HAProxyBelowTests(FollowingTests, SurfaceTests, ProxyTestCase):
    """HAProxy, below a path."""

    skip = lacking(HAProxy)
    proxy_type = HAProxy
    below = True
    configuration = settings(BELOW)
