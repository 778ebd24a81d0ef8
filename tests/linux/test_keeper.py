"""`linux.keeper` and `linux.keeper_client` with a real keeper."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import TestCase

from tawebeval.errors import ConfigurationError
from tawebeval.linux import keeper, keeper_client
from tawebeval.linux.child import StartedProcess
from tawebeval.linux.keeper_client import KeeperChild, KeeperClient, RunningKeeper, start_program
from tawebeval.linux.launcher_client import KEPT_LAUNCHER_PREFIX, LauncherClient, LaunchSpec
from tawebeval.linux.reaper import list_children
from tests.cases.children import PATH, descriptors
from tests.cases.keepers import KeeperProcess
from tests.cases.patience import PATIENCE

CLIENT = """
import os, sys, time
from tawebeval.linux.keeper_client import KeeperClient
client = KeeperClient.connect(sys.argv[1])
number = 0
print("connected", flush=True)
while True:
    number += 1
    memory = os.memfd_create("a")
    os.write(memory, str(number).encode())
    client.keep_bundle(f"bundle {number}", [memory])
    print(number, flush=True)
    os.close(memory)
"""


def eventually(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)


def wait_for_end(pidfd: int) -> None:
    """Wait until a process has ended."""
    assert select.select([pidfd], [], [], PATIENCE)[0], "the process does not end"


def files() -> int:
    """Return the number of open files in memory."""
    return sum(path.startswith("/memfd:") for path in descriptors().values())


class KeeperTestCase(TestCase):
    """A keeper, and clients."""

    grace = keeper.REAP_DELAY_SECONDS
    open_files = 0

    def setUp(self) -> None:
        self.keeper = KeeperProcess(self.grace, self.open_files)
        self.addCleanup(self.keeper.stop)
        self.path = self.keeper.path

    def connect(self) -> KeeperClient:
        """Return a new client, which blocks."""
        client = KeeperClient.connect(self.path)
        self.addCleanup(client.close)
        return client

    def attach(self, on_lost: Callable[[], object] = lambda: None) -> KeeperClient:
        """Return a new client that the reactor serves."""
        client = self.connect()
        client.attach(reactor, on_lost)
        return client

    def file(self, content: bytes = b"") -> int:
        """Return a descriptor of a file in memory."""
        descriptor = os.memfd_create("file")
        self.addCleanup(os.close, descriptor)
        os.write(descriptor, content)
        return descriptor

    def held(self) -> dict[str, tuple[list[bytes], int]]:
        """Return all bundles but launchers, as a new client gets them: contents and process."""
        client = self.connect()
        found = {}
        for name, bundle in client.list_bundles().items():
            if not name.startswith(KEPT_LAUNCHER_PREFIX):
                found[name] = ([os.pread(each, 100, 0) for each in bundle.descriptors], bundle.pid)
            for descriptor in bundle.descriptors:
                os.close(descriptor)
        client.close()
        return found

    def launch(self, command: str) -> StartedProcess:
        """Start a shell command by a launcher of the keeper."""
        launching = LauncherClient(keeper=RunningKeeper(self.path, self.keeper.pid))
        self.addCleanup(launching.close)
        started, _ = launching.start_program(LaunchSpec(["/bin/sh", "-c", command], PATH, "/"))
        for descriptor in (started.pidfd, started.stdout, started.stderr):
            self.addCleanup(os.close, descriptor)
        return started

    def raw(self) -> socket.socket:
        """Return a connection without a client."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.addCleanup(connection.close)
        connection.settimeout(PATIENCE)
        connection.connect(self.path)
        return connection

    def ask(self, message: bytes, *sent: int) -> dict[str, Any]:
        """Return the answer to a message."""
        connection = self.raw()
        connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", sent))])
        answer: dict[str, Any] = json.loads(connection.recv(keeper.MAX_MESSAGE_BYTES))
        connection.close()
        return answer


