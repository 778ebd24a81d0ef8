"""A load: requests over keep-alive connections, each sent when the last one is answered.

`load PORT PATH CONNECTIONS REQUESTS` prints the requests per second as JSON. All answers
must be of the length of the first, whose status is checked.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

from benchmarks.client import Client, get

_READ = 256 * 1024
_TIMEOUT = 30.0
_WARM_UP = 100


def load(port: int, path: str, connections: int, requests: int) -> float:
    """Return the seconds that it takes."""
    request = get(path)
    length = _answer_length(port, path)
    sockets = {}
    for _ in range(connections):
        connection = socket.create_connection(("127.0.0.1", port), _TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[connection.fileno()] = connection
    missing = dict.fromkeys(sockets, length)
    with select.epoll() as poll:
        for descriptor in sockets:
            poll.register(descriptor, select.EPOLLIN)
        begin = time.perf_counter()
        sent = 0
        for connection in sockets.values():
            connection.sendall(request)
            sent += 1
        answered = 0
        while answered < requests:
            ready = poll.poll(_TIMEOUT)
            if not ready:
                raise TimeoutError("the server does not answer")
            for descriptor, _ in ready:
                chunk = sockets[descriptor].recv(_READ)
                if not chunk:
                    raise ConnectionError("the server closed a connection")
                missing[descriptor] -= len(chunk)
                if missing[descriptor]:
                    continue
                answered += 1
                missing[descriptor] = length
                if sent < requests:
                    sockets[descriptor].sendall(request)
                    sent += 1
        seconds = time.perf_counter() - begin
    for connection in sockets.values():
        connection.close()
    return seconds


def _answer_length(port: int, path: str) -> int:
    """Return the length of an answer, head and body, which Client has found to be good."""
    request = get(path)
    with Client(port) as client:
        for _ in range(_WARM_UP):
            client.exchange(request)
        return client.length


def main() -> None:
    """Put the load on."""
    port, path, connections, requests = sys.argv[1:]
    seconds = load(int(port), path, int(connections), int(requests))
    print(json.dumps({"rate": int(requests) / seconds}))


if __name__ == "__main__":
    main()
