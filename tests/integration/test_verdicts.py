"""Verdicts on programs of submissions: output, signals, processor time and files of the system."""

from __future__ import annotations

import json
import os
import resource
import sys
import textwrap
from typing import Any

from twisted.trial.unittest import SkipTest

from tests.integration.cgroups import DELEGATED
from tests.integration.client import failure, python, text
from tests.integration.harness import CONFIGURATION, TWISTD, Daemon, DaemonTestCase

CPU = 2
READABLE = ("/etc/profile", "/etc/skel", "/var/lib/dpkg/info")
LIMITS = f"""
[limits]
wall_clock = 300
cpu = {CPU}
file_size = 1_048_576

[sandbox]
readable = {list(READABLE)}
"""
INHERIT = """
import os, resource, signal, sys
for number, soft in (resource.RLIMIT_AS, 2**36), (resource.RLIMIT_STACK, 2**24):
    resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))
for number in signal.SIGQUIT, signal.SIGUSR2, signal.SIGCHLD, signal.SIGPIPE:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGALRM})
os.execv(sys.argv[1], sys.argv[1:])
"""
BURN = "i=0; while :; do i=$((i+1)); done"
"""A program of the shell that uses processor time without an end."""
SHOW_SIGNALS = "grep -E '^Sig(Blk|Ign):' /proc/self/status"
# Those of the C library, which nobody else can set; posix_spawn(3) ignores them.
INTERNAL_SIGNALS = 1 << 31 | 1 << 32


class InheritingDaemon(Daemon):
    """A daemon that is started with soft limits, and ignored and blocked signals."""

    program = (sys.executable, "-c", INHERIT, str(TWISTD))


class VerdictCase(DaemonTestCase):
    configuration = CONFIGURATION + LIMITS

    def make_daemon(self) -> Daemon:
        return InheritingDaemon(self.configuration)

    async def print_of(self, command: str) -> str:
        return text(await self.run_command(command))

    async def run_program(self, options: str) -> dict[str, Any]:
        """Return the report of `tawebeval-run` with these options, and its exit status in it."""
        command = f"tawebeval-run --report ~/report {options}; printf '\\n%s\\n' $?; cat ~/report"
        printed = await self.print_of(command)
        *_, status, report = printed.splitlines()
        self.assertTrue(report.startswith("{"), printed)
        return {**json.loads(report), "status": int(status)}


class OutputVerdicts(VerdictCase):
    """No output and no input of a program is cut without a word."""

    async def test_run_reports_an_error_and_no_verdict_if_output_cannot_be_written(self) -> None:
        print_much = "-- sh -c 'head -c 3000000 /dev/zero{}'"
        for stream, redirection, said in (
            ("stdout", ">~/out", "File too large"),
            ("stderr", "2>~/out", "File too large"),
            ("stdout", ">/dev/full", "No space left on device"),
            ("stdin", "0>~/out", "Bad file descriptor"),
        ):
            program = print_much.format(" >&2" if stream == "stderr" else "")
            report = await self.run_program(f"{program} {redirection}")
            self.assertEqual(report["status"], 125)
            self.assertIn(stream, report.get("error", report))
            self.assertIn(said, report["error"])

    async def test_closed_streams_of_the_caller_do_not_change_the_exit_status(self) -> None:
        much = "-- head -c 3000000 /dev/zero"
        for redirection in ("| head -c 1 | cat >/dev/null", ">&-", "2>&-", "<&-"):
            report = await self.run_program(f"{much} {redirection} >/dev/null")
            self.assertEqual(report.get("exit_status"), 0, (redirection, report))

    async def test_non_blocking_streams_pass_on_everything(self) -> None:
        evaluator = """
        import os, subprocess, threading, time
        count, size = {"stdout": 0, "stderr": 0}, 1_300_000
        def read(name, descriptor):
            while chunk := os.read(descriptor, 65536):
                count[name] += len(chunk)
                time.sleep(0.001)
        for name in count:
            ours, theirs = os.pipe()
            given, feeding = os.pipe()
            os.set_blocking(theirs, False)
            os.set_blocking(given, False)
            shell = "cat" if name == "stdout" else "cat >&2"
            process = subprocess.Popen(["tawebeval-run", "--", "sh", "-c", shell],
                                       stdin=given, **{name: theirs})
            os.close(theirs)
            os.close(given)
            reader = threading.Thread(target=read, args=[name, ours])
            reader.start()
            time.sleep(0.3)
            with open(feeding, "wb") as file:
                file.write(bytes(size))
            reader.join()
            print(name, count[name], process.wait())
        """
        printed = await self.print_of(python(textwrap.dedent(evaluator)))
        self.assertEqual(printed.splitlines(), ["stdout 1300000 0", "stderr 1300000 0"])


