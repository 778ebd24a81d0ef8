"""A load: requests over keep-alive connections, each sent when the last one is answered.

`load TARGETS CONNECTIONS REQUESTS` prints the requests per second, on the clock and of processor
time of the servers. TARGETS is JSON, a list of [PORT, PID, PATH]; the connections go round them,
and each asks for its own target's path again and again. All answers must be of the length of the
target's first. Connections are made and used once before anything is measured.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple

from benchmarks.client import Client, get
from benchmarks.running import Server

_TIMEOUT = 30.0
_WARM_UP = 100


class Target(NamedTuple):
    """What is asked for, of the server `pid` at `port`."""

    port: int
    pid: int
    path: str


class _Asking(NamedTuple):
    """What a connection sends, and how long the answer is."""

    socket: socket.socket
    request: bytes
    length: int


def load(targets: Sequence[Target], connections: int, requests: int) -> dict[str, float]:
    """Put the load on; return the rates."""
    questions = []
    for target in targets:
        request = get(target.path)
        length = _answer_length(target.port, request)
        questions.append((target.port, request, length))
    servers = [Server(pid, port) for pid, port in {one.pid: one.port for one in targets}.items()]
    asking = {}
    with select.epoll() as poll:
        for port, request, length in islice(cycle(questions), connections):
            connection = _connect(port, request, length)
            asking[connection.fileno()] = _Asking(connection, request, length)
            poll.register(connection, select.EPOLLIN)
        missing = {descriptor: one.length for descriptor, one in asking.items()}
        spent = sum(server.processor_time() for server in servers)
        begin = time.perf_counter()
        sent = 0
        for descriptor, one in asking.items():
            os.write(descriptor, one.request)
            sent += 1
        answered = 0
        while answered < requests:
            ready = poll.poll(_TIMEOUT)
            if not ready:
                raise TimeoutError("the server does not answer")
            for descriptor, _ in ready:
                # Reading no more than there can be keeps the buffer small, and so the load cheap.
                size = len(os.read(descriptor, missing[descriptor]))
                if not size:
                    raise ConnectionError("the server closed a connection")
                if size < missing[descriptor]:
                    missing[descriptor] -= size
                    continue
                answered += 1
                missing[descriptor] = asking[descriptor].length
                if sent < requests:
                    os.write(descriptor, asking[descriptor].request)
                    sent += 1
        seconds = time.perf_counter() - begin
        spent = sum(server.processor_time() for server in servers) - spent
        if poll.poll(0):
            raise ConnectionError("the server sends more than its first answer was long")
    for one in asking.values():
        one.socket.close()
    return {"rate": requests / seconds, "processor_rate": requests / spent}


def _connect(port: int, request: bytes, length: int) -> socket.socket:
    """Return a connection on which one request has been answered: the server has taken it."""
    connection = socket.create_connection(("127.0.0.1", port), _TIMEOUT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(request)
    while length > 0:
        chunk = connection.recv(length)
        if not chunk:
            raise ConnectionError("the server closed a connection")
        length -= len(chunk)
    return connection


def _answer_length(port: int, request: bytes) -> int:
    """Return the length of an answer, head and body."""
    with Client(port) as client:
        for _ in range(_WARM_UP):
            client.exchange(request)
        return client.length


def main() -> None:
    """Put the load on, and report."""
    targets, connections, requests = sys.argv[1:]
    asked = [Target(*target) for target in json.loads(targets)]
    print(json.dumps(load(asked, int(connections), int(requests))))


if __name__ == "__main__":
    main()
