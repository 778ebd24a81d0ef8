"""The requests to run a submission's program: they are strangers'."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.sandbox.broker import (
    PROTOCOL_VERSION,
    RequestRefused,
    SubmissionCgroup,
    find_mount_source,
    parse_request,
)
from tests.cases.patience import PATIENCE

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)
MEMBERS = (
    *("command", "read", "write", "directory", "environment"),
    *("time", "wall", "memory", "processes", "file_size"),
)
PATHS = st.lists(st.sampled_from(["", ".", "..", "a", "b", "usr", "proc"]), max_size=4).map(
    lambda parts: "/" + "/".join(parts)
)


def request(**members: Any) -> bytes:
    """Return the message of a request that is good but for `members`."""
    return json.dumps({"version": PROTOCOL_VERSION, "command": ["true"], **members}).encode()


PARENT = """
import json, os, signal
from tawebeval.sandbox.broker import CONFIGURATION, FILTER_DESCRIPTORS, LISTENING, SOURCE, main
sizes = {"rlimits": {}, "memory_bytes": 1, "max_processes": 1}
told = {"bwrap_argv": [], "mounts": [], **sizes, "parent_pid": os.getpid(), "cgroup_directory": ""}
if os.fork():
    signal.pause()
file = os.memfd_create("told")
os.write(file, json.dumps(told).encode())
os.dup2(file, CONFIGURATION)
os.dup2(0, LISTENING)
for number in (SOURCE, *FILTER_DESCRIPTORS):
    os.dup2(2, number)