class SignalVerdicts(VerdictCase):
    """Programs begin with the default disposition of each signal."""

    async def test_no_signal_is_ignored_or_blocked(self) -> None:
        for run in ("", "tawebeval-run -- "):
            _, blocked, _, ignored = (await self.print_of(run + SHOW_SIGNALS)).split()
            self.assertEqual(int(blocked, 16), 0, run)
            self.assertEqual(int(ignored, 16) & ~INTERNAL_SIGNALS, 0, run)
        with open(f"/proc/{self.daemon.pid}/status") as file:
            found = dict(line.split(":\t") for line in file.read().splitlines() if ":\t" in line)
        self.assertEqual(int(found["SigBlk"], 16), 0)
        # SIGPIPE and SIGXFSZ, which Python ignores, and SIGQUIT, which shells ignore.
        kept = 1 << 12 | 1 << 24 | 1 << 2 | INTERNAL_SIGNALS
        self.assertEqual(int(found["SigIgn"], 16) & ~kept, 0)

    async def test_pipe_without_a_reader_ends_its_writer(self) -> None:
        writer = "while :; do echo 7; done | head -n 1"
        report = await self.run_program(f"--time 2 --wall 200 -- sh -c '{writer}'")
        self.assertEqual((report["exit_status"], report["reason"]), (0, None))


class LimitVerdicts(VerdictCase):
    async def test_soft_limits_of_memory_are_not_inherited(self) -> None:
        for number in (resource.RLIMIT_AS, resource.RLIMIT_STACK):
            if resource.getrlimit(number)[1] != resource.RLIM_INFINITY:
                raise SkipTest("this user's hard limits are low")
        show = "bash -c 'ulimit -Sv; ulimit -Ss'"
        self.assertEqual(await self.print_of(show), "unlimited\n8192\n")
        program = f"tawebeval-run --memory 64M -- {show}"
        # Where no cgroup counts stacks of threads, each would have the size of the first one.
        stack = "65536" if DELEGATED else "unlimited"
        self.assertEqual(await self.print_of(program), f"unlimited\n{stack}\n")


class TimeVerdicts(VerdictCase):
    """A time limit is what was measured, to the millisecond."""

    async def test_program_is_stopped_at_its_limit_and_not_before(self) -> None:
        report = await self.run_program(f"--time 1 --wall 100 -- sh -c '{BURN}'")
        self.assertEqual(report["reason"], "time")
        self.assertGreaterEqual(report["cpu_seconds"], 1)

    async def test_processor_time_of_all_processes_counts_towards_the_time_limit(self) -> None:
        both = f"({BURN}) & ({BURN}) & wait"
        report = await self.run_program(f"--time 1 --wall 100 -- sh -c '{both}'")
        self.assertEqual(report["reason"], "time")
        self.assertLess(report["cpu_seconds"], 1.9)

    async def test_processor_time_of_a_run_counts_for_the_evaluation(self) -> None:
        failure(await self.run_command(f"tawebeval-run -- sh -c '{BURN}'"), "cpu")

    async def test_processor_time_may_be_unlimited(self) -> None:
        # TuringArena's drivers of 2018 set it for what they start.
        unlimited = (
            "import resource as r; r.setrlimit(r.RLIMIT_CPU, (1, r.RLIM_INFINITY)); print(1)"
        )
        for run in ("", "tawebeval-run --time 1 -- "):
            self.assertEqual(
                await self.print_of(run + python(unlimited).removeprefix("exec ")), "1\n", run
            )

    async def test_unlimited_runaway_is_stopped(self) -> None:
        unlimited = (
            "import resource as r, signal; r.setrlimit(r.RLIMIT_CPU, (r.RLIM_INFINITY,) * 2);"
            " signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
        )
        failure(await self.run_command(python(unlimited)), "cpu")
        report = await self.run_program(
            "--time 1 --wall 100 -- " + python(unlimited).removeprefix("exec ")
        )
        self.assertEqual(report["reason"], "time")


class SystemFiles(VerdictCase):
    async def test_submission_and_evaluator_read_the_same_system_files(self) -> None:
        look = f"cksum /etc/profile /etc/skel/.[a-z]*; ls {READABLE[2]} | head -n 50"
        expected = await self.print_of(look)
        self.assertIn("/etc/profile", expected)
        self.assertNotIn("4294967295 0 ", expected)  # cksum(1) of an empty file
        self.assertEqual(await self.print_of(f"tawebeval-run -- sh -c '{look}'"), expected)

    async def test_no_file_of_etc_is_an_empty_placeholder(self) -> None:
        listed = "find /etc -empty -type f"
        for run in ("", "tawebeval-run -- "):
            for path in (await self.print_of(run + listed)).splitlines():
                self.assertEqual(os.path.getsize(path), 0, run + path)

    async def test_read_option_accepts_system_paths_that_every_run_can_read(self) -> None:
        for path in (*READABLE, f"{READABLE[2]}/dpkg.list"):
            printed = await self.print_of(f"tawebeval-run --read {path} -- ls -d {path}")
            self.assertEqual(printed, f"{path}\n")
        printed = await self.print_of("tawebeval-run --read /etc/profile:/etc/x -- true 2>&1")
        self.assertIn("is a path of the system", printed)
