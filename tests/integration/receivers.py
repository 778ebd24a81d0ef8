"""Receivers of callbacks: real servers in the test's process, on 127.0.0.1."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import attrs
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.ssl import Certificate, KeyPair, PrivateCertificate
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

    A status of 0 is none at all. Over TLS with a certificate.
    """

    isLeaf = True  # noqa: N815  (Twisted's name)

    def __init__(self, *statuses: int, certificate: PrivateCertificate | None = None) -> None:
        super().__init__()
        self.statuses = list(statuses)
        self.posts: list[Post] = []
        self.location = ""
        site = Site(self)
        listening: Any = reactor
        if certificate is None:
            self._port = listening.listenTCP(0, site, interface="127.0.0.1")
        else:
            self._port = listening.listenSSL(0, site, certificate.options(), interface="127.0.0.1")
        scheme = "http" if certificate is None else "https"
        self.port = self._port.getHost().port
        self.url = f"{scheme}://127.0.0.1:{self.port}/hook?key=s3cret"
        self._open: set[Any] = set()

    def render(self, request: Any) -> Any:
        """Note the request, and answer."""
        headers = {
            name.decode().lower(): values[0].decode()
            for name, values in request.requestHeaders.getAllRawHeaders()
        }
        self.posts.append(Post(request.uri.decode(), headers, request.content.read()))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if not status:
            self._open.add(request.channel.transport)
            request.notifyFinish().addErrback(lambda _: None)
            return 1  # NOT_DONE_YET
        request.setResponseCode(status)
        if self.location:
            request.setHeader("Location", self.location)
        return b"thank you"

    def stop(self) -> Deferred[None]:
        """Listen no more, and drop who still waits."""
        for transport in self._open:
            transport.abortConnection()
        stopped: Deferred[None] = self._port.stopListening()
        return stopped


class Babbler(Protocol):
    """Says something over and over, whatever it is asked."""

    words = b""
    first = b""

    def connectionMade(self) -> None:
        transport: Any = self.transport
        transport.write(self.first)
        transport.registerProducer(self, False)

    def resumeProducing(self) -> None:
        """Go on."""
        transport: Any = self.transport
        transport.write(self.words * 100)

    def stopProducing(self) -> None:
        """Do nothing: the connection is gone."""


def babble(first: bytes, words: bytes) -> Any:
    """Return the port of a server that says `first`, and then `words` without end."""

    class Babbling(Babbler):
        pass

    Babbling.first, Babbling.words = first, words
    listening: Any = reactor
    return listening.listenTCP(0, Factory.forProtocol(Babbling), interface="127.0.0.1")


def make_certificate(name: str, folder: Path) -> tuple[PrivateCertificate, Path]:
    """Return a certificate for a host that has signed itself, and the file of it to trust."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    path = folder / f"{name}.pem"
    path.write_bytes(pem)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    pair = KeyPair.load(private, format=1)  # PEM
    return PrivateCertificate.fromCertificateAndKeyPair(Certificate.loadPEM(pem), pair), path
