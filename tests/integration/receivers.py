"""Receivers of callbacks: real servers in the test's process, on 127.0.0.1."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.ssl import PrivateCertificate
from twisted.web.resource import Resource
from twisted.web.server import Site


@attrs.frozen
class Post:
    """What has arrived; headers have names in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes


class Receiver(Resource):
    """Notes what is posted, and answers with the next of `statuses`, of which the last stays.

    Over TLS with a certificate.
    """

    isLeaf = True  # noqa: N815  (Twisted's name)

    def __init__(self, *statuses: int, certificate: PrivateCertificate | None = None) -> None:
        super().__init__()
        self.statuses = list(statuses)
        self.posts: list[Post] = []
        site = Site(self)
        listening: Any = reactor
        if certificate is None:
            self._port = listening.listenTCP(0, site, interface="127.0.0.1")
        else:
            self._port = listening.listenSSL(0, site, certificate.options(), interface="127.0.0.1")
        scheme = "http" if certificate is None else "https"
        self.port = self._port.getHost().port
        self.url = f"{scheme}://127.0.0.1:{self.port}/hook?key=s3cret"

    def render(self, request: Any) -> Any:
        headers = {
            name.decode().lower(): values[0].decode()
            for name, values in request.requestHeaders.getAllRawHeaders()
        }
        self.posts.append(Post(request.uri.decode(), headers, request.content.read()))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        request.setResponseCode(status)
        return b"thank you"

    def stop(self) -> Deferred[None]:
        stopped: Deferred[None] = self._port.stopListening()
        return stopped
