"""`slurm.node`: the program on the node, as a process of its own, with shells as evaluators."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.slurm.job import write_node_program
from tests.cases.patience import PATIENCE
from tests.integration.processes import new_word, processes

_SPIN = "import os, signal; signal.signal(15, signal.SIG_IGN)\nwhile True: pass"
_HOLD = "import os, time; f = open('held', 'wb', 0); os.unlink('held'); f.write(bytes(2**22))"


class NodeJobTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.parent = Path(tempfile.mkdtemp(prefix="tawebeval-test-"))
        self.addCleanup(shutil.rmtree, self.parent, ignore_errors=True)
        self.program = write_node_program(self.parent)
        self.evaluations = self.parent / "evaluations"
        self.directory = self.evaluations / "evaluation" / "job"
        (self.directory / "output").mkdir(parents=True)
        (self.directory / "signal").touch()

    def write_start(self, *argv: str) -> None:
        broker = {"argv": ["/bin/false"], "descriptors": [{"text": ""}, {"text": "{}"}]}
        content = {
            "argv": argv,
            "directory": str(self.directory),
            "broker_specification": broker,
            "broker_socket_path": str(self.directory / "runner"),
        }
        (self.directory / "output" / "start").write_text(json.dumps(content))

    def start(self, *argv: str, cpu: float = 100, disk: int = 2**30) -> subprocess.Popen[bytes]:
        self.write_start(*argv)
        process = subprocess.Popen(
            [
                *("/usr/bin/python3", "-I", "-S", str(self.program), str(self.directory)),
                *(str(cpu), str(disk)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def read_state(self) -> dict[str, Any]:
        path = self.directory / "state"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.02)

    def finish(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        said, _ = process.communicate(timeout=PATIENCE)
        self.assertEqual((process.returncode, said), (0, b""))
        return self.read_state()

    def test_output_and_exit_are_in_files(self) -> None:
        state = self.finish(self.start("/bin/sh", "-c", "echo out; echo err >&2; exit 3"))
        self.assertEqual(os.waitstatus_to_exitcode(state["wait_status"]), 3)
        self.assertTrue(state["is_output_complete"])
        self.assertIsNone(state["exceeded_limit"])
        output = self.directory / "output"
        self.assertEqual((output / "stdout").read_text(), "out\n")
        self.assertEqual((output / "stderr").read_text(), "err\n")

    def test_node_program_replaces_the_launch_file_without_truncating_it(self) -> None:
        self.write_start("/bin/true")
        path = self.directory / "output" / "start"
        written = path.read_text()
        with path.open() as before:
            self.finish(self.start("/bin/true"))
            self.assertEqual(before.read(), written)
        self.assertNotEqual(path.read_text(), written)

    def test_state_names_the_running_process(self) -> None:
        process = self.start("/bin/sleep", "600")
        self.wait(self.read_state, "it is started")
        state = self.read_state()
        self.assertNotIn("wait_status", state)
        self.assertEqual(Path(f"/proc/{state['pid']}/comm").read_text(), "sleep\n")
        with (self.directory / "signal").open("a") as file:
            file.write(f"{signal.SIGTERM}\n")
        self.assertEqual(
            os.waitstatus_to_exitcode(self.finish(process)["wait_status"]), -signal.SIGKILL
        )

    def test_signal_written_to_the_file_reaches_the_evaluator(self) -> None:
        # The first process inside is killed if it is alone, as bwrap's is: another one stays.
        inside = "trap 'echo told; exit 5' TERM; sleep 600 & echo on; while :; do sleep 0.1; done"
        process = self.start("/bin/sh", "-c", f'sh -c "{inside}"; exit $?')
        stdout = self.directory / "output" / "stdout"
        self.wait(lambda: stdout.exists() and stdout.read_text(), "it prints")
        with (self.directory / "signal").open("a") as file:
            file.write(f"{signal.SIGTERM}\n")
        self.assertEqual(os.waitstatus_to_exitcode(self.finish(process)["wait_status"]), 5)
        self.assertEqual(stdout.read_text(), "on\ntold\n")

    def test_evaluator_over_its_cpu_time_limit_is_ended(self) -> None:
        state = self.finish(
            self.start("/bin/sh", "-c", f'{shlex.quote(sys.executable)} -c "{_SPIN}"', cpu=0.5)
        )
        self.assertEqual(state["exceeded_limit"], "cpu")

    def test_unlinked_open_files_count_towards_the_disk_limit(self) -> None:
        program = f'{shlex.quote(sys.executable)} -c "{_HOLD}; time.sleep(600)"; exit 0'
        state = self.finish(self.start("/bin/sh", "-c", program, disk=2**20))
        self.assertEqual(state["exceeded_limit"], "disk")

    def test_error_of_a_failed_start_is_in_the_state_file(self) -> None:
        state = self.finish(self.start("/nonexistent"))
        self.assertIn("No such file", state["error"])

    def test_evaluator_ends_when_its_directory_is_removed(self) -> None:
        word = new_word()
        process = self.start("/bin/sh", "-c", f"sleep 600; : {word}")
        self.wait(self.read_state, "it is started")
        self.directory.rename(self.parent / "removed")  # at once: the program writes there
        said, _ = process.communicate(timeout=PATIENCE)
        self.assertEqual(said, b"the daemon has removed the evaluation\n")
        self.wait(lambda: not processes(word), "the evaluator is gone")

    def test_evaluator_outlives_an_absence_of_the_shared_directory(self) -> None:
        gate = self.parent / "gate"
        os.mkfifo(gate)
        process = self.start("/bin/sh", "-c", f"read line < {gate}; echo on")
        self.wait(self.read_state, "it is started")
        self.evaluations.rename(self.parent / "away")
        time.sleep(0.5)  # the program looks for signals meanwhile
        gate.write_text("\n")
        time.sleep(0.5)  # ... and cannot tell the end
        (self.parent / "away").rename(self.evaluations)
        self.assertEqual(self.finish(process)["wait_status"], 0)
        self.assertEqual((self.directory / "output" / "stdout").read_text(), "on\n")

    def test_evaluator_ends_when_the_node_program_is_killed(self) -> None:
        word = new_word()
        bwrap = ("/usr/bin/bwrap", "--die-with-parent", "--ro-bind", "/", "/")
        process = self.start(*bwrap, "/bin/sh", "-c", f"echo on; sleep 600; : {word}")
        stdout = self.directory / "output" / "stdout"
        self.wait(lambda: stdout.exists() and stdout.read_text(), "it prints")
        process.kill()
        self.wait(lambda: not processes(word), "the evaluator is gone")

    def test_program_imports_few_modules(self) -> None:
        python = ("/usr/bin/python3", "-I", "-S", "-X", "importtime")
        ended = subprocess.run([*python, self.program], capture_output=True)
        self.assertIn(ended.stderr.count(b"import time:"), range(50, 150))