class BundleTests(KeeperTestCase):
    """Descriptors that outlive a client."""

    def test_outlive_the_client(self) -> None:
        """A later client gets all bundles, the same files, in the order in which they came."""
        client = self.connect()
        self.assertEqual(client.pid, self.keeper.pid)
        self.assertEqual(client.list_bundles(), {})
        shared = self.file()
        client.keep_bundle("one", [shared, self.file(b"1")])
        client.keep_bundle("two", [self.file(b"2")])
        client.close()
        os.pwrite(shared, b"written later", 0)
        self.assertEqual(
            list(self.held().items()),
            [("one", ([b"written later", b"1"], 0)), ("two", ([b"2"], 0))],
        )

    def test_replace_and_drop(self) -> None:
        """A bundle is replaced, dropped, and dropped again; its descriptors are closed."""
        client = self.connect()
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        client.keep_bundle("a", [writing])
        os.close(writing)
        client.keep_bundle("b", [self.file(b"b")])
        client.keep_bundle("a", [self.file(b"other")])
        self.assertEqual(os.read(reading, 1), b"")
        self.assertEqual(list(self.held()), ["b", "a"])
        client.drop_bundle("a")
        client.drop_bundle("a")
        self.assertEqual(self.held(), {"b": ([b"b"], 0)})

    def test_thousands(self) -> None:
        """Thousands of bundles are listed, in many messages, and the reactor can send as many."""
        client = self.attach()
        for number in range(3000):
            client.keep_bundle(f"{number}.journal", [self.file(b"%d" % number)])
        last: Deferred[Any] = client.wait_for_exit_status("none")  # answered after all others
        last.addErrback(lambda failure: failure.trap(OSError))

        def check(_: object) -> None:
            held = self.held()
            self.assertEqual(
                held, {f"{number}.journal": ([b"%d" % number], 0) for number in range(3000)}
            )

        return last.addCallback(check)  # type: ignore[return-value]

    def test_page_of_descriptors(self) -> None:
        """Bundles with many descriptors each do not exceed what a message can have."""
        client = self.connect()
        files = [self.file(b"%d" % number) for number in range(keeper.MAX_BUNDLE_DESCRIPTORS)]
        for number in range(40):
            client.keep_bundle(str(number), files)
        contents = [b"%d" % number for number in range(keeper.MAX_BUNDLE_DESCRIPTORS)]
        self.assertEqual(self.held(), {str(number): (contents, 0) for number in range(40)})

    def test_killed_client(self) -> None:
        """Whatever a client has sent before it is killed is kept."""
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, self.path], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            for _ in range(200):
                process.stdout.readline()
            process.kill()
            said = process.stdout.read().split(b"\n")  # the last line may be torn
        sent = int(said[-2]) if len(said) > 1 else 199
        held = self.held()
        self.assertEqual(held, {f"bundle {n}": ([b"%d" % n], 0) for n in range(1, len(held) + 1)})
        self.assertGreaterEqual(len(held), sent)

    def test_unread_answers(self) -> None:
        """Requests of a client that dies with unread answers are executed, too."""
        connection = self.raw()
        os.kill(self.keeper.pid, signal.SIGSTOP)
        for message in (b"{}", b'{"request": "keep", "id": 1, "name": "a", "pid": 0}'):
            socket.send_fds(connection, [message], [self.file(b"a")])
        os.kill(self.keeper.pid, signal.SIGCONT)
        connection.recv(1, socket.MSG_PEEK)
        connection.close()
        eventually(lambda: self.held() == {"a": ([b"a"], 0)})

    def test_client_that_does_not_read(self) -> None:
        """A client that reads no answers does not disturb others, and gets its answers later."""
        self.connect().keep_bundle("a", [self.file(b"a")])
        connection = self.raw()
        connection.setblocking(False)
        sent = 0
        with self.assertRaises(BlockingIOError):
            while True:
                connection.send(b'{"request": "list", "id": %d, "after": 0}' % (sent + 1))
                sent += 1
        self.assertEqual(self.held(), {"a": ([b"a"], 0)})
        connection.settimeout(PATIENCE)
        for number in range(1, sent + 1):
            message, received, _, _ = socket.recv_fds(connection, keeper.MAX_MESSAGE_BYTES, 10)
            answer = json.loads(message)
            self.assertEqual((answer["id"], answer["bundles"]), (number, [["a", 0, 1]]))
            for descriptor in received:
                os.close(descriptor)

    def test_many_clients(self) -> None:
        """Too many connections wait; those before are served, and the others later."""
        self.connect().keep_bundle("a", [self.file(b"a")])
        for connection in [self.raw() for _ in range(70)]:
            connection.send(b'{"request": "version", "id": 1}')
            self.assertIn(b"version", connection.recv(100))
            connection.close()
        self.assertEqual(self.held(), {"a": ([b"a"], 0)})


