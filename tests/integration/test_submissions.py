"""Programs of submissions, run by `tawebeval-run`: what they get, and attacks on the evaluator.

Each attack is seen to succeed first, by a program that the evaluator runs itself.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.integration.attacks.case import AttackCase
from tests.integration.cgroups import needs_cgroups
from tests.integration.client import joined, python, text
from tests.integration.harness import CONFIGURATION

MIB = 2**20

LIMITS = f"""
[limits]
wall_clock = 300
memory = {256 * MIB}
processes = 400
"""

PREPARE = 'echo secret-word > "$TEMPORARY_DIRECTORY/expected"; '
PLAINLY = 'python3 -S -u "$SUBMISSION_FILE_S" 2>/dev/null'
APART = 'tawebeval-run {} --report ~/report --read "$SUBMISSION_FILE_S" -- ' + PLAINLY

# Reads the expected answer, the environment of all processes, and what they have opened.
SPY = """
import glob
for path in ["/evaluation/tmp/expected", *glob.glob("/proc/*/environ")]:
    try:
        content = open(path, "rb").read()
        print("SAW", path) if b"secret-word" in content or b"EVALUATION_DATA" in content else None
    except OSError:
        pass
"""
# Prints in the evaluator's name, by the descriptors of its processes.
FORGE = """
import glob, os
for path in glob.glob("/proc/*/fd/*"):
    if path.split("/")[2] not in ("1", "self", "thread-self", str(os.getpid())):
        try:
            os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b"FORGED\\n")
        except OSError:
            pass
"""
# Kills, or stops, all processes that it may.
KILL = """
import os, signal
try:
    os.kill(-1, signal.SIGKILL)
except OSError as error:
    print("cannot kill:", error.strerror)
"""
# Reads what it is given as its input, and changes that.
SPOIL = """
import os
descriptor = os.open("/proc/self/fd/0", os.O_RDWR | os.O_NONBLOCK)
os.write(descriptor, b"SPOILT")
"""
# Leaves a process that lives on, deaf to signals and with stdout open.
REMAIN = """
import os, signal
told, tell = os.pipe()  # which is closed when the last process becomes sleep(1)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        os.execvp("sleep", ["sleep", "600"])
    os._exit(0)
