"""`client.sync_client`: the client that blocks, over real connections and made ones."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from twisted.trial.unittest import SynchronousTestCase

from tawebeval_client import AsyncClient, Client, InvalidRequest, Refused, Unavailable
from tawebeval_client import http as http_module
from tawebeval_client import sync_client as values_module
from tawebeval_client.backoff import Backoff
from tawebeval_client.http import HttpRequest, SubmissionForm
from tests.cases.certificates import make_certificate
from tests.cases.patience import PATIENCE

ONCE = Backoff(1, 0, 0)
SOON = Backoff(3, 0, 0)
FIELDS: dict[str, Any] = {"repository": "u", "commit": "c" * 40, "evaluator_cmd": "x"}
STATUS = b'{"state":"running"}'


def without_proxies() -> dict[str, str]:
    """Return the environment without the proxies of this machine."""
    return {name: text for name, text in os.environ.items() if "proxy" not in name.lower()}


def answer(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    """Return a response with a body of JSON."""
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n"
    return head % (status, more, len(body)) + body


class Server:
    """A server that answers each connection by a function of the socket, in a thread of its own."""

    def __init__(self, *serve: Callable[[socket.socket], None]) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.accepted = 0
        self._serve = serve
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            serve = self._serve[min(self.accepted, len(self._serve) - 1)]
            self.accepted += 1
            threading.Thread(target=self._handle, args=(serve, connection), daemon=True).start()

    def _handle(self, serve: Callable[[socket.socket], None], connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            serve(connection)

    def close(self) -> None:
        """Accept no more."""
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()


def say(*responses: bytes) -> Callable[[socket.socket], None]:
    """Return what answers each request of a connection, the last one for ever."""

    def serve(connection: socket.socket) -> None:
        count = 0
        while read_head(connection):
            connection.sendall(responses[min(count, len(responses) - 1)])
            count += 1

    return serve


def read_head(connection: socket.socket) -> bytes:
    """Return the head of a request, empty at the end of the connection."""
    read = b""
    while not read.endswith(b"\r\n\r\n"):
        some = connection.recv(1)
        if not some:
            return b""
        read += some
    return read


def find_address(host: str, port: int, *_: object, **__: object) -> list[Any]:
    """Resolve only addresses, as a name service without names."""
    if not host[0].isdigit():
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]


def cut(connection: socket.socket) -> None:
    """Close the connection in the middle of a response."""
    read_head(connection)
    connection.sendall(answer(STATUS)[:-1])


def reset(connection: socket.socket) -> None:
    """Reset the connection in place of a response."""
    read_head(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def read_slowly(connection: socket.socket, on_end: Callable[[], object]) -> None:
    """Take a form of over 32 MiB in many small parts; call `on_end()` after these."""
    read_head(connection)
    left = 32 << 20
    while some := connection.recv(min(left, 1 << 16)):
        left -= len(some)
        if not left:
            on_end()
            break
        time.sleep(0.005)


def dribble(connection: socket.socket, *, head: bool) -> None:
    """Answer a byte at a time, for ever."""
    read_head(connection)
    rest = b"X: " if head else b"Transfer-Encoding: chunked\r\n\r\n"
    connection.sendall(b"HTTP/1.1 200 OK\r\n" + rest)
    while True:
        connection.sendall(b"X" if head else b"1\r\n \r\n")
        time.sleep(0.02)


class SyncClientTests(SynchronousTestCase):
    """`Client`."""

    def setUp(self) -> None:
        self.patch(os, "environ", without_proxies())

    def serve(self, *serve: Callable[[socket.socket], None]) -> Server:
        """Return a running server."""
        server = Server(*serve)
        self.addCleanup(server.close)
        return server

    def fail_request(self, server: str, **settings: Any) -> str:
        """Return the words of a request that fails."""
        with Client(server, request_backoff=SOON, **settings) as client:
            return str(self.assertRaises(Unavailable, client.status, "x"))

    def exchange(self, client: Client, request: HttpRequest) -> Any:
        """Return what comes of a request."""
        try:
            client.exchange(request).send(None)
        except StopIteration as end:
            return end.value

    def test_connection_is_reused_until_the_client_is_closed(self) -> None:
        server = self.serve(say(answer(STATUS)))
        client = Client(server.url)
        for _ in range(3):
            self.assertEqual(client.status("x"), {"state": "running"})
        self.assertEqual(server.accepted, 1)
        client.close()
        client.status("x")
        self.assertEqual(server.accepted, 2)
        client.close()

    def test_twenty_threads_can_use_one_client(self) -> None:
        server = self.serve(say(answer(STATUS)))
        found: list[Any] = []
        with Client(server.url) as client:

            def ask() -> None:
                found.append(client.status("x"))

            threads = [threading.Thread(target=ask) for _ in range(20)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE)
        self.assertEqual(found, [{"state": "running"}] * 20)

    def test_child_process_opens_its_own_connection(self) -> None:
        server = self.serve(say(answer(STATUS)))
        with Client(server.url) as client:
            client.status("x")
            child = os.fork()
            if child == 0:
                try:
                    os._exit(0 if client.status("x")["state"] == "running" else 1)
                finally:
                    os._exit(2)
            _, status = os.waitpid(child, 0)
            self.assertEqual(status, 0)
            self.assertEqual(server.accepted, 2)
            client.status("x")
            self.assertEqual(server.accepted, 2)

    def test_slow_response_ends_at_the_deadline_of_the_request(self) -> None:
        for head in (True, False):
            server = self.serve(lambda connection, head=head: dribble(connection, head=head))
            with Client(server.url) as client:
                begun = time.monotonic()
                outcome = self.exchange(client, HttpRequest("GET", f"{server.url}/", timeout=0.3))
                self.assertLess(time.monotonic() - begun, PATIENCE / 2)
            self.assertIn("within 0 seconds", outcome.message)

    def test_sending_a_form_to_a_slow_server_ends_at_the_deadline(self) -> None:
        self.patch(http_module, "_SLOWEST", 1 << 40)
        was_taken = threading.Event()
        server = self.serve(lambda connection: read_slowly(connection, was_taken.set))
        form = SubmissionForm({}, {"source": bytes(48 << 20)})
        with Client(server.url) as client:
            request = HttpRequest("POST", f"{server.url}/", form=form, timeout=0.3)
            outcome = self.exchange(client, request)
        self.assertIn("within 0 seconds", outcome.message)
        self.assertFalse(was_taken.is_set())

    def test_connection_has_a_time_limit_of_its_own(self) -> None:
        def time_out(request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectTimeout("x", request=request)

        client = Client("http://a", transport=httpx.MockTransport(time_out))
        for timeout, words in ((60, "within 5 seconds"), (2, "within 2 seconds")):
            outcome = self.exchange(
                client, HttpRequest("GET", "http://a/", timeout=timeout, connect_timeout=5)
            )
            self.assertIn(words, outcome.message)

    def test_response_body_over_the_limit_is_refused(self) -> None:
        self.patch(values_module, "MAX_RESPONSE_BODY", 1000)
        server = self.serve(say(answer(b" " * 2000)))
        self.assertIn("is larger than", self.fail_request(server.url))

    def test_gzip_is_decoded_once_and_other_encodings_are_refused(self) -> None:
        """A body may be compressed by gzip, once: 1 KiB compressed twice may be 1 GiB."""
        once = gzip.compress(STATUS)
        for encoding, body, words in (
            ("gzip", once, ""),
            ("gzip, gzip", gzip.compress(once), "the Content-Encoding 'gzip, gzip', not gzip"),
            ("br", once, "the Content-Encoding 'br', not gzip"),
        ):
            more = f"Content-Encoding: {encoding}\r\n".encode()
            server = self.serve(say(answer(body, more=more)))
            if words:
                self.assertIn(words, self.fail_request(server.url))
            else:
                with Client(server.url) as client:
                    self.assertEqual(client.status("x"), {"state": "running"})

    def test_each_failure_has_a_message_and_another_protocol_is_reported_at_once(self) -> None:
        def greet(connection: socket.socket) -> None:
            connection.sendall(b"SSH-2.0-\x1b[31m\r\n")
            while connection.recv(1 << 16):
                pass

        greeting = self.serve(greet)
        self.patch(socket, "getaddrinfo", find_address)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            refusing = f"http://127.0.0.1:{closed.getsockname()[1]}"
        for url, words in (
            (refusing, "connection refused"),
            ("http://nowhere.invalid", "no address is known for the host nowhere.invalid"),
            ("http://a..b", "check the URL"),
            (greeting.url, "does not speak HTTP; check the URL"),
            (self.serve(read_head).url, "broke: Server disconnected"),
            (self.serve(reset).url, "broke: connection reset by peer"),
            (self.serve(cut).url, "broke: peer closed connection without sending complete"),
            (self.serve(say(answer(b"{"))).url, "broke: unexpected answer: "),
        ):
            message = self.fail_request(url)
            self.assertIn(words, message)
            self.assertTrue(message.isprintable(), message)
        self.assertEqual(greeting.accepted, 1)

    def test_certificate_needs_the_right_host_and_a_trusted_authority(self) -> None:
        folder = Path(self.mktemp())
        folder.mkdir()
        certificate = make_certificate(folder, "localhost")
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(certificate)

        def serve(connection: socket.socket) -> None:
            with serving.wrap_socket(connection, server_side=True) as secure:
                say(answer(STATUS))(secure)

        address = self.serve(serve).url.replace("http", "https")
        named = address.replace("127.0.0.1", "localhost")
        self.patch(
            socket, "getaddrinfo", lambda _, port, *__, **___: find_address("127.0.0.1", port)
        )
        trusting = ssl.create_default_context(cafile=str(certificate))
        trusting.verify_flags &= ~ssl.VERIFY_X509_STRICT  # the default of Python 3.13
        self.assertIn("); if you trust it, set SSL_CERT_FILE to", self.fail_request(named))
        self.assertEqual(
            self.fail_request(address, tls=trusting),
            f"the certificate of {address} is for another host; check the URL",
        )

        async def ask(url: str) -> Any:
            async with AsyncClient(url, tls=trusting, request_backoff=ONCE) as client:
                return await client.status("x")

        with Client(named, tls=trusting) as client:
            self.assertEqual(client.status("x"), {"state": "running"})
        self.assertEqual(asyncio.run(ask(named)), {"state": "running"})
        error = self.assertRaises(Unavailable, asyncio.run, ask(address))
        self.assertIn("is for another host", str(error))

    def test_server_without_tls_is_reported(self) -> None:
        server = self.serve(lambda connection: connection.sendall(b"SSH-2.0\r\n" * 9))
        self.assertIn("does not speak TLS", self.fail_request(server.url.replace("http", "https")))

    def test_unusable_proxies_are_reported_without_their_passwords(self) -> None:
        for proxy, words in (
            ("socks5://127.0.0.1:1", "HTTP_PROXY"),
            ("other://127.0.0.1:1", "HTTP_PROXY"),
            ("http://[::1", "HTTP_PROXY"),
        ):
            self.patch(os, "environ", {**os.environ, "HTTP_PROXY": proxy, "NO_PROXY": ""})
            self.assertIn(words, self.fail_request("http://judge.example.org"))
        for proxy in ("http://me:secret@127.0.0.1:1", "127.0.0.1:1/"):
            variables = {"HTTP_PROXY": proxy, "NO_PROXY": "127.0.0.1"}
            self.patch(os, "environ", {**os.environ, **variables})
            message = self.fail_request("http://judge.example.org")
            words = (
                "cannot connect to the proxy 127.0.0.1:1 for http://judge.example.org; check HTTP"
            )
            self.assertIn(words, message)
            message = self.fail_request("http://127.0.0.1:1")
            self.assertIn("cannot connect to http://127.0.0.1:1: connection refused", message)
        refusing = self.serve(say(b"HTTP/1.1 407 Authenticate\r\nContent-Length: 0\r\n\r\n"))
        self.patch(os, "environ", {**os.environ, "HTTP_PROXY": "", "HTTPS_PROXY": refusing.url})
        message = self.fail_request("https://judge.example.org", tls=ssl.create_default_context())
        self.assertIn("the proxy for https://judge.example.org answers: 407", message)

    def test_redirect_is_not_followed(self) -> None:
        other = self.serve(say(answer(STATUS)))
        moved = answer(b"", b"302 Found", b"Location: %b/\x1b\r\n" % other.url.encode())
        server = self.serve(say(moved.replace(b"\x1b", b"x")))
        with Client(server.url, "secret") as client:
            error = self.assertRaises(Refused, client.status, "x")
        self.assertIn(f"names another URL, {other.url}", str(error))
        self.assertEqual(other.accepted, 0)

    def test_cookies_are_ignored(self) -> None:
        heads: list[bytes] = []

        def serve(connection: socket.socket) -> None:
            while head := read_head(connection):
                heads.append(head)
                connection.sendall(answer(STATUS, more=b"Set-Cookie: a=\xff\xe9; path=/\r\n"))

        with Client(self.serve(serve).url) as client:
            client.status("x")
            client.status("x")
        self.assertNotIn(b"cookie", heads[1].lower())

    def test_form_is_sent_in_pieces_with_its_length_and_repeated_after_a_failure(self) -> None:
        file = Path(self.mktemp())
        file.write_bytes(b"x" * 200_000)
        bodies: list[bytes] = []

        def handle(request: httpx.Request) -> httpx.Response:
            bodies.append(request.read())
            self.assertEqual(int(request.headers["Content-Length"]), len(bodies[-1]))
            if len(bodies) == 1:
                raise httpx.WriteError("cut")
            return httpx.Response(200, json={"evaluation_id": "a"})

        client = Client("http://a", request_backoff=SOON, transport=httpx.MockTransport(handle))
        self.assertEqual(client.evaluate({"source": file, "t": "é"}, **FIELDS), "a")
        self.assertEqual(bodies[0], bodies[1])
        self.assertIn(b"x" * 200_000, bodies[0])
        with self.assertRaises(FileNotFoundError):
            client.evaluate({"source": file.with_name("b")}, **FIELDS)

    def test_client_reads_an_early_response_while_it_still_sends_the_form(self) -> None:
        file = Path(self.mktemp())
        with file.open("wb") as opened:
            opened.truncate(50 << 20)

        def serve(connection: socket.socket) -> None:
            read_head(connection)
            connection.sendall(answer(b'{"message":"too large"}', b"413 Too Large"))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

        with Client(self.serve(serve).url) as client:
            error = self.assertRaises(InvalidRequest, client.evaluate, {"source": file}, **FIELDS)
        self.assertEqual(error.status, 413)

    def test_all_clients_have_the_same_methods(self) -> None:
        def list_names(client: type) -> list[str]:
            return [name for name in dir(client) if not name.startswith("_")]

        self.assertEqual(list_names(AsyncClient), list_names(Client))
        self.assertEqual(AsyncClient.pages.__doc__, Client.pages.__doc__)