class FewDescriptorsTests(KeeperTestCase):
    """A keeper that may have few descriptors."""

    open_files = 200

    def test_limit(self) -> None:
        """Bundles beyond the limit are refused; the keeper serves on, and forgets nothing."""
        client = self.connect()
        for number in range(100):
            client.keep_bundle(str(number), [self.file(b"%d" % number)])
        with capturedLogs() as events:
            bundles = client.list_bundles()
        self.assertEqual(list(bundles), [str(number) for number in range(72)])
        self.assertIn("72: Too many open files", str(formatEvent(events[0])))
        for bundle in bundles.values():
            os.close(bundle.descriptors[0])
        client.keep_bundle("0", [self.file(b"replaced")])
        client.drop_bundle("1")
        client.keep_bundle("new", [self.file(b"new")])
        held = self.held()
        self.assertEqual((held["0"][0], held["new"][0]), ([b"replaced"], [b"new"]))


class MalformedTests(KeeperTestCase):
    """Messages that are no requests."""

    def test_errors(self) -> None:
        """Each is answered with an error, and closes what came with it."""
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        for message in (
            b"\xff",
            b"[" * 60_000,
            b"9" * 60_000,
            b"[]",
            b"{}",
            b'{"request": "version"}',
            b'{"request": "version", "id": true}',
            b'{"request": "other", "id": 1}',
            b'{"request": "drop", "id": 1}',
            b'{"request": "drop", "id": 1, "name": 1}',
            b'{"request": "drop", "id": 1, "name": ""}',
            b'{"request": "drop", "id": 1, "name": "\\u00e4"}',
            b'{"request": "drop", "id": 1, "name": "%b"}' % (b"x" * 129),
            b'{"request": "wait", "id": 1, "name": "none"}',
            b'{"request": "wait", "id": 1, "name": "none", "pid": 0}',
            b'{"request": "wait", "id": 1, "name": "none", "pid": 1}',
            b'{"request": "list", "id": 1, "after": -1}',
            b'{"request": "keep", "id": 1, "name": "a", "pid": "1"}',
            b'{"request": "start", "id": 1, "argv": []}',
            b'{"request": "start", "id": 1, "argv": ["/bin/true", 1]}',
            b'{"request": "start", "id": 1, "argv": ["/bin/true"]}',
            b'{"request": "version", "id": 1}' + b" " * keeper.MAX_MESSAGE_BYTES,
        ):
            self.assertIn("error", self.ask(message, writing), message[:50])
        many = [writing] * (keeper.MAX_BUNDLE_DESCRIPTORS + 1)
        self.assertIn(
            "error", self.ask(b'{"request": "keep", "id": 1, "name": "a", "pid": 0}', *many)
        )
        os.close(writing)
        self.assertEqual(os.read(reading, 1), b"")
        self.assertEqual(self.held(), {})

    def test_no_descriptors(self) -> None:
        """A bundle without descriptors is refused, which is logged."""
        client = self.connect()
        client.keep_bundle("a", [])
        with capturedLogs() as events:
            self.assertEqual(client.list_bundles(), {})
        self.assertIn("a: a bundle has 1 to 16 descriptors", str(formatEvent(events[0])))

    def test_start_errors(self) -> None:
        """A program that cannot be started is the error of the kernel; a NUL is refused."""
        files = [self.file() for _ in range(3)]
        self.assertRaises(FileNotFoundError, start_program, self.path, ["/nonexistent"], files)
        with self.assertRaises(OSError) as caught:
            start_program(self.path, ["/bin/true", "\0"], files)
        self.assertIn("null", str(caught.exception))

    def test_other_version(self) -> None:
        """A keeper of another version is refused."""
        self.patch(keeper, "PROTOCOL_VERSION", 2)
        with self.assertRaises(ConfigurationError) as caught:
            KeeperClient.connect(self.path)
        self.assertIn("restart tawebeval-keeper.service", str(caught.exception))


