"""`linux.starter` and `linux.starter_client` with a real starter."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from zipfile import ZipFile

import msgspec
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import ConfigurationError
from tawebeval.linux import kernel_files, starter, starter_client
from tawebeval.linux.child import has_process_ended
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.starter import LaunchSpec
from tawebeval.linux.starter_client import (
    ProgramState,
    StarterClient,
    build_program_archive,
    read_exit_file,
    spawn_starter,
)
from tests.cases.patience import PATIENCE
from tests.cases.starters import StarterCase, StarterProcess, eventually, is_alive, sh, turn
from tests.integration.processes import new_word, processes

_OF_THE_C_LIBRARY = 1 << 31 | 1 << 32  # the signals 32 and 33, as bits

_LARGE = "x = bytearray(b'x') * 2**28; print('ready', flush=True); import time; time.sleep(60)"


class ProgramCase(StarterCase):
    def locate(self, name: str = "program") -> Path:
        return self.directory / name

    def make_layers(self) -> tuple[Path, Path, Path]:
        layers = (self.locate("lower"), self.locate("upper"), self.locate("work"))
        for each in layers:
            each.mkdir()
        return layers

    def run_program(self, launch: LaunchSpec, name: str = "program") -> tuple[int, bytes]:
        self.client.start_program(self.locate(name), launch)
        return self.client.wait_for_program(self.locate(name), PATIENCE)

    def open_connection(self, message: bytes) -> socket.socket:
        """Return the connection of another client, which has sent a message."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.addCleanup(connection.close)
        connection.settimeout(PATIENCE)
        connection.connect(str(self.starter.path))
        connection.send(message)
        return connection

    def ask(self, message: bytes) -> bytes:
        """Return the answer to a message of a client of its own; b"" if it is disconnected."""
        with self.open_connection(message) as connection:
            return connection.recv(starter.MAX_MESSAGE_BYTES)

    def request(self, what: str, **members: object) -> None:
        self.client._call({"request": what, "name": str(self.locate()), **members})

    def kill_program(self) -> None:
        self.request("signal", number=9)

    def read_output(self, name: str = "stdout") -> bytes:
        return (self.locate() / name).read_bytes()

    def wait_for_exit(self) -> ProgramState:
        state = eventually(lambda: read_exit_file(self.locate()))
        assert isinstance(state, ProgramState)
        return state


