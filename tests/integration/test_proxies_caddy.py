"""The daemon behind Caddy."""

from __future__ import annotations

from tests.integration.proxies import BELOW, Caddy
from tests.integration.proxy_case import (
    FollowingTests,
    ProxyTestCase,
    SurfaceTests,
    lacking,
    settings,
)

# As docs/operations.md has it, for Caddy leaves large buffers to the kernel.
BUFFERS = "[buffers]\nevaluation = 16_777_216\n"


class CaddyTests(FollowingTests, SurfaceTests, ProxyTestCase):
    """Caddy."""

    skip = lacking(Caddy)
    proxy_type = Caddy
    configuration = settings(more=BUFFERS)


class CaddyBelowTests(FollowingTests, SurfaceTests, ProxyTestCase):
    """Caddy, below a path."""

    skip = lacking(Caddy)
    proxy_type = Caddy
    below = True
    configuration = settings(BELOW, more=BUFFERS)