class ProcessTests(KeeperTestCase):
    """Programs that are started by a launcher of the keeper."""

    grace = 0.0

    async def test_exit(self) -> None:
        """It is a child of the keeper; its status and usage arrive, to a later client, too."""
        started = self.launch("echo $PPID; exit 3")
        client = self.attach()
        client.keep_bundle("run", [started.pidfd], started.pid)
        wait_for_end(started.pidfd)
        self.assertEqual(int(os.read(started.stdout, 100)), self.keeper.pid)
        client.reap_unclaimed_children()  # leaves those of bundles alone
        status, usage = await client.wait_for_exit_status("run")
        self.assertEqual(os.waitstatus_to_exitcode(status), 3)
        assert usage is not None
        self.assertGreater(usage.ru_maxrss, 0)
        client.close()
        later = self.attach()
        self.assertEqual(await later.wait_for_exit_status("run"), (status, usage))
        later.keep_bundle("run", [started.pidfd, started.stdout], started.pid)
        self.assertEqual(await later.wait_for_exit_status("run"), (status, usage))
        later.drop_bundle("run")
        with self.assertRaises(OSError):
            await later.wait_for_exit_status("run")

    async def test_ended_while_no_client(self) -> None:
        """The status of a program that ends while no client is connected arrives."""
        started = self.launch("read line < /dev/stdin; sleep 0.05; exit 4")
        client = self.connect()
        client.keep_bundle("run", [started.pidfd], started.pid)
        client.close()
        wait_for_end(started.pidfd)
        client = self.connect()
        bundle = client.list_bundles()["run"]
        client.attach(reactor)
        self.assertEqual(bundle.pid, started.pid)
        wait_for_end(bundle.descriptors[0])
        os.close(bundle.descriptors[0])
        status, _ = await client.wait_for_exit_status("run")
        self.assertEqual(os.waitstatus_to_exitcode(status), 4)

    async def test_still_runs(self) -> None:
        """To wait for a program that runs is an error; dropping kills it and reaps it."""
        started = self.launch("sleep 60 & wait")
        client = self.attach()
        client.keep_bundle("run", [started.pidfd], started.pid)
        with self.assertRaises(OSError) as caught:
            await client.wait_for_exit_status("run")
        self.assertEqual(caught.exception.errno, errno.EBUSY)
        client.drop_bundle("run")
        wait_for_end(started.pidfd)
        self.reaped(started.pid)

    def reaped(self, group: int) -> None:
        """Wait until the keeper has reaped all processes of a group."""
        client = self.connect()

        def is_reaped() -> bool:
            client.reap_unclaimed_children()
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return True
            return False

        eventually(is_reaped)

    async def test_replaced(self) -> None:
        """A bundle that replaces another one kills a process that is not its own any more."""
        started = self.launch("sleep 60")
        client = self.attach()
        client.keep_bundle("run", [started.pidfd], started.pid)
        client.keep_bundle("run", [started.pidfd, started.stdout], started.pid)
        with self.assertRaises(OSError) as caught:
            await client.wait_for_exit_status("run")
        self.assertEqual(caught.exception.errno, errno.EBUSY)
        client.keep_bundle("run", [started.pidfd])
        wait_for_end(started.pidfd)
        self.reaped(started.pid)

    async def test_in_no_bundle(self) -> None:
        """A process whose bundle was refused is waited for by its number, once."""
        started = self.launch("exit 6")
        running = self.launch("sleep 60")
        wait_for_end(started.pidfd)
        client = self.attach()
        status, _ = await client.wait_for_exit_status("run", started.pid)
        self.assertEqual(os.waitstatus_to_exitcode(status), 6)
        client.keep_bundle("other", [running.pidfd], running.pid)
        for pid in (started.pid, running.pid):
            with self.assertRaises(OSError):
                await client.wait_for_exit_status("run", pid)

    async def test_of_one_bundle(self) -> None:
        """A process belongs to one bundle only."""
        started = self.launch("sleep 60")
        client = self.attach()
        client.keep_bundle("run", [self.file()], started.pid)
        with capturedLogs() as events:
            client.keep_bundle("other", [self.file()], started.pid)
            with self.assertRaises(OSError):
                await client.wait_for_exit_status("run")
        self.assertIn("belongs to another bundle", str(formatEvent(events[0])))
        self.assertEqual(list(self.held()), ["run"])

    async def test_no_child(self) -> None:
        """A process that is not the keeper's is kept without its status, and never killed."""
        with subprocess.Popen(["/bin/sleep", "60"]) as process:
            client = self.attach()
            client.keep_bundle("run", [self.file()], process.pid)
            with self.assertRaises(ChildProcessError):
                await client.wait_for_exit_status("run")
            client.drop_bundle("run")
            self.assertEqual(self.held(), {})
            self.assertIsNone(process.poll())
            process.kill()

    def test_orphans(self) -> None:
        """Orphans of a program become the keeper's children, and are reaped."""
        started = self.launch("(setsid sleep 60 >/dev/null 2>&1 & echo $!)")
        client = self.connect()
        client.keep_bundle("run", [started.pidfd], started.pid)
        wait_for_end(started.pidfd)
        orphan = int(os.read(started.stdout, 100))
        eventually(lambda: orphan in list_children(self.keeper.pid))
        os.kill(orphan, signal.SIGKILL)
        self.reaped(orphan)
        self.assertIn(started.pid, list_children(self.keeper.pid))

    def test_stop(self) -> None:
        """A keeper that is stopped kills the processes of its bundles."""
        started = self.launch("sleep 60 & wait")
        client = self.connect()
        client.keep_bundle("run", [started.pidfd], started.pid)
        client.list_bundles()
        self.keeper.stop()
        wait_for_end(started.pidfd)

    def test_launcher_lives_on(self) -> None:
        """The next daemon takes over a launcher that was left, and can start programs by it."""
        launching = LauncherClient(keeper=RunningKeeper(self.path, self.keeper.pid))
        launching.start_launcher()
        assert launching.launcher is not None
        first = launching.launcher.process.pid
        launching.close()
        bundles = self.connect().list_bundles()
        launching = LauncherClient(keeper=RunningKeeper(self.path, self.keeper.pid, bundles))
        self.addCleanup(launching.close)
        started, _ = launching.start_program(LaunchSpec(["/bin/true"], PATH, "/"))
        for descriptor in (started.pidfd, started.stdout, started.stderr):
            self.addCleanup(os.close, descriptor)
        wait_for_end(started.pidfd)
        self.assertEqual(launching.launcher.process.pid, first)

    def test_replaced_launcher(self) -> None:
        """A launcher that was killed is replaced."""
        launching = LauncherClient(keeper=RunningKeeper(self.path, self.keeper.pid))
        self.addCleanup(launching.close)
        for _ in range(2):
            launching.start_launcher()
            held = launching.launcher
            assert held is not None
            assert isinstance(held.process, KeeperChild)
            os.kill(held.process.pid, signal.SIGKILL)
            wait_for_end(held.process.pidfd)
            for _ in range(3):  # the spare process takes the first order
                started, _ = launching.start_program(LaunchSpec(["/bin/true"], PATH, "/"))
                wait_for_end(started.pidfd)
                for descriptor in (started.pidfd, started.stdout, started.stderr):
                    os.close(descriptor)


