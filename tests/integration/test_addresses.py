"""Hosts with several addresses of which one works, over real sockets of both families."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from twisted.internet import reactor
from twisted.trial.unittest import TestCase
from twisted.web.client import BrowserLikePolicyForHTTPS

from tawebeval.core.backoff import RequestOutcome
from tawebeval.core.form import Repository
from tawebeval.core.hosts import HostPolicy
from tawebeval.pinned_agent import CheckedResolver, PinnedAgent
from tawebeval.webhooks.deliveries import WebhookSender
from tests.cases.patience import PATIENCE
from tests.fakes.resolver import FakeResolver
from tests.integration.bare_repositories import BareRepositoryCase
from tests.integration.receivers import Receiver
from tests.integration.repositories import HttpServer

BOTH = ["::1", "127.0.0.1"]
LOOPBACK = HostPolicy(allowed_private_networks=("127.0.0.0/8", "::1/128"))


@contextmanager
def accept_nothing(address: str, port: int) -> Iterator[None]:
    """Listen at an address, with a full queue: connections neither succeed nor fail."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        listener.bind((address, port))
        listener.listen(0)
        for _ in range(3):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((address, port))
        yield


def make_resolver(addresses: Sequence[str]) -> CheckedResolver:
    """Return a resolver with these addresses for every host."""
    return CheckedResolver(LOOPBACK, FakeResolver(list(addresses)), reactor)


class WebhookTests(TestCase):
    async def post(self, addresses: Sequence[str], port: int, timeout: float) -> RequestOutcome:
        agent = partial(PinnedAgent, reactor, BrowserLikePolicyForHTTPS(), timeout)
        sender = WebhookSender(make_resolver(addresses), agent, reactor, lambda: 0.0, timeout)
        result = await sender.post_document(f"http://receiver.example:{port}/", {}, b"{}")
        return result.outcome

    async def test_next_address_after_a_refused_one(self) -> None:
        receiver = Receiver(204)
        self.addCleanup(receiver.stop)
        outcome = await self.post(BOTH, receiver.port, PATIENCE)
        self.assertIs(outcome, RequestOutcome.ACCEPTED)
        self.assertEqual(receiver.posts[0].headers["host"], f"receiver.example:{receiver.port}")

    async def test_next_address_after_a_silent_one(self) -> None:
        receiver = Receiver(204)
        self.addCleanup(receiver.stop)
        with accept_nothing("127.0.0.2", receiver.port):
            outcome = await self.post(["127.0.0.2", "127.0.0.1"], receiver.port, 6)
        self.assertIs(outcome, RequestOutcome.ACCEPTED)


class GitTests(BareRepositoryCase):
    def setUp(self) -> None:
        self.make(make_resolver(BOTH))
        self.source.write("file", "content")
        self.commit = self.source.commit()

    async def test_http_takes_the_address_that_works(self) -> None:
        server = HttpServer(self.folder)
        self.addCleanup(server.stop)
        url = server.url.replace("127.0.0.1", "pinned.invalid") + "/source/.git"
        fetched = await self.bare.fetch_commit(Repository(url), self.commit)
        self.assertEqual(fetched.oid, self.commit)