main()
"""
"""The parent of a broker that listens at stdin."""


class ParentEndTests(SynchronousTestCase):
    def test_broker_and_its_processes_end_with_the_parent(self) -> None:
        waiting, refused = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind("")
            listening.listen()
            command = [sys.executable, "-c", PARENT]
            parent = subprocess.Popen(command, stdin=listening, start_new_session=True)
            for caller in (waiting, refused):
                self.addCleanup(caller.close)
                caller.settimeout(PATIENCE)
                caller.connect(listening.getsockname())
        self.addCleanup(self.kill_group, parent.pid)
        refused.send(b"nonsense")
        self.assertIn(b"not JSON", refused.recv(999))  # so a process serves the first one, too
        parent.kill()
        parent.wait()
        self.assertEqual(waiting.recv(999), b"")

    def kill_group(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


class Requests(SynchronousTestCase):
    def test_request_has_defaults_for_missing_members(self) -> None:
        found = parse_request(request(read=[["/a", "/b"]], write=[["/c", "/d"]], time=1))
        self.assertEqual(found.mounts, [("/a", "/b", False), ("/c", "/d", True)])
        self.assertEqual((found.time, found.wall, found.memory), (1.0, None, None))
        self.assertEqual(found.directory, "/tmp")
        self.assertEqual(found.environment, {})

    def test_request_may_name_a_path_that_every_sandbox_shows(self) -> None:
        shown = ("/opt", "/etc/x.cfg")
        for path in ("/opt", "/opt/a/b", "/etc/x.cfg"):
            self.assertEqual(parse_request(request(read=[[path, path]]), (), shown).mounts, [])
        for member, source in (("read", "/a"), ("write", "/opt/a")):
            message = request(**{member: [[source, "/opt/a"]]})
            self.assertRaises(RequestRefused, parse_request, message, (), shown)

    @given(st.dictionaries(st.sampled_from(MEMBERS), JSON) | st.just({}), st.binary(max_size=20))
    def test_any_message_is_parsed_or_refused(
        self, members: dict[str, Any], message: bytes
    ) -> None:
        for each in (message, request(**members)):
            with contextlib.suppress(RequestRefused):
                parse_request(each)

    @given(st.lists(PATHS, max_size=4))
    def test_no_mount_target_is_a_system_path_or_lies_within_another_target(
        self, targets: list[str]
    ) -> None:
        try:
            found = parse_request(request(read=[["/given", target] for target in targets]))
        except RequestRefused:
            return
        kept = [Path(target) for _, target, _ in found.mounts]
        for target in kept:
            self.assertNotIn(target.parts[1], ("usr", "proc"))
            self.assertNotIn("..", target.parts)
        for one, other in pairwise(sorted(kept)):
            self.assertNotIn(one, (other, *other.parents))


class Cgroups(SynchronousTestCase):
    def setUp(self) -> None:
        self.parent = Path(self.mktemp()).resolve()
        self.place = self.parent / "run-1"
        self.place.mkdir(parents=True)
        for name in ("memory.max", "pids.max"):
            (self.parent / name).touch()
        self.group = SubmissionCgroup(str(self.parent), "run-1")

    def put(self, name: str, content: str) -> None:
        (self.place / name).write_text(content)

    def test_memory_figures_leave_out_the_page_cache(self) -> None:
        self.put("cpu.stat", "usage_usec 2500000\nuser_usec 1\n")
        self.put("memory.stat", "anon 100\nfile 50\nshmem 20\n")
        self.assertEqual(self.group.read_cpu_seconds(), 2.5)
        self.assertEqual(self.group.read_current_memory(), 120)
        self.assertIsNone(self.group.read_peak_memory(), "before Linux 5.19")
        self.put("memory.peak", "200\n")
        self.assertEqual(self.group.read_peak_memory(), 170)

    def test_only_own_limits_count(self) -> None:
        self.put("memory.events", "oom 1\noom_kill 1\n")
        self.put("pids.events", "max 0\n")
        self.assertTrue(self.group.has_met_memory_limit(), "before Linux 5.2")
        self.put("memory.events.local", "oom 0\noom_kill 1\n")
        self.assertFalse(self.group.has_met_memory_limit())
        self.assertFalse(self.group.has_refused_fork())
        self.put("pids.events", "max 1\n")
        self.assertTrue(self.group.has_refused_fork())

    def test_usage_is_unknown_without_a_cgroup(self) -> None:
        group = SubmissionCgroup("", "run-1")
        group.make(1, 1)
        self.assertEqual((group.read_cpu_seconds(), group.read_peak_memory()), (None, None))
        self.assertEqual(group.read_current_memory(), 0)
        self.assertFalse(group.has_met_memory_limit() or group.has_refused_fork())


class Sources(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(self.mktemp()).resolve()
        (self.top / "own" / "directory").mkdir(parents=True)
        (self.top / "own" / "file").write_text("")
        (self.top / "own" / "link").symlink_to(self.top)
        os.mkfifo(self.top / "own" / "pipe")
        (self.top / "secret").write_text("")
        self.places = [
            ("/home", str(self.top / "own"), True),
            ("/home/fixed", str(self.top), False),
        ]

    def find(self, path: str, writable: bool = False) -> str:
        try:
            source, descriptor = find_mount_source(self.places, path, "/x", writable)
        except RequestRefused as error:
            return str(error).partition(": ")[2] or str(error).partition("' ")[2]
        os.close(descriptor)
        self.assertEqual(
            source.device_and_inode, (os.stat(source.path).st_dev, os.stat(source.path).st_ino)
        )
        return os.path.relpath(source.path, self.top)

    def test_files_and_directories_of_the_evaluator_are_found(self) -> None:
        for path, found in {
            "/home/file": "own/file",
            "/home/directory": "own/directory",
            "/home": "own",
            "/home/fixed/secret": "secret",
        }.items():
            self.assertEqual(self.find(path), found)

    def test_links_and_paths_outside_are_refused(self) -> None:
        for path, reason in {
            "/": "is outside of the evaluator's own directories",
            "/homes": "is outside of the evaluator's own directories",
            "/home/missing": "No such file or directory",
            "/home/link": "is a symbolic link; give the path that it leads to",
            "/home/link/secret": "Not a directory",
            "/home/file/x": "Not a directory",
            "/home/pipe": "is neither a file nor a directory",
        }.items():
            self.assertEqual(self.find(path), reason, path)

    def test_submission_cannot_write_where_the_evaluator_cannot(self) -> None:
        self.assertEqual(self.find("/home/file", writable=True), "own/file")
        self.assertEqual(self.find("/home/fixed", writable=True), "is read-only for the evaluator")