class GraceTests(KeeperTestCase):
    """Children that have ended before they are kept."""

    async def test_grace(self) -> None:
        """`reap_others` leaves them for a time, in which they can be kept."""
        started = self.launch("exit 3")
        wait_for_end(started.pidfd)
        client = self.attach()
        client.reap_unclaimed_children()
        client.keep_bundle("run", [started.pidfd], started.pid)
        status, _ = await client.wait_for_exit_status("run")
        self.assertEqual(os.waitstatus_to_exitcode(status), 3)


class ConnectionTests(KeeperTestCase):
    """The client in the reactor, and the end of the keeper."""

    async def test_lost(self) -> None:
        """The end of the keeper is reported once; requests fail, or do nothing, from then on."""
        lost: list[str] = []
        ended: Deferred[None] = Deferred()

        def on_lost() -> None:
            lost.append("lost")
            ended.callback(None)

        client = self.attach(on_lost)
        os.kill(self.keeper.pid, signal.SIGSTOP)
        waiting = client.wait_for_exit_status("run")
        self.keeper.kill()
        client.keep_bundle("a", [self.file()])
        with self.assertRaises(ConnectionError):
            await waiting
        await ended
        client.drop_bundle("a")
        client.keep_bundle("a", [self.file()])
        with self.assertRaises(ConnectionError):
            await client.wait_for_exit_status("a")
        self.assertEqual(lost, ["lost"])
        self.assertRaises(ConnectionRefusedError, KeeperClient.connect, self.path)

    async def test_order(self) -> None:
        """While the keeper does not read, requests are queued, and lose neither order nor files."""
        client = self.attach()
        before = files()
        os.kill(self.keeper.pid, signal.SIGSTOP)
        count = 1500
        for number in range(count):
            file = os.memfd_create("file")
            os.write(file, b"%d" % number)
            client.keep_bundle("same", [file])
            client.keep_bundle(str(number), [file])
            if number % 3:
                client.drop_bundle(str(number))
            os.close(file)
        self.assertGreater(files(), before)  # some are queued
        os.kill(self.keeper.pid, signal.SIGCONT)
        with self.assertRaises(OSError):
            await client.wait_for_exit_status("none")
        held = self.held()
        self.assertEqual(held.pop("same"), ([b"%d" % (count - 1)], 0))
        self.assertEqual(held, {str(n): ([b"%d" % n], 0) for n in range(0, count, 3)})
        self.assertEqual(files(), before)

    async def test_dead_keeper(self) -> None:
        """A keeper that takes no requests for long is given up, and all descriptors are closed."""
        self.patch(keeper_client, "MAX_QUEUED_REQUESTS", 10)
        lost: Deferred[None] = Deferred()
        client = self.attach(lambda: lost.callback(None))
        file = self.file()
        before = files()
        os.kill(self.keeper.pid, signal.SIGSTOP)
        for _ in range(2000):
            client.keep_bundle("a", [file])
        await lost
        os.kill(self.keeper.pid, signal.SIGCONT)
        self.assertEqual(files(), before)

    def test_second_keeper(self) -> None:
        """A keeper refuses the place of another one, and a directory that others may enter."""
        argv = [sys.executable, "-I", "-S", keeper.__file__, keeper.PROCESS_NAME]
        done = subprocess.run([*argv, self.path], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("another keeper listens here", done.stderr)
        self.assertEqual(self.held(), {})
        directory = os.path.dirname(self.path)
        os.chmod(directory, 0o750)
        done = subprocess.run([*argv, self.path], capture_output=True, text=True)
        said, _, command = done.stderr.partition("; as root: ")
        self.assertIn("must belong to the user ", said)
        subprocess.run(command, shell=True, check=True)
        self.assertEqual(os.stat(directory).st_mode & 0o777, 0o700)

    def test_long_path(self) -> None:
        """A keeper says that the path of its socket is too long."""
        directory = tempfile.mkdtemp(prefix="tawebeval-keeper-")
        self.addCleanup(os.rmdir, directory)
        path = os.path.join(directory, "s" * 108)
        argv = [sys.executable, "-I", "-S", keeper.__file__, keeper.PROCESS_NAME, path]
        done = subprocess.run(argv, capture_output=True, text=True)
        words = (
            f"tawebeval-keeper: {path}: cannot listen there: AF_UNIX path too long; name another"
        )
        self.assertTrue(done.stderr.startswith(words), done.stderr)

    def test_after_a_killed_keeper(self) -> None:
        """A keeper takes the place of one that was killed."""
        self.keeper.kill()
        argv = [sys.executable, "-I", "-S", keeper.__file__, keeper.PROCESS_NAME, self.path]
        with subprocess.Popen(argv) as process:
            self.addCleanup(process.kill)

            def answers() -> bool:
                try:
                    return KeeperClient.connect(self.path).pid == process.pid
                except OSError:
                    return False

            eventually(answers)
            process.terminate()
