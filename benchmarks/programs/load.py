"""A load: requests over keep-alive connections, each sent when the last one is answered.

`load PORT PID PATH CONNECTIONS REQUESTS` prints the requests per second, on the clock and of
processor time of the process PID, which is the server. All answers must be of the length of the
first, whose status is checked. Connections are made and used once before anything is measured.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time

from benchmarks.client import Client, get
from benchmarks.running import Server

_TIMEOUT = 30.0
_WARM_UP = 100


def load(server: Server, path: str, connections: int, requests: int) -> dict[str, float]:
    """Put the load on; return the rates."""
    request = get(path)
    length = _answer_length(server.port, request)
    sockets = {}
    with select.epoll() as poll:
        for _ in range(connections):
            connection = _connect(server.port, request, length)
            sockets[connection.fileno()] = connection
            poll.register(connection, select.EPOLLIN)
        missing = dict.fromkeys(sockets, length)
        spent = server.processor_time()
        begin = time.perf_counter()
        sent = 0
        for descriptor in sockets:
            os.write(descriptor, request)
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
                missing[descriptor] = length
                if sent < requests:
                    os.write(descriptor, request)
                    sent += 1
        seconds = time.perf_counter() - begin
        spent = server.processor_time() - spent
        if poll.poll(0):
            raise ConnectionError("the server sends more than its first answer was long")
    for connection in sockets.values():
        connection.close()
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
    """Return the length of an answer, head and body, which Client has found to be good."""
    with Client(port) as client:
        for _ in range(_WARM_UP):
            client.exchange(request)
        return client.length


def main() -> None:
    """Put the load on, and report."""
    port, pid, path, connections, requests = sys.argv[1:]
    server = Server(int(pid), int(port))
    print(json.dumps(load(server, path, int(connections), int(requests))))


if __name__ == "__main__":
    main()
