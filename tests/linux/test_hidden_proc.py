"""`linux.starter` where /proc hides others, as by `ProtectProc=invisible`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from typing import Any

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tawebeval.linux.starter_client import STARTER_ARCHIVE
from tests.cases.patience import LONG_PATIENCE

_USER = "65534"
_HIDE = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
_PREFIX = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _HIDE, "sh"]
_BECOME_USER = ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"]
_PYTHON_OF_USER = [*_BECOME_USER, "/usr/bin/python3", "-IS", "-c"]
_BEGIN = """
import ctypes, json, os, shutil, signal, socket, subprocess, sys, tempfile, time
program = tempfile.NamedTemporaryFile()
program.write(sys.stdin.buffer.read())
program.flush()
sys.path.insert(0, program.name)
from tawebeval.linux import starter

def until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(condition())

def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
"""
_STRANGER = """
reading, writing = os.pipe()
pid = os.fork()
if not pid:
    os.setsid()
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # not dumpable, as a starter is
    os.write(writing, b"x")
    time.sleep(600)
os.read(reading, 1)
ended = starter.Program("/ended")
ended.pid, ended.exit = pid, {"status": 0}
ended.send_signal(signal.SIGKILL)
time.sleep(0.1)
lives = os.waitpid(pid, os.WNOHANG) == (0, 0)
print(json.dumps({"is_hidden": not os.path.exists(f"/proc/{pid}"), "lives": lives}))
os.kill(pid, signal.SIGKILL)
"""
_STARTER = """
folder = tempfile.mkdtemp(prefix="tawebeval-test-")
path = f"{folder}/socket"
process = subprocess.Popen([sys.executable, "-IS", program.name, "x", path], env={})
until(lambda: os.path.exists(path))
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(path)

def ask(what, name, **members):
    request = {"request": what, "id": 1, "name": f"{folder}/{name}", **members}
    connection.send(json.dumps(request).encode())
    return json.loads(connection.recv(65536))

def start(name, script):
    os.mkdir(f"{folder}/{name}")
    with open(f"{folder}/{name}/start", "w") as file:
        json.dump({"argv": ["/bin/sh", "-c", script]}, file)
    return ask("start", name)["pid"]

def printed(name):
    until(lambda: os.path.getsize(f"{folder}/{name}/stdout"))
    with open(f"{folder}/{name}/stdout") as file:
        return file.read()

result = {"is_hidden": not os.path.exists("/proc/1")}
running = start("running", "exec sleep 600")
leader = start("group", "sleep 600 & echo $!")
left = int(printed("group"))
until(lambda: is_gone(leader))
away = start("away", "setsid sh -c 'echo $$; exec sleep 600' & wait")
orphan = int(printed("away"))
ask("forget", "running")
ask("signal", "group", number=9)
result["ended"] = [until(lambda: is_gone(pid)) for pid in (running, left)]
ask("forget", "away")
os.kill(orphan, signal.SIGKILL)
result["ended"].append(until(lambda: is_gone(orphan)))  # the starter has reaped it
process.terminate()
result["status"] = process.wait()
shutil.rmtree(folder)
print(json.dumps(result))
"""


class HiddenProcessTests(SynchronousTestCase):
    def run_hidden(self, *command: str) -> Any:
        """Run a command where /proc hides other users; return its result."""
        if os.geteuid():
            raise SkipTest("only root can mount file systems")
        folder = tempfile.mkdtemp(prefix="tawebeval-test-")
        self.addCleanup(shutil.rmtree, folder)
        os.chown(folder, int(_USER), -1)  # who may be unable to write into that of all
        done = subprocess.run(
            [*_PREFIX, *command],
            input=STARTER_ARCHIVE,
            capture_output=True,
            timeout=LONG_PATIENCE,
            env={**os.environ, "TMPDIR": folder},
        )
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        result = json.loads(done.stdout)
        self.assertTrue(result.pop("is_hidden"))
        return result

    def test_starter_ends_its_programs_and_reaps_their_orphans(self) -> None:
        self.assertEqual(
            self.run_hidden(*_PYTHON_OF_USER, _BEGIN + _STARTER),
            {"ended": [True, True, True], "status": 0},
        )

    def test_starter_spares_a_hidden_process_that_reuses_the_pid_of_an_ended_program(self) -> None:
        self.assertEqual(self.run_hidden(*_PYTHON_OF_USER, _BEGIN + _STRANGER), {"lives": True})
