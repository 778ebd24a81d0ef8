"""`evaluations.run`: the message about a bad exit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import LimitSettings
from tawebeval.evaluations.run import explain_exit, find_command_hint
from tawebeval.sandbox.base import EvaluatorExit

FAILED = EvaluatorExit(1)
MESSAGE = "the evaluator exited with status 1"


def explain(end: EvaluatorExit = FAILED, stderr: str = "", *, network: bool = False) -> str:
    """Return the message about an exit of an evaluator that has printed something."""
    return explain_exit(end, stderr, LimitSettings(), has_network=network, has_output=True)


class ExitTests(SynchronousTestCase):
    def test_exit_message_names_the_limit_that_stderr_or_the_signal_suggests(self) -> None:
        memory = "if memory ran out: the limit is 512 MiB (limits.memory)"
        processes = (
            "128 processes and threads (limits.processes), and their stacks need limits.memory"
        )
        segfault, killed, too_large = (EvaluatorExit(None, number) for number in (11, 9, 25))
        for end, stderr, hint in (
            (segfault, "", "the evaluator was ended by signal 11 (Segmentation fault)"),
            (FAILED, "AssertionError", MESSAGE),
            (FAILED, "BlockingIOError: [Errno 11] write could not complete", MESSAGE),
            (FAILED, "cat: write error: Resource temporarily unavailable", MESSAGE),
            (FAILED, "MemoryError", memory),
            (FAILED, "Killed\n", memory),
            (FAILED, "sh: line 1: 7 Killed  ./run: killed", memory),
            (killed, "", memory),
            (too_large, "", "a file is 256 MiB (limits.file_size)"),
            (FAILED, "[Errno 27] File too large", "a file is 256 MiB (limits.file_size)"),
            (FAILED, "RuntimeError: can't start new thread", processes),
            (FAILED, "sh: 1: Cannot fork", processes),
            (FAILED, "Too many open files", "256 open files (limits.open_files)"),
            (FAILED, "No space left on device", "the disk is 1 GiB (limits.disk)"),
        ):
            said = explain(end, stderr)
            self.assertTrue(said.endswith(hint), (said, hint))
            self.assertEqual(";" in said, hint is not MESSAGE and end is not segfault)

    def test_exit_message_says_that_the_evaluator_printed_nothing(self) -> None:
        said = explain_exit(FAILED, "", LimitSettings(), has_network=True, has_output=False)
        self.assertEqual(said, f"{MESSAGE}; it printed nothing")

    def test_failed_connection_is_explained_only_if_the_sandbox_has_no_network(
        self,
    ) -> None:
        for stderr in (
            "curl: (6) Could not resolve host: example.org",
            "socket.gaierror: [Errno -3] Temporary failure in name resolution",
            "requests.exceptions.ConnectionError: Name or service not known",
            "OSError: [Errno 101] Network is unreachable",
            "Error: getaddrinfo EAI_AGAIN example.org",
            "java.net.UnknownHostException: example.org",
            "dial tcp: lookup example.org: no such host",
        ):
            self.assertEqual(
                explain(stderr=stderr), f"{MESSAGE}; the sandbox has no network (sandbox.network)"
            )
            self.assertEqual(explain(stderr=stderr, network=True), MESSAGE)

    def test_message_about_a_missing_execute_bit_names_the_commands_that_set_it(self) -> None:
        said = explain(EvaluatorExit(126), "/bin/sh: 1: ./run: Permission denied")
        self.assertIn("chmod +x ./run`", said)
        self.assertIn("git update-index --chmod=+x ./run`", said)
        long = f"/bin/sh: 1: ./{'a' * 80}: Permission denied"
        self.assertIn("chmod +x FILE", explain(EvaluatorExit(126), long))
        self.assertNotIn("chmod", explain(EvaluatorExit(126), "Exec format error"))
        self.assertNotIn("chmod", explain(FAILED, "Permission denied"))

    def test_exit_message_names_the_command_that_was_not_found(self) -> None:
        for stderr, words in (
            ("", "a command was not found: check its path"),
            ("sh: 1: g++-20: not found", "the command g++-20 was not found: check its path"),
            ("bash: line 1: ghc: command not found", "the command ghc was not found: check"),
            ("/bin/sh: 1: python: not found", "the command python was not found: write python3"),
        ):
            self.assertIn(words, explain(EvaluatorExit(127), stderr))

    def test_command_hint_replaces_the_hint_about_an_unknown_command(self) -> None:
        said = explain_exit(
            EvaluatorExit(127),
            "sh: 1: x: not found",
            LimitSettings(),
            has_network=True,
            has_output=True,
            command_hint="x has the line ends of Windows",
        )
        self.assertTrue(said.endswith("127; x has the line ends of Windows"), said)


_SCRIPT = "#!/bin/sh\nset -e\nfor i in 1 2; do\n  echo $i\ndone\nexit 1\n"
_FILES = {
    "windows.sh": _SCRIPT.replace("\n", "\r\n"),
    "windows.py": "#!/usr/bin/env python3\r\nprint(1)\r\nraise SystemExit(1)\r\n",
    "plain.sh": _SCRIPT,
    "unknown.py": "#!/usr/bin/python3.99\n",
}
_CRLF = "windows.sh has the line ends of Windows (CRLF): run `sed -i 's/\\r$//' "
# Each command, and the beginning of its hint.
_COMMANDS = (
    ("./windows.sh", f"./{_CRLF}./windows.sh`, add the line `*.sh text eol=lf` to .gitattributes"),
    ("sh windows.sh", _CRLF),
    ("bash windows.sh; exit 1", _CRLF),
    ("./windows.py", "./windows.py has the line ends of Windows"),
    ("python3 windows.py", ""),
    (
        "printf '#!/bin/sh\\r\\n\\r\\n' >x; bash \"$PWD/x\"",
        "a script has the line ends of Windows (CRLF)",
    ),
    ("./unknown.py", "./unknown.py begins with #!/usr/bin/python3.99, which is not installed here"),
    ("./untracked.sh", ""),
    ("plain.sh", ""),
    ("./plain.sh", ""),
    ("echo 'open", ""),
    ("../outside.sh", ""),
    ("./link.sh", ""),
    ("./circle.sh", ""),
)


class CommandHintTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.root.mkdir()
        for name, content in _FILES.items():
            (self.root / name).write_bytes(content.encode())
            (self.root / name).chmod(0o755)
        (self.root / "link.sh").symlink_to("/etc/hostname")
        (self.root / "circle.sh").symlink_to("circle.sh")

    def run_command(self, command: str) -> tuple[int, str]:
        ran = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self.root,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        return ran.returncode, ran.stderr.decode()

    def test_hint_explains_each_error_of_the_shell(self) -> None:
        for command, words in _COMMANDS:
            status, stderr = self.run_command(command)
            hint = find_command_hint(command, self.root, "", status, stderr)
            self.assertEqual(hint[: len(words)] if words else hint, words, (command, stderr))
