"""`linux.launcher_client`, with children that are real and reports that the tests write."""

from __future__ import annotations

import os
import signal
import socket
import subprocess

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.launcher import MOUNT, START
from tawebeval.linux.launcher_client import MountedOverlay, OverlayMountError, read_launch_report
from tests.cases.children import descriptors


class ReportTests(SynchronousTestCase):
    """A child, and both ends of what it reports by."""

    def setUp(self) -> None:
        self.child = subprocess.Popen(["/bin/sleep", "60"])
        self.addCleanup(self.child.wait)
        self.addCleanup(self.child.kill)
        self.report, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.report, self.theirs):
            self.addCleanup(end.close)

    def begin(self) -> None:
        """Report that all is ready, with a descriptor of a top and two devices."""
        top = os.open("/", os.O_RDONLY)
        socket.send_fds(self.theirs, [b"%d 39 40" % self.child.pid], [top])
        os.close(top)

    def test_begun(self) -> None:
        """The child, the devices, and the top, which nobody has closed."""
        self.begin()
        self.theirs.close()
        pid, overlay = read_launch_report(self.report)
        assert overlay is not None
        self.addCleanup(os.close, overlay.root_descriptor)
        self.assertEqual(pid, self.child.pid)
        self.assertEqual(overlay, MountedOverlay(overlay.root_descriptor, frozenset({39, 40})))
        self.assertEqual(os.fstat(overlay.root_descriptor).st_ino, os.stat("/").st_ino)

    def test_no_overlay(self) -> None:
        """The child alone, where nothing was to be mounted."""
        self.theirs.send(b"%d" % self.child.pid)
        self.theirs.close()
        self.assertEqual(read_launch_report(self.report), (self.child.pid, None))

    def test_failed(self) -> None:
        """What has failed, and where; the child is ended, and the top closed."""
        before = descriptors()
        self.begin()
        self.theirs.send(b"\0".join((b"%d" % self.child.pid, START, b"2", b"/a/path")))
        with self.assertRaises(FileNotFoundError) as caught:
            read_launch_report(self.report)
        self.assertEqual(caught.exception.filename, "/a/path")
        self.assertEqual(descriptors(), before)
        self.assertRaises(ChildProcessError, os.waitpid, self.child.pid, 0)

    def test_not_mounted(self) -> None:
        """An overlay that fails is told apart."""
        self.theirs.send(b"\0".join((b"%d" % self.child.pid, MOUNT, b"22", b"")))
        with self.assertRaises(OverlayMountError) as caught:
            read_launch_report(self.report)
        self.assertEqual((caught.exception.errno, caught.exception.filename), (22, None))

    def test_silent(self) -> None:
        """One that ends without a word was lost with the launcher."""
        self.theirs.close()
        self.assertRaises(ConnectionResetError, read_launch_report, self.report)

    def test_hangs(self) -> None:
        """One that says no more than its number is killed, and the top closed."""
        before = descriptors()
        self.begin()
        self.report.settimeout(0.05)
        self.assertRaises(TimeoutError, read_launch_report, self.report)
        self.assertEqual(descriptors(), before)
        self.assertEqual(self.child.wait(), -signal.SIGKILL)
