"""A name server of the tests' own, and a daemon that asks it. Only root can have either."""

from __future__ import annotations

import random
import socket
import threading

from tests.integration.harness import TWISTD, Daemon
from tests.integration.unprivileged import temporary_folder

_MOUNT = 'mount --bind "$TEST_RESOLV_CONF" /etc/resolv.conf || exit 1; exec "$@"'
_TYPE_A = 1
CODES = {"NOERROR": 0, "FORMERR": 1, "SERVFAIL": 2, "NXDOMAIN": 3, "REFUSED": 5}


class NameServer:
    """Answers each question as `answer` says: a code, an address of IPv4, or "" for silence.

    It listens on a loopback address that no other test has. `asked` counts questions.
    """

    def __init__(self) -> None:
        self.answer = "NXDOMAIN"
        self.asked = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        while True:
            self.address = f"127.{random.randint(2, 254)}.{random.randint(2, 254)}.53"
            try:
                self._socket.bind((self.address, 53))
                break
            except OSError:
                continue
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def stop(self) -> None:
        """Stop it."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", (self.address, 53))
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            question, peer = self._socket.recvfrom(4096)
            if not question:
                return
            self.asked += 1
            if self.answer:
                self._socket.sendto(self._reply(question), peer)

    def _reply(self, question: bytes) -> bytes:
        """Return the reply to a question (RFC 1035, section 4)."""
        end = question.index(b"\0", 12) + 5
        code, records = CODES.get(self.answer, 0), b""
        if self.answer not in CODES and question[end - 3] == _TYPE_A:
            records = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton(self.answer)
        counts = b"\0\1" + (b"\0\1" if records else b"\0\0") + b"\0\0\0\0"
        flags = (0x8180 | code).to_bytes(2, "big")
        return question[:2] + flags + counts + question[12:end] + records


class AskingDaemon(Daemon):
    """A daemon whose /etc/resolv.conf is a file of the tests', in a mount namespace of its own."""

    program = (
        *("unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, "sh"),
        str(TWISTD),
    )

    def __init__(self, configuration: str, address: str, options: str) -> None:
        """Let it ask the name server at an address, with `options` of resolv.conf(5)."""
        folder = temporary_folder()
        self._resolv_conf = folder / "resolv.conf"
        self._resolv_conf.write_text(f"nameserver {address}\noptions {options}\n")
        super().__init__(configuration, TEST_RESOLV_CONF=str(self._resolv_conf))

    def remove(self) -> None:
        """Remove the file, too."""
        super().remove()
        self._resolv_conf.unlink(missing_ok=True)
        if self._resolv_conf.parent.exists():
            self._resolv_conf.parent.rmdir()