os.close(tell)
os.read(told, 1)
print("begun")
"""
# Opens the socket by which programs are run, and the network.
REACH = """
import os, socket
print("socket" if os.path.exists("/evaluation/runner") else "no socket")
print(sorted(os.listdir("/evaluation")) if os.path.exists("/evaluation") else "nothing")
"""


class SubmissionCase(AttackCase):
    configuration = CONFIGURATION + LIMITS

    async def submit(self, program: str, command: str) -> str:
        """Return what an evaluator prints that runs `command` on a submitted program."""
        return text(await self.run_command(command, files=[("s", "s", program.encode())]))

    async def run_apart(
        self, program: str, options: str = "", before: str = PREPARE, after: str = ""
    ) -> tuple[str, dict[str, Any]]:
        command = f"{before}{APART.format(options)}; echo status $?; {after} echo; cat ~/report"
        printed, _, report = (await self.submit(program, command)).rstrip("\n").rpartition("\n")
        return printed, json.loads(report)


class SubmissionRuns(SubmissionCase):
    async def test_run_has_stdin_arguments_environment_files_status_and_report(self) -> None:
        self.repository.write("input", "one\n")
        self.commit = self.repository.commit()
        printed = await self.run_command(
            'mkdir ~/out; echo two | tawebeval-run --read "$PWD/input:/given" --write ~/out'
            " --env A=b --dir ~/out --time 50 --wall 90 --report ~/r --"
            " sh -c 'cat - /given >\"$1\"; echo $A $HOME; pwd; echo wrong >&2; exit 3' name result;"
            " echo $?; cat ~/out/result ~/r"
        )
        *lines, report = text(printed).splitlines()
        self.assertEqual(
            lines, ["b /tmp", "/evaluation/home/out", "3", "two", "one"], "wrong is on stderr"
        )
        found = json.loads(report)
        self.assertEqual((found["exit_status"], found["signal"], found["reason"]), (3, None, None))
        self.assertGreater(found["wall_seconds"], 0)

    async def test_exit_statuses_are_those_of_env_and_timeout(self) -> None:
        commands = {
            "tawebeval-run -- true": 0,
            "tawebeval-run -- sh -c 'kill -9 $$'": 137,
            "tawebeval-run -- no-such-program": 127,
            "tawebeval-run -- /usr": 126,
            "tawebeval-run --wall 0.1 -- sleep 9": 124,
            "tawebeval-run --read /etc/passwd -- true": 125,
            "tawebeval-run --memory 64 -- true 2>/dev/null": 125,
            "tawebeval-run --read /evaluation/tmp:/usr/x -- true": 125,
            "tawebeval-run --dir /nowhere -- true 2>/dev/null": 125,
            "tawebeval-run --time 0 -- true": 125,
        }
        printed = await self.run_command("; ".join(f"{each}; echo $?" for each in commands))
        self.assertEqual(text(printed).split(), [str(status) for status in commands.values()])

    async def test_hundred_runs_leave_nothing(self) -> None:
        printed = await self.run_command(
            "for i in 1 2 3 4 5 6 7 8 9 10; do for j in 1 2 3 4 5 6 7 8 9 10; do"
            ' tawebeval-run -- echo "done" 2>&1 & done; wait; done'
        )
        self.assertEqual(joined(printed), ["done\n" * 100])
        await self.daemon.nothing_left()

    async def test_run_ends_when_its_tawebeval_run_is_killed(self) -> None:
        printed = await self.run_command(
            "mkdir ~/out; tawebeval-run --write ~/out -- sh -c 'while sleep 0.05; do date >>"
            " /evaluation/home/out/beat; done' & cd ~/out; until [ -s beat ]; do sleep 0.05; done;"
            " kill -9 $!; until wc -l <beat >one; sleep 1; wc -l <beat | cmp -s - one; do :; done;"
            " echo silent"
        )
        self.assertEqual(text(printed), "silent\n")

    async def test_program_has_only_three_descriptors_with_up_to_256_read_paths(self) -> None:
        printed = await self.run_command(
            "mkdir ~/d; cd ~/d; for i in $(seq 256); do echo $i >$i; done;"
            " for n in 1 2 100 200 235 $(seq 240 256); do set --; for i in $(seq $n); do"
            ' set -- "$@" --read ~/d/$i:/x/$i; done;'
            " tawebeval-run \"$@\" -- sh -c 'cd /proc/self/fd; echo *; cat /x/*' >~/o;"
            ' set -- $(tr "\\n" " " <~/o); echo $1 $2 $3 $(($# - n)); done'
        )
        # The shell has opened the directory that it lists.
        self.assertEqual(set(text(printed).splitlines()), {"0 1 2 4"})


class SubmissionLimits(SubmissionCase):
    async def limited(self, program: str, options: str, reason: str) -> dict[str, Any]:
        printed, report = await self.run_apart(program, options, after="echo alive;")
        self.assertEqual(report["reason"], reason, printed)
        self.assertIn("status 124", printed)
        self.assertIn("alive", printed)
        return report

    @needs_cgroups
    async def test_memory_of_each_kind_is_limited(self) -> None:
        heap = "x = bytearray(200 * 2**20)\nprint('had it')"
        children = (
            "import os, time\nfor n in range(8):\n    if not os.fork():\n"
            "        x = bytearray(20 * 2**20)\n        time.sleep(600)\nos.wait()"
        )
        files = (
            "import os\nfor n in range(20):\n    d = os.memfd_create('x')\n"
            "    for m in range(10): os.write(d, bytes(2**20))"
        )
        for program in (heap, children, files):
            report = await self.limited(program, "--memory 64M --wall 300", "memory")
            self.assertLess(report["peak_memory_bytes"], 65 * MIB)

    async def test_stack_of_the_main_thread_counts_as_memory(self) -> None:
        program = (
            "import ctypes, time\n"
            "(stack,) = [line for line in open('/proc/self/maps') if '[stack]' in line]\n"
            "for page in range(1, 120 * 256):\n"
            "    ctypes.memset(int(stack.split('-')[0], 16) - page * 4096, 1, 1)\n"
            "time.sleep(600)"
        )
        report = await self.limited(program, "--memory 64M --wall 300", "memory")
        self.assertLess(report["peak_memory_bytes"], 65 * MIB)

    async def test_sixteen_threads_run_within_64_mib(self) -> None:
        program = (
            "import threading\ngate = threading.Barrier(17)\n"
            "for n in range(16): threading.Thread(target=gate.wait).start()\n"
            "gate.wait()\nprint('all run')"
        )
        printed, report = await self.run_apart(program, "--memory 64M")
        self.assertIn("all run", printed)
        self.assertEqual(report["exit_status"], 0)

    @needs_cgroups
    async def test_default_limits_leave_room_for_the_evaluator(self) -> None:
        await self.limited("x = bytearray(220 * 2**20)", "", "memory")
        forks = "import os, time\nfor n in range(350):\n    if not os.fork(): time.sleep(600)"
        await self.limited(forks, "", "processes")

    async def test_output_is_cut_at_its_limit(self) -> None:
        printed, report = await self.run_apart("while True: print('x' * 99)", "--output 1000")
        self.assertEqual(report["reason"], "output")
        self.assertEqual(len(printed.partition("status")[0].rstrip("\n")), 1000 - 1)

    async def test_large_files_do_not_reach_the_disk_of_the_evaluator(self) -> None:
        write = (
            "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
            "with open('/tmp/x', 'wb') as f:\n    while True: f.write(bytes(2**20))"
        )
        await self.limited(write, "--file-size 1M", "output")
        printed, _ = await self.run_apart(write)
        self.assertIn("status 1", printed)

    async def over_memory(self, program: str, command: str) -> str:
        """Hold that the evaluation fails with `memory`; return what the evaluator has printed."""
        events = await self.run_command(command, files=[("s", "s", program.encode())])
        last = events[-1]["payload"]
        self.assertIsInstance(last, dict, text(events))
        self.assertEqual(last["reason"], "memory", last)
        return text(events)

    @needs_cgroups
    async def test_run_killed_at_the_memory_limit_of_the_evaluation_has_no_verdict(self) -> None:
        evaluator = f"""
