"""Evaluators: what they find around them, print and leave behind, and why they end."""

from __future__ import annotations

import time
from base64 import b64encode

from tests.integration.client import data, failure, joined, python, text
from tests.integration.harness import DaemonTestCase

HELPERS = r"""
import json, os, sys, time
def mark(name): return os.environ["EVALUATION_" + name].encode()
def say(data): os.write(1, data)
def block(*lines): say(b"\n".join([b"\n" + mark("DATA_BEGIN"), *lines, mark("DATA_END"), b""]))
def file(head, body):
    say(b"\n%s\n%s\n\n%s\n%s\n" % (mark("FILE_BEGIN"), head, body, mark("FILE_END")))
AS_PATH = b'X-SEGI-As: path\nContent-Disposition: attachment; filename="%s"'
"""

REFUSED = ("protocol", "evaluation_error")
OUTPUT = 100_000
SECONDS = 5.0


class EvaluatorCase(DaemonTestCase):
    environment = {"CANARY": "the-daemons-own"}  # noqa: RUF012

    async def run_program(self, program: str) -> list[dict[str, object]]:
        return await self.run_command(python(HELPERS + program))

    # What they find

    async def test_stdin_is_empty_and_no_descriptor_of_the_daemon_is_open(self) -> None:
        program = """
def is_open(number):
    try:
        return os.fstat(number)
    except OSError:
        return False
print(os.read(0, 9), [number for number in range(1000) if is_open(number)])
"""
        self.assertEqual(text(await self.run_program(program)), "b'' [0, 1, 2]\n")

    async def test_secretive_evaluator_keeps_its_markers(self) -> None:
        hide = "import ctypes, subprocess\nctypes.CDLL(None).prctl(4, 0)\n"
        look = "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'"
        program = f"{hide}print(subprocess.run({look!r}, shell=True, env={{}}, stdout=-1).stdout)"
        printed = text(await self.run_command(python(program)))
        self.assertIn("cat", printed)
        self.assertNotIn("~tawebeval", printed)

    async def test_environment_has_the_promised_variables_alone(self) -> None:
        print_it = "tr '\\0' '\\n' < /proc/$$/environ"
        events = await self.run_command(
            f'{print_it}; ls -A "$TEMPORARY_DIRECTORY" "$HOME"; touch x "$TEMPORARY_DIRECTORY/x"',
            files=(("source_1", "my file.py", b"pass"), ("b", "", b"text")),
            seed="7",
        )
        printed = text(events)
        found = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
        self.assertEqual(
            sorted(found),
            sorted(
                [
                    *("PATH", "HOME", "LANG", "PWD", "PYTHONUNBUFFERED"),
                    *("TEMPORARY_DIRECTORY", "TURINGARENA_SEED", "EVALUATION_TOOLS"),
                    *("SUBMISSION_FILE_SOURCE_1", "SUBMISSION_FILE_B"),
                    *("EVALUATION_DATA_BEGIN", "EVALUATION_DATA_END"),
                    *("EVALUATION_FILE_BEGIN", "EVALUATION_FILE_END"),
                ]
            ),
        )
        self.assertNotIn("the-daemons-own", printed)
        self.assertEqual(found["LANG"], "C.UTF-8")
        self.assertEqual(found["PYTHONUNBUFFERED"], "1")
        self.assertEqual(found["TURINGARENA_SEED"], "7")
        self.assertEqual(found["SUBMISSION_FILE_SOURCE_1"].rpartition("/")[2], "my file.py")
        self.assertEqual(found["SUBMISSION_FILE_B"].rpartition("/")[2], "b.txt")
        blocks = ("EVALUATION_DATA_", "EVALUATION_FILE_")
        markers = {found[name] for name in found if name.startswith(blocks)}
        self.assertEqual(len(markers), 4)
        for marker in markers:
            self.assertNotIn(marker, text(await self.run_command(print_it)), "they are fresh")

    # What they print

    async def test_files_by_path_are_read_from_each_place(self) -> None:
        events = await self.run_program(
            r"""
for folder in (".", os.environ["TEMPORARY_DIRECTORY"], os.environ["HOME"]):
    path = os.path.join(folder, "report.bin")
    with open(path, "wb") as report:
        report.write(b"\0\xff" * 500_000)
    file(AS_PATH % b"name.bin", path.encode())
    os.remove("README") if os.path.exists("README") else None
say(b"after")
"""
        )
        content = b64encode(b"\0\xff" * 500_000).decode()
        self.assertEqual([one["content_base64"] == content for one in data(events)], [True] * 3)
        self.assertEqual({one["filename"] for one in data(events)}, {"name.bin"})
        self.assertEqual(joined(events)[-1], "after")

    async def test_foreign_paths_are_refused(self) -> None:
        events = await self.run_program(
            r"""
os.symlink("/etc/passwd", "link")
os.symlink("/etc", "dir")
os.mkfifo("fifo")
with open("large", "wb") as large:
    large.truncate(3 * 2**20)
for path in (b"/etc/passwd", b"../../../../../../etc/passwd", b"link", b"dir/passwd", b"fifo",
             b"/dev/zero", b"/proc/self/environ", b".", b"missing", b"large", b"a\0b",
             b"/proc/self/root/etc/passwd", b"//etc/passwd", b"x" * 5000, b"/dev/fd/1",
             os.environb[b"SUBMISSION_FILE_SOLUTION"] + b"/../../../../../key"):
    file(AS_PATH % b"x", path)
    say(path[-4:].replace(b"\0", b"") + b"\n")
"""
        )
        refused = data(events)
        self.assertEqual([(one.get("reason"), one["type"]) for one in refused], [REFUSED] * 16)
        self.assertEqual(text(events).count("\n"), 16)
        self.assertNotIn("root:", str(events))

    # How they end

    async def test_exit_status_comes_with_the_end_of_stderr(self) -> None:
        command = "printf 'one\\ntwo'; seq 5000 >&2; echo the end >&2; exit 3"
        identifier = await self.begin(command)
        status = await self.client.ended(identifier)
        events = await self.client.follow(identifier)
        error = failure(events, "exit")
        self.assertEqual(text(events), "one\ntwo")
        self.assertEqual(error["status"], 3)
        self.assertNotIn("signal", error)
        self.assertEqual(len(error["stderr"]), 8192)
        self.assertTrue(error["stderr"].endswith("\n4999\n5000\nthe end\n"))
        self.assertEqual(status["exit"], {"status": 3, "signal": None})
        self.assertEqual(status["stderr"], error["stderr"])
        self.assertEqual(status["state"], "failed")

    async def test_output_is_cut_at_exactly_its_limit(self) -> None:
        events = await self.run_command("yes 0123456789", **{"limits[output]": str(OUTPUT)})
        error = failure(events, "output")
        self.assertEqual(error["value"], OUTPUT)
        self.assertEqual(text(events), ("0123456789\n" * OUTPUT)[:OUTPUT])

    async def test_output_on_term_is_kept(self) -> None:
        program = """
import signal, sys, time
def end(*_):
    sys.stdout.write("last words\\n" * 5000)
    sys.stdout.flush()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""
        identifier = await self.begin_and_wait(python(program))
        await self.client.cancel(identifier)
        events = await self.client.follow(identifier)
        failure(events, "cancelled")
        first, *words = text(events).splitlines()
        self.assertEqual((first, len(words), {*words}), ("ready", 5000, {"last words"}))

    async def test_timeout_comes_at_its_limit_after_the_output_and_kills_what_ignores_term(
        self,
    ) -> None:
        began = time.monotonic()
        program = (
            "trap '' TERM; (trap '' TERM; sleep 600) & printf 'before\\nand'; sleep 600; sleep 600"
        )
        events = await self.run_command(program, **{"limits[wall_clock]": str(SECONDS)})
        self.assertGreater(time.monotonic() - began, SECONDS)
        error = failure(events, "timeout")
        self.assertEqual(error["value"], SECONDS)
        self.assertEqual(text(events), "before\nand")