class StartTests(ProgramCase):
    def setUp(self) -> None:
        super().setUp()
        self.noted: list[int | None] = []

    def test_program_gets_only_what_its_specification_names(self) -> None:
        seen = self.run_program(
            LaunchSpec(
                [
                    "/bin/sh",
                    "-c",
                    (
                        "env | sort; pwd; umask; ls /proc/self/fd | wc -l; cat <&3; cat <&4;"
                        " echo x >&5; ulimit -n; cat /proc/self/oom_score_adj;"
                        " cat /proc/self/coredump_filter; nice;"
                        ' read -r pid _ _ _ _ session _ </proc/$$/stat; test "$pid" = "$session"'
                        " && echo leader;"
                        " grep -E '^(SigIgn|SigBlk|CapEff|CapAmb)' /proc/self/status"
                    ),
                ],
                {"PATH": "/usr/bin:/bin", "A": "\udcff"},
                "/tmp",
                [
                    {"text": "text\n"},
                    {"text": "bin\udcffry\n"},
                    {"append": str(self.locate("notes"))},
                ],
                rlimits={"nofile": (77, 78)},
                niceness=3,
                has_own_process_limit=True,
            )
        )
        nice = os.nice(0) + 3
        zeros = "0" * 16
        lines = ["A=\udcff", "PATH=/usr/bin:/bin", "PWD=/tmp", "/tmp", "0022", "7", "text"]
        lines += ["bin\udcffry", "77", "500", "00000000", str(nice), "leader"]
        lines += [f"SigBlk:\t{zeros}"]
        text = os.fsdecode(seen[1])
        shown = [line for line in text.splitlines() if not line.startswith(("Cap", "SigIgn"))]
        self.assertEqual(shown, lines)
        ignored = re.search(r"SigIgn:\t([0-9a-f]+)", text)
        assert ignored is not None, text
        # glibc's posix_spawn leaves the two that it uses itself as they were.
        self.assertEqual(int(ignored[1], 16) & ~_OF_THE_C_LIBRARY, 0)
        self.assertIn(f"CapAmb:\t{zeros}", text)
        self.assertEqual(seen[0], 0)
        self.assertEqual(self.locate("notes").read_text(), "x\n")

    def test_exit_usage_and_output_are_written_to_the_directory(self) -> None:
        self.run_program(sh("echo out; echo error >&2; kill -9 $$"))
        state = self.wait_for_exit()
        assert state.wait_status is not None
        assert state.rusage is not None
        self.assertEqual(os.waitstatus_to_exitcode(state.wait_status), -signal.SIGKILL)
        self.assertGreater(state.rusage[2], 0)
        self.assertTrue(state.is_output_complete)
        self.assertEqual(self.read_output(), b"out\n")
        self.assertEqual(self.read_output("stderr"), b"error\n")

    def test_changes_in_an_overlay_are_seen_only_through_its_descriptor(self) -> None:
        layers = self.make_layers()
        (layers[0] / "file").write_text("old")
        started = self.client.start_program(
            self.locate(), sh(f"cd {layers[1]}; cat file; echo new >file; read x"), layers
        )
        assert started.overlay_descriptor is not None
        self.addCleanup(os.close, started.overlay_descriptor)
        self.client.wait_for_program(self.locate(), PATIENCE)
        again = self.client.reopen_overlay(self.locate())
        assert again is not None
        self.addCleanup(os.close, again)
        file = os.open("file", os.O_RDONLY, dir_fd=again)
        self.addCleanup(os.close, file)
        self.assertEqual(os.read(file, 9), b"new\n")
        self.assertEqual((layers[0] / "file").read_text(), "old")
        self.assertEqual((self.locate() / "stdout").read_text(), "old")

    def test_program_inherits_no_overlay_descriptor_of_another_program(self) -> None:
        layers = self.make_layers()
        started = self.client.start_program(self.locate("first"), sh("sleep 60"), layers)
        assert started.overlay_descriptor is not None
        self.addCleanup(os.close, started.overlay_descriptor)
        self.assertFalse(os.get_inheritable(started.overlay_descriptor))
        self.assertEqual(self.run_program(sh("ls /proc/self/fd")), (0, b"0\n1\n2\n3\n"))

    def test_receive_message_fails_if_the_descriptor_cannot_be_received(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.addCleanup(ours.close)
        self.addCleanup(theirs.close)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        socket.send_fds(theirs, [b"told"], [0])
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        try:
            error = self.assertRaises(OSError, starter.receive_message, ours)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self.assertEqual(error.errno, errno.EMFILE)

    def test_failed_start_names_the_missing_path_and_leaves_no_program(self) -> None:
        layers = (self.locate("none"),) * 3
        true = LaunchSpec(["/bin/true"], {}, "/")
        for launch, overlay, path in (
            (LaunchSpec(["/none"], {}, "/"), (), "/none"),
            (LaunchSpec(["/bin/true"], {}, "/none"), (), "/none"),
            (true, layers, str(self.locate("none"))),
            (sh("", procs_files=["/none/procs"]), (), "/none/procs"),
            (sh("", descriptors=[{"read": "/none"}]), (), "/none"),
        ):
            error = self.assertRaises(
                OSError, self.client.start_program, self.locate(), launch, overlay
            )
            self.assertEqual((error.errno, error.filename), (errno.ENOENT, path))
            self.assertEqual("an overlay cannot be mounted" in str(error), bool(overlay))
            self.assertEqual(self.client.list_programs(), set())
        self.assertEqual(self.run_program(true), (0, b""))

    def test_overlong_start_error_fails_the_start_and_leaves_other_programs_running(self) -> None:
        self.client.start_program(self.locate(), sh("sleep 60"))
        launch = LaunchSpec(["/bin/true"], {}, f"/{'x' * starter.MAX_MESSAGE_BYTES}")
        error = self.assertRaises(OSError, self.client.start_program, self.locate("long"), launch)
        self.assertEqual(error.errno, errno.EMSGSIZE)
        self.assertEqual(self.client.list_programs(), {self.locate()})

    def test_hanging_start_delays_no_other_and_can_be_cancelled(self) -> None:
        fifo = self.locate("fifo")
        os.mkfifo(fifo)
        hanging = sh("", descriptors=[{"read": str(fifo)}])
        thread = Thread(target=self.start_and_note, args=[hanging])
        thread.start()
        eventually(lambda: self.locate("hanging") in self.client.list_programs())
        self.assertEqual(self.run_program(sh("echo done")), (0, b"done\n"))
        self.client.forget_program_blocking(self.locate("hanging"))
        thread.join(PATIENCE)
        self.assertEqual(self.noted, [errno.ECHILD])
        self.assertEqual(self.client.list_programs(), {self.locate()})

    def start_and_note(self, launch: LaunchSpec) -> None:
        try:
            self.client.start_program(self.locate("hanging"), launch)
        except OSError as error:
            self.noted.append(error.errno)

    def test_programs_without_free_descriptors_are_refused(self) -> None:
        few = StarterProcess(starter.RESERVED_FD_COUNT + 2 * starter.STARTER_FDS_PER_PROGRAM)
        self.addCleanup(few.stop)
        client = few.connect()
        self.addCleanup(client.close)
        for name in "ab":
            client.start_program(few.directory / name, sh("sleep 60"))
        error = self.assertRaises(OSError, client.start_program, few.directory / "c", sh(""))
        self.assertEqual(error.errno, errno.EMFILE)
        client.forget_program_blocking(few.directory / "a")
        client.start_program(few.directory / "c", sh(""))
        self.assertEqual(client.wait_for_program(few.directory / "c", PATIENCE)[0], 0)

    def test_starter_kills_a_program_if_the_client_disconnects_before_the_answer(self) -> None:
        self.locate().mkdir()
        content = sh("sleep 60").build_json_object()
        (self.locate() / "start").write_text(json.dumps(content))
        request = {"request": "start", "id": 1, "name": str(self.locate())}
        self.open_connection(json.dumps(request).encode()).close()
        eventually(lambda: not self.client.list_programs())
        eventually(lambda: not _list_children(self.starter.pid))


class OutputTests(ProgramCase):
    def test_output_is_stored_up_to_one_byte_over_its_limit(self) -> None:
        command = "head -c 300000 /dev/zero; exec head -c 99 /dev/zero >&2"
        launch = sh(command, stdout_limit=1000, stderr_limit=99)
        started = self.client.start_program(self.locate(), launch)
        eventually(lambda: (self.locate() / "stdout").stat().st_size == 1001)
        self.assertTrue(is_alive(started.pid))  # it waits
        self.kill_program()
        self.wait_for_exit()
        self.request("close")
        state = self.wait_for_exit()
        self.assertTrue(state.is_output_complete)
        self.assertEqual((self.locate() / "stdout").stat().st_size, 1001)

    def test_close_stores_what_the_pipes_hold(self) -> None:
        self.client.start_program(self.locate(), sh("echo a; sleep 60 & echo b >&2"))
        self.assertFalse(self.wait_for_exit().is_output_complete)
        self.request("close")
        self.assertTrue(self.wait_for_exit().is_output_complete)
        self.assertEqual(self.read_output(), b"a\n")
        self.assertEqual(self.read_output("stderr"), b"b\n")

    def test_signal_reaches_the_group_after_the_program(self) -> None:
        self.client.start_program(self.locate(), sh("sleep 60 & echo $!"))
        self.wait_for_exit()
        other = int((self.locate() / "stdout").read_text())
        self.assertTrue(is_alive(other))
        self.kill_program()
        eventually(lambda: not is_alive(other))

    def test_one_busy_program_does_not_starve_others(self) -> None:
        busy = "while :; do printf x; done"
        self.client.start_program(self.locate("busy"), sh(busy, stdout_limit=2**30))
        for number in range(5):
            self.assertEqual(self.run_program(sh("echo done"), str(number)), (0, b"done\n"))
        self.assertGreater((self.locate("busy") / "stdout").stat().st_size, 0)

    def test_starter_stops_reading_output_if_reads_take_too_much_cpu_time(self) -> None:
        program = """
import os, select, sys
reading, writing = os.pipe()
os.set_inheritable(1, True)
watches = []
try:
    for _ in range(100000):
        watches.append(select.epoll())
        watches[-1].register(1, select.EPOLLOUT | select.EPOLLET)
except OSError:
    pass
while True:
    os.write(1, b"x" * 65536)
"""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        launch = LaunchSpec(
            [sys.executable, "-c", program], {}, "/", rlimits={"nofile": (min(hard, 20000),) * 2}
        )
        self.client.start_program(self.locate(), launch)
        connection, seconds = self.open_connection(b'{"request": "attach"}'), 0.0
        while seconds < starter.MAX_SLOW_READ_CPU_SECONDS:
            seconds = json.loads(connection.recv(65536))["slow_read_cpu_seconds"]
        size = (self.locate() / "stdout").stat().st_size
        time.sleep(0.05)
        self.assertEqual((self.locate() / "stdout").stat().st_size, size)


class FullDiskTests(ProgramCase):
    """A file that takes no byte: here for a limit of its size."""

    needs_own_starter = True

    def limit_files(self, size: int) -> None:
        resource.prlimit(self.starter.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def test_stored_output_has_no_gap_after_a_failed_write(self) -> None:
        program = "import os\nfor i in range(30000): os.write(1, b'%d ' % i)"
        self.client.start_program(
            self.locate(), LaunchSpec([sys.executable, "-c", program], {}, "/")
        )
        self.limit_files(50000)
        connection = self.open_connection(b'{"request": "attach"}')
        while json.loads(connection.recv(65536))["write_errno"] != errno.EFBIG:
            pass
        self.assertLessEqual((self.locate() / "stdout").stat().st_size, 50000)
        self.kill_program()
        self.request("close")
        printed = self.read_output()
        whole = b"".join(b"%d " % i for i in range(30000))
        self.assertTrue(whole.startswith(printed))

    def test_state_has_the_write_error_if_output_is_never_stored(self) -> None:
        self.limit_files(900)
        self.client.start_program(self.locate(), sh("head -c 2000 /dev/zero"))
        self.wait_for_exit()
        self.request("close")
        state = self.wait_for_exit()
        self.assertTrue(state.is_output_complete)
        self.assertEqual(state.write_errno, errno.EFBIG)

    def test_exit_is_written_once_the_disk_has_room_again(self) -> None:
        self.limit_files(0)
        started = self.client.start_program(self.locate(), sh("exit 3"))
        eventually(lambda: not is_alive(started.pid))
        self.assertIsNone(read_exit_file(self.locate()))
        self.limit_files(resource.RLIM_INFINITY)
        self.wait_for_exit()


class ClientTests(ProgramCase):
    def test_client_that_sends_a_malformed_message_is_disconnected(self) -> None:
        said = (self.starter.directory / "said").open()
        self.addCleanup(said.close)
        said.read()
        for message in (
            b"nonsense",
            b"[]",
            b"{}",
            b"[" * 60000,
            b'{"request": "version", "id": 1, "name": "' + b"x" * 70000,
            b'{"request": "start", "id": 1}',
        ):
            self.assertEqual(self.ask(message), b"", message[:40])
        self.assertEqual(self.run_program(sh("")), (0, b""))
        text = said.read()
        self.assertEqual(text.count("tawebeval-starter: a request fails: "), text.count("\n"))

    def test_request_that_fails_is_answered(self) -> None:
        for request in (
            {"request": "unknown", "name": "/a"},
            {"request": "signal", "name": "/a", "number": 9},
            {"request": "start", "name": "/none"},
        ):
            answer = json.loads(self.ask(json.dumps({"id": 7, **request}).encode()))
            self.assertIn("error", answer)

    def test_broken_start_files_are_refused(self) -> None:
        self.locate().mkdir()
        for content in (
            b"",
            b"[]",
            b'{"argv": [], "unknown": 1}',
            b"{}",
            b'{"argv": ["/bin/true"], "descriptors": [{}]}',
            b" " * (starter.MAX_START_FILE_BYTES + 1),
        ):
            (self.locate() / "start").write_bytes(content)
            with self.assertRaises(OSError, msg=content[:40]):
                self.request("start")
        self.assertEqual(self.client.list_programs(), set())
        self.assertEqual(self.run_program(sh("")), (0, b""))

    def test_client_that_reads_no_answers_is_disconnected(self) -> None:
        deaf = self.open_connection(b'{"request": "attach"}')
        deaf.setblocking(False)
        for _ in range(2000):
            try:
                deaf.send(b'{"request": "version", "id": 1}')
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                break
        else:
            self.fail("it was not disconnected")
        self.assertEqual(self.run_program(sh("")), (0, b""))

    def test_clients_without_free_descriptors_are_served_later(self) -> None:
        few = StarterProcess(starter.RESERVED_FD_COUNT)
        self.addCleanup(few.stop)
        with contextlib.ExitStack() as opened:
            for _ in range(starter.RESERVED_FD_COUNT + 20):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                opened.enter_context(connection).connect(str(few.path))
            connection.send(b'{"request": "version", "id": 1}')
            connection.settimeout(0.3)  # at least one attempt of the starter's
            self.assertRaises(TimeoutError, connection.recv, 1)
        client = few.connect()
        self.addCleanup(client.close)
        self.assertEqual(client.list_programs(), set())

    def test_calls_use_a_connection_again_but_not_after_a_failure(self) -> None:
        self.client.start_program(self.locate(), sh("sleep 60"))
        (kept,) = self.client._idle
        self.client.forget_program_blocking(self.locate())
        self.assertEqual(self.client._idle, [kept])
        self.assertRaises(OSError, self.client.forget_program_blocking, self.locate())
        self.assertEqual((self.client._idle, kept.fileno()), ([], -1))

    def test_list_has_running_and_ended_programs(self) -> None:
        names = [self.locate(f"{number}") for number in range(4)]
        for name in names:
            self.client.start_program(name, sh(""))
        self.assertEqual(self.client.list_programs(), set(names))


class LifeTests(ProgramCase):
    needs_own_starter = True

    def test_stop_kills_all_programs_first(self) -> None:
        # The kernel takes a while to end a process with much memory.
        large = LaunchSpec(["/usr/bin/python3", "-c", _LARGE], {}, "/")
        started = self.client.start_program(self.locate(), large)
        eventually(self.read_output)
        self.client.stop_starter()
        self.assertFalse(is_alive(started.pid))
        self.assertFalse(self.client.is_starter_alive)
        self.assertRaises(OSError, self.client.list_programs)

    def test_stop_in_the_middle_of_a_start_kills_the_program(self) -> None:
        path, word = self.starter.directory / "stopped" / "socket", new_word()
        path.parent.mkdir(mode=0o700)
        code = (
            "import signal, sys; from tawebeval.linux import starter; fork = starter._fork\n"
            "def fork_and_stop(execute):\n"
            "    pid = fork(execute); signal.raise_signal(signal.SIGTERM); return pid\n"
            "starter._fork = fork_and_stop; starter.main()"
        )
        argv = [sys.executable, "-c", code, starter.PROCESS_NAME, str(path)]
        with subprocess.Popen(argv, env={"PYTHONPATH": ":".join(sys.path)}) as process:
            eventually(path.exists)
            client = StarterClient.connect(path)
            self.addCleanup(client.close)
            with contextlib.suppress(OSError):  # the starter ends
                client.start_program(self.locate(), sh(f"sleep 600; : {word}"))
            self.assertEqual(process.wait(PATIENCE), 0)
        self.assertEqual(processes(word), [])

    def test_orphans_are_reaped(self) -> None:
        self.run_program(sh("(setsid sleep 0.05 &) ; :"))
        eventually(lambda: not _list_children(self.starter.pid))

    def test_second_starter_of_a_socket_is_refused(self) -> None:
        error = self.assertRaises(OSError, spawn_starter, self.starter.path)
        self.assertIn("another starter listens here", str(error))

    def test_socket_of_a_dead_starter_is_replaced(self) -> None:
        self.starter.kill()
        spawn_starter(self.starter.path)
        client = self.connect()
        self.assertNotEqual(client.pid, self.starter.pid)
        client.stop_starter()

    def test_starter_ends_when_the_daemon_that_spawned_it_is_killed(self) -> None:
        path = self.starter.directory / "child" / "socket"
        code = (
            "import sys; from pathlib import Path;"
            "from tawebeval.linux.starter_client import StarterClient, spawn_starter;"
            f"spawn_starter(Path({str(path)!r}));"
            f"print(StarterClient.connect(Path({str(path)!r})).pid, flush=True); sys.stdin.read()"
        )
        pipe, environment = subprocess.PIPE, {"PYTHONPATH": ":".join(sys.path)}
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=pipe, stdout=pipe, env=environment
        ) as parent:
            assert parent.stdout is not None
            pidfd = os.pidfd_open(int(parent.stdout.readline()))
            self.addCleanup(os.close, pidfd)
            self.assertFalse(has_process_ended(pidfd))
            parent.kill()
        eventually(lambda: has_process_ended(pidfd))

    def test_starter_refuses_a_socket_directory_open_to_other_users(self) -> None:
        folder = self.starter.directory / "open"
        folder.mkdir(mode=0o755)
        error = self.assertRaises(OSError, spawn_starter, folder / "socket")
        self.assertIn("install -d -m 700", str(error))

    def test_socket_may_have_a_long_path(self) -> None:
        folder = self.starter.directory / ("x" * 120)
        spawn_starter(folder / "socket")
        client = StarterClient.connect(folder / "socket")
        self.addCleanup(client.close)
        client.start_program(folder / "program", sh("echo hello"))
        self.assertEqual(client.wait_for_program(folder / "program", PATIENCE), (0, b"hello\n"))
        client.stop_starter()

    def test_starter_of_another_version_is_refused(self) -> None:
        self.patch(starter, "PROTOCOL_VERSION", starter.PROTOCOL_VERSION + 1)
        self.assertRaises(ConfigurationError, self.starter.connect)

    def test_connecting_to_a_starter_that_does_not_answer_times_out(self) -> None:
        self.patch(starter_client, "_TIMEOUT", struct.pack("ll", 0, 50_000))
        self.starter.process.send_signal(signal.SIGSTOP)
        self.addCleanup(self.starter.process.send_signal, signal.SIGCONT)
        self.assertRaises(TimeoutError, self.connect)


class BrokerTests(ProgramCase):
    needs_own_starter = True

    BROKER = (
        "import socket\n"
        "listening = socket.socket(fileno=3)\n"
        "while True:\n"
        "    connection, _ = listening.accept()\n"
        "    connection.send(open(TREE).read().encode())\n"
    )

    def start(self, broker: LaunchSpec | None = None, command: str = "sleep 60") -> Path:
        layers = self.make_layers()
        (layers[0] / "file").write_text("lower")
        source = f"TREE = {str(layers[1] / 'file')!r}\n{self.BROKER}"
        broker = broker or LaunchSpec(
            [sys.executable, "-c", source], {}, "/", [{"socket": ""}], niceness=1
        )
        path = self.locate("runner")
        started = self.client.start_program(
            self.locate(),
            sh(command, broker_specification=broker, broker_socket_path=str(path)),
            layers,
        )
        assert started.overlay_descriptor is not None
        os.close(started.overlay_descriptor)
        self.program_pid = started.pid
        return path

    def talk(self, path: Path) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(PATIENCE)
            try:
                connection.connect(str(path))
                return connection.recv(99)
            except (ConnectionRefusedError, ConnectionResetError):
                return b""

    def test_broker_sees_the_overlay_and_ends_with_the_program(self) -> None:
        path = self.start()
        self.assertEqual(self.client._listeners, {})
        self.assertEqual(self.talk(path), b"lower")
        self.assertEqual(self.talk(path), b"lower")
        (broker,) = _list_children(self.starter.pid) - {self.program_pid}
        self.kill_program()
        self.wait_for_exit()
        self.assertFalse(is_alive(broker))  # before the end is told
        self.assertEqual(self.talk(path), b"")

    def test_broker_is_not_started_unless_the_program_connects(self) -> None:
        self.start(command=":")
        self.wait_for_exit()
        self.assertFalse((self.locate() / "broker-stderr").exists())

    def test_broker_that_cannot_run_is_reported_as_an_error(self) -> None:
        for argv, directory in ((["/none"], "/"), (["/bin/true"], "/none")):
            path = self.start(LaunchSpec(argv, {}, directory))
            self.assertEqual(self.talk(path), b"")
            while self.look().broker_error is None:
                pass
            self.assertIn("none", (self.locate() / "broker-stderr").read_text())
            self.client.forget_program_blocking(self.locate())
            for name in ("lower", "upper", "work"):
                remove_tree(self.locate(name))

    def test_stderr_of_a_broker_is_stored(self) -> None:
        self.talk(self.start(sh("echo said >&2")))
        eventually(lambda: (self.locate() / "broker-stderr").read_bytes() == b"said\n")

    def look(self) -> ProgramState:
        message = {"request": "look", "name": str(self.locate())}
        return msgspec.json.decode(self.ask(json.dumps(message).encode()), type=ProgramState)


class AttachedTests(StarterCase):
    needs_own_starter = True

    def setUp(self) -> None:
        super().setUp()
        self.states: list[ProgramState] = []
        self.lost: Deferred[None] = Deferred()

    def on_program_state(self, state: ProgramState | None) -> None:
        if state is None:
            self.lost.callback(None)
            return
        self.states.append(state)

    async def test_watcher_of_an_unknown_program_gets_the_state_unknown(self) -> None:
        self.client.attach_reactor(reactor)
        self.client.watch_program(Path("/none"), self.on_program_state)
        while not self.states:
            await turn()
        self.assertTrue(self.states[0].is_unknown)

    async def test_watchers_are_notified_when_the_starter_ends(self) -> None:
        told = []
        self.client.attach_reactor(reactor, lambda: told.append("lost"))
        self.client.watch_program(Path("/none"), self.on_program_state)
        self.starter.kill()
        await self.lost
        self.assertEqual(told, ["lost"])
        lost: Deferred[object] = Deferred()
        self.client.watch_program(Path("/none"), lost.callback)
        self.assertIsNone(await lost)
        self.client.signal_program(Path("/none"), 9)  # does nothing

    async def test_requests_are_queued_while_the_starter_reads_nothing(self) -> None:
        self.client.attach_reactor(reactor)
        os.kill(self.starter.pid, signal.SIGSTOP)
        for _ in range(1000):
            self.client.signal_program(Path("/none"), 9)
        self.assertTrue(self.client._requests)
        os.kill(self.starter.pid, signal.SIGCONT)
        while self.client._requests:
            await turn()
        self.assertGreaterEqual(self.client.fileno(), 0)

    async def test_client_loses_the_starter_if_too_many_requests_are_queued(self) -> None:
        self.patch(starter_client, "_MAX_REQUESTS", 1)
        self.client.attach_reactor(reactor)
        self.client.watch_program(Path("/none"), self.on_program_state)
        os.kill(self.starter.pid, signal.SIGSTOP)
        self.addCleanup(os.kill, self.starter.pid, signal.SIGCONT)
        for _ in range(1000):
            self.client.signal_program(Path("/none"), 9)
        await self.lost


def _list_children(pid: int) -> set[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return set(map(int, file.read().split()))


class ProgramTests(SynchronousTestCase):
    def test_program_runs_without_tawebeval(self) -> None:
        program = Path(self.mktemp())
        program.write_bytes(build_program_archive(starter, kernel_files))
        argv = [sys.executable, "-I", "-S", str(program), starter.PROCESS_NAME, "/none/socket"]
        done = subprocess.run(argv, env={}, capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("tawebeval-starter: /none/socket: cannot listen there", done.stderr)

    def test_files_in_the_packed_program_have_a_fixed_date(self) -> None:
        archive = ZipFile(io.BytesIO(build_program_archive(kernel_files)))
        self.assertEqual({each.date_time[:3] for each in archive.infolist()}, {(1980, 1, 1)})
