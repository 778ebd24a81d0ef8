"""`evaluations.exit_messages`: the message about a bad exit."""

from __future__ import annotations

import signal

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import LimitSettings
from tawebeval.evaluations.exit_messages import explain_exit
from tawebeval.sandbox.base import EvaluatorExit

FAILED = EvaluatorExit(1)
MESSAGE = "the evaluator exited with status 1"


def explain(end: EvaluatorExit = FAILED, stderr: str = "", *, network: bool = False) -> str:
    """Return the message about an exit of an evaluator that has printed something."""
    return explain_exit(end, stderr, LimitSettings(), has_network=network, has_output=True)


class ExitTests(SynchronousTestCase):
    """Bad exits, and what stderr tells of them."""

    def test_plain(self) -> None:
        """Without a known reason the message has only the status, or the signal."""
        self.assertEqual(explain(stderr="AssertionError"), MESSAGE)
        self.assertEqual(
            explain(EvaluatorExit(None, signal.SIGSEGV)),
            "the evaluator was ended by signal 11 (Segmentation fault)",
        )

    def test_silent(self) -> None:
        """An evaluator without any output is said to have printed nothing."""
        said = explain_exit(FAILED, "", LimitSettings(), has_network=True, has_output=False)
        self.assertEqual(said, f"{MESSAGE}; it printed nothing")

    def test_stray_marker(self) -> None:
        """The advice about a marker that was text comes first."""
        said = explain_exit(
            *(FAILED, "MemoryError", LimitSettings()),
            has_network=True,
            has_output=True,
            stray_marker_advice="EVALUATION_DATA_BEGIN is not at the start of a line",
        )
        self.assertTrue(said.startswith(f"{MESSAGE}; EVALUATION_DATA_BEGIN is not"), said)

    def test_network(self) -> None:
        """A failed connection in a sandbox without network is explained, and only there."""
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

    def test_memory(self) -> None:
        """Signs of a lack of memory name the limit, its size and its setting."""
        hint = "; if memory ran out: the limit is 512 MiB (limits.memory)"
        for stderr in ("MemoryError", "Killed\n", "sh: line 1: 7 Killed  ./run: killed"):
            self.assertEqual(explain(stderr=stderr), MESSAGE + hint, stderr)
        self.assertTrue(explain(EvaluatorExit(None, signal.SIGKILL)).endswith(hint))

    def test_limits(self) -> None:
        """Signs of another limit name it."""
        for end, stderr, hint in (
            (EvaluatorExit(None, signal.SIGXFSZ), "", "a file is 256 MiB (limits.file_size)"),
            (FAILED, "[Errno 27] File too large", "a file is 256 MiB (limits.file_size)"),
            (FAILED, "RuntimeError: can't start new thread", "(limits.processes)"),
            (FAILED, "sh: 1: Cannot fork", "128 processes and threads (limits.processes)"),
            (FAILED, "Too many open files", "256 open files (limits.open_files)"),
            (FAILED, "No space left on device", "the disk is 1 GiB (limits.disk)"),
        ):
            self.assertTrue(explain(end, stderr).endswith(hint), (stderr, hint))

    def test_not_executable(self) -> None:
        """A missing execute bit names the commands that set it."""
        said = explain(EvaluatorExit(126), "/bin/sh: 1: ./run: Permission denied")
        self.assertIn("chmod +x FILE", said)
        self.assertIn("git update-index --chmod=+x FILE", said)
        self.assertNotIn("chmod", explain(EvaluatorExit(126), "Exec format error"))
        self.assertNotIn("chmod", explain(FAILED, "Permission denied"))

    def test_not_found(self) -> None:
        """An unknown command is named as the reason."""
        self.assertIn("a command was not found", explain(EvaluatorExit(127), "sh: 1: x: not found"))