import os, subprocess
held = bytearray(100 * 2**20)
subprocess.run(["sh", "-c", {APART.format("--wall 60")!r}])
print(open(os.path.expanduser("~/report")).read(), flush=True)
"""
        printed = await self.over_memory("x = bytearray(180 * 2**20)", python(evaluator))
        self.assertNotIn("reason", printed, "no verdict is reported")

    @needs_cgroups
    async def test_runs_share_the_memory_of_the_evaluation(self) -> None:
        program = "import time\nx = bytearray(100 * 2**20)\ntime.sleep(600)"
        run = 'tawebeval-run --read "$SUBMISSION_FILE_S" --wall 20 --memory 200M --report ~/$i -- '
        command = f"for i in 1 2 3 4; do {run}{PLAINLY} & done; wait; cat ~/[1-4]"
        await self.over_memory(program, command)


class SubmissionAttacks(SubmissionCase):
    async def test_program_sees_no_expected_answer_and_no_marker_of_the_evaluator(self) -> None:
        self.assertIn("SAW", await self.submit(SPY, PREPARE + PLAINLY))
        printed, _ = await self.run_apart(SPY)
        self.assertEqual(printed.split(), ["status", "0"])

    async def test_program_cannot_write_to_stdout_of_the_evaluator(self) -> None:
        self.assertIn("FORGED", await self.submit(FORGE, PLAINLY + ">/dev/null; sleep 0.1"))
        printed, _ = await self.run_apart(FORGE + "\nprint('own')")
        self.assertEqual(printed.split(), ["own", "status", "0"])

    async def test_program_cannot_kill_the_evaluator(self) -> None:
        self.assertNotIn("alive", await self.submit(KILL, PLAINLY + "; echo alive"))
        printed, _ = await self.run_apart(KILL, after="echo alive;")
        self.assertIn("alive", printed)

    async def test_program_cannot_change_its_input_file(self) -> None:
        given = "echo given > ~/in; "
        after = "; cat ~/in"
        self.assertIn("SPOILT", await self.submit(SPOIL, given + PLAINLY + "<~/in" + after))
        command = given + APART.format("") + "<~/in" + after
        self.assertEqual(await self.submit(SPOIL, command), "given\n")

    async def test_no_process_outlives_its_run(self) -> None:
        look = "; cat /proc/[0-9]*/comm | grep -c sleep; true"
        self.assertEqual((await self.submit(REMAIN, PLAINLY + look)).split(), ["begun", "1"])
        printed = await self.submit(REMAIN, APART.format("--wall 20") + look)
        self.assertEqual(printed.split(), ["begun", "0"])

    async def test_socket_and_directories_of_the_evaluator_are_hidden(self) -> None:
        self.assertIn("socket", (await self.submit(REACH, PLAINLY)).splitlines())
        printed, _ = await self.run_apart(REACH)
        self.assertEqual(printed.splitlines()[:2], ["no socket", "['submission']"])

    async def test_report_is_not_written_through_a_link(self) -> None:
        printed = await self.run_command(
            "echo kept > ~/file; ln -s file ~/link; tawebeval-run --report ~/link -- true;"
            " echo $?; cat ~/file"
        )
        self.assertEqual(text(printed).split(), ["125", "kept"])


class RequestAttacks(SubmissionCase):
    async def test_forged_requests_are_refused(self) -> None:
        program = r"""
