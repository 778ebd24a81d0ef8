"""Ports for servers that have to be told where to listen."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path

# Browsers refuse port 10080 and some below it (the port blocking of the Fetch standard).
_FIRST, _END = 10_081, 65_536
_claims: list[socket.socket] = []


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which nobody listens, nor will before this process ends.

    The kernel gives it to no connection, and `claim` to nobody else.
    """
    while not claim(port := random.choice(_ports())):
        continue
    return port


def claim(port: int) -> bool:
    """Have a port to oneself among all tests, until this process ends; tell whether it is free."""
    # Only one can have the name, which goes with its holder.
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0tawebeval-tests-{port}")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            probe.bind(("127.0.0.1", port))
    except OSError:
        name.close()
        return False
    _claims.append(name)
    return True


def listens(port: int) -> bool:
    """Tell whether somebody listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _ports() -> Sequence[int]:
    """Return the ports to choose from: not those of connections, which come and go."""
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    return range(_FIRST, int(text.split()[0])) or range(_FIRST, _END)
