"""`linux.launcher`, of which this has what is no process; `test_launching` has the rest."""

from __future__ import annotations

import os
import socket

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.launcher import decode_launch_request, encode_launch_request, receive_message

WORDS = st.lists(st.binary(max_size=6).map(lambda word: word.replace(b"\0", b"")), max_size=4)


class OrderTests(SynchronousTestCase):
    """The words of an order."""

    @given(st.lists(WORDS, min_size=1))
    def test_round_trip(self, parts: list[list[bytes]]) -> None:
        """All words come out as they went in, empty ones too, each in its part."""
        self.assertEqual(decode_launch_request(encode_launch_request(*parts)), parts)


class ReceiveTests(SynchronousTestCase):
    """Messages with descriptors."""

    def setUp(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.ours, self.theirs):
            self.addCleanup(end.close)

    def test_not_inherited(self) -> None:
        """What is received is what was sent, and no program inherits it."""
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        for descriptor in (reading, writing):
            os.set_inheritable(descriptor, True)
        socket.send_fds(self.ours, [b"x"], [reading, writing])
        message, received = receive_message(self.theirs, 10, 2)
        os.close(writing)
        for descriptor in received:
            self.addCleanup(os.close, descriptor)
            self.assertFalse(os.get_inheritable(descriptor))
        os.write(received[1], b"through")
        self.assertEqual((message, os.read(reading, 10)), (b"x", b"through"))

    def test_end(self) -> None:
        """At the end there is nothing."""
        self.ours.close()
        self.assertEqual(receive_message(self.theirs, 10, 2), (b"", []))