import json, os, socket
def ask(message, descriptors=()):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.connect("/evaluation/runner")
        try:
            socket.send_fds(one, [message], descriptors)
            answer, given, _, _ = socket.recv_fds(one, 65536, 3)
            assert len(given) == (3 if answer == b"streams" else 0)
            for descriptor in given:
                os.close(descriptor)
            return json.loads(one.recv(65536) if given else answer).get("error", "served")
        except OSError as error:
            return f"error {error.errno}"
good = {"version": 4, "command": ["/bin/true"]}
def changed(**more):
    return json.dumps({**good, **more}).encode()
for message in (
    b"", b"nonsense", b"[" * 100000, b"x" * 150000, b"[]", b"{}", changed(version=1),
    changed(command=[]), changed(command=["a\0b"]), changed(command="true"), changed(command=[1]),
    changed(read=[["/etc/shadow", "/x"]]), changed(read=[["/evaluation/tmp/../..", "/x"]]),
    changed(read=["/x"]), changed(write=[["/evaluation/submission", "/x"]]),
    changed(read=[["/evaluation/tmp", "/x"], ["/evaluation/home", "/x/y"]]),
    changed(read=[["/evaluation/runner", "/x"]]), changed(read=[["/evaluation/tmp", "/proc/1"]]),
    changed(time=-1), changed(memory=1e400), changed(memory=True), changed(processes="1"),
    changed(environment={"A=": "b"}), changed(environment={"A": 1}), changed(paths=[]),
    changed(more=1), changed(stdin="file"),
    changed(read=[["/evaluation/tmp", f"/x{n}"] for n in range(300)]),
):
    answer = ask(message)
    assert answer != "served", message[:80]
for descriptors in ((), [0] * 9):  # which nobody takes
    assert ask(changed(), descriptors) == "served", descriptors
for _ in range(50):  # and those that send nothing
    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect("/evaluation/runner")
print(ask(json.dumps(good).encode()))
"""
        attacked = await self.attack(program)
        self.assertEqual(attacked.text, "served\n")

    async def test_run_reads_no_outside_file_through_a_path_swapped_for_a_link(self) -> None:
        # The evaluator knows where its directories lie on the machine.
        outside = self.daemon.state / "outside"
        outside.mkdir(exist_ok=True)
        (outside / "file").write_text("secret-word")
        os.chmod(outside, 0o755)
        self.addCleanup(_remove, outside)
        program = r"""
import os, subprocess, sys, threading, time
home = os.environ["HOME"]
# Relative, so that it leads out where bwrap follows it, too.
os.symlink("../../../outside", home + "/link")
os.mkdir(home + "/place"); open(home + "/place/file", "w").write("own")
def flip():
    while True:
        os.rename(home + "/place", home + "/away"); os.rename(home + "/link", home + "/place")
        time.sleep(0.001)
        os.rename(home + "/place", home + "/link"); os.rename(home + "/away", home + "/place")
        time.sleep(0.004)
threading.Thread(target=flip, daemon=True).start()
served = 0
os.mkdir(home + "/more")
for n in range(250):
    open(f"{home}/more/{n}", "w").close()
for attempt in range(60):
    more = [f"--read={home}/more/{n}:/x/{n}" for n in range((0, 238 + attempt % 12)[attempt % 2])]
    done = subprocess.run(
        ["tawebeval-run", *more, "--read", home + "/place/file:/given", "--", "cat", "/given"],
        capture_output=True,
    )
    served += done.stdout == b"own"
    assert done.stdout in (b"", b"own"), done
print("served some" if served else "served none")
"""
        attacked = await self.attack(program)
        self.assertEqual(attacked.text, "served some\n")


def _remove(folder: Path) -> None:
    (folder / "file").unlink()
    folder.rmdir()
