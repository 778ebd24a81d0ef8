"""The libraries for evaluators: events, how output is judged, what the documents list."""

from __future__ import annotations

import io
import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.segi import Markers, PrintedFile
from tawebeval.sandbox import broker
from tawebeval.sandbox.tools.lib import segi
from tests.cases.strategies import classify, join_text, parse

MARKERS = Markers(b"~data begins~", b"~data ends~", b"~file begins~", b"~file ends~")
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)
WORDS = st.lists(st.sampled_from([b"a", b"b", b"\xff", b"1", b"1.0", b"-1e2", b"nan", b"1_0"]))
SPACES = st.sampled_from([b" ", b"\n", b"\t\r\n", b"\v\f"])
NAMES = st.text(st.sampled_from("abc é€😀'\";%=&*."), min_size=1, max_size=20).filter(
    lambda name: name.strip() not in ("", ".", "..")
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
RESULT = segi.Result(0, None, None, 0.25, 0.5, 4096, b"", b"")


def print_by(send: Callable[[], object]) -> list[Any]:
    """Return the events of what `send` prints in the middle of a line."""
    stdout, environment = sys.stdout, dict(os.environ)
    sys.stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    os.environ.update(MARKERS.build_variables())
    try:
        print("before", end="")
        send()
        print("after", end="", flush=True)
        printed = sys.stdout.buffer.getvalue()  # type: ignore[attr-defined]
        found = parse(printed, markers=MARKERS, max_value=segi.MIB, max_file=segi.MIB)
        return join_text(classify(found))
    finally:
        sys.stdout = stdout
        os.environ.clear()
        os.environ.update(environment)


class Events(SynchronousTestCase):
    def sent(self, send: Callable[[], object]) -> Any:
        before, event, after = print_by(send)
        self.assertEqual((before, after), ("before", "after"))
        return event

    @given(JSON)
    def test_any_json_value_arrives(self, value: object) -> None:
        self.assertEqual(json.loads(self.sent(lambda: segi.send(value))), value)

    def test_name_that_is_not_utf_8_is_sent(self) -> None:
        event = self.sent(lambda: segi.send({"name": os.fsdecode(b"a\xffb")}))
        self.assertEqual(json.loads(event), {"name": "a?b"})

    def test_events_have_the_members_that_the_daemon_counts(self) -> None:
        judgement = segi.Judgement("wrong_answer", "word 1 differs", "7", "8")
        table: list[tuple[Callable[[], None], dict[str, object]]] = [
            (
                lambda: segi.send_goal("fast", True),
                {"type": "goal_result", "goal": "fast", "result": True},
            ),
            (
                lambda: segi.send_case("one", segi.ACCEPTED),
                {"type": "case", "case": "one", "verdict": "accepted"},
            ),
            (
                lambda: segi.send_case("two", judgement, RESULT, points=0),
                dict(
                    {"type": "case", "case": "two", "verdict": "wrong_answer", "points": 0},
                    time=0.25,
                    memory=4096,
                    message="word 1 differs",
                    printed="8",
                ),
            ),
            (
                lambda: segi.send_case("two", judgement, stdin="3 4\n", show_expected=True),
                dict(
                    {"type": "case", "case": "two", "verdict": "wrong_answer"},
                    message="word 1 differs",
                    input="3 4\n",
                    expected="7",
                    printed="8",
                ),
            ),
            (lambda: segi.send_progress(1, 2), {"type": "progress", "done": 1, "total": 2}),
            (lambda: segi.send_score(3, 4.5), {"type": "score", "score": 3, "maximum": 4.5}),
        ]
        for send, expected in table:
            self.assertEqual(json.loads(self.sent(send)), expected)

    def test_long_input_is_sent_as_an_excerpt(self) -> None:
        path = Path(self.mktemp())
        path.write_text("é" * 10**6)
        for stdin in (path, path.read_text(), path.read_bytes()):
            sent = self.sent(lambda stdin=stdin: segi.send_case("a", segi.ACCEPTED, stdin=stdin))
            self.assertEqual(json.loads(sent)["input"], "é" * 97 + "...")

    def test_send_without_values_prints_nothing(self) -> None:
        self.assertEqual(print_by(lambda: segi.send()), ["beforeafter"])

    @given(NAMES, st.binary())
    def test_file_arrives_with_name_and_bytes(self, name: str, content: bytes) -> None:
        found = self.sent(lambda: segi.send_file(name, content, "text/csv"))
        self.assertEqual(found, PrintedFile(name, "text/csv", content))

    def test_make_random_draws_equal_numbers_only_for_equal_names(self) -> None:
        os.environ["TURINGARENA_SEED"] = "7"
        self.addCleanup(os.environ.pop, "TURINGARENA_SEED")
        drawn = [segi.make_random(name).random() for name in ("", "", "a", "a", "b")]
        self.assertEqual((drawn[0], drawn[2]), (drawn[1], drawn[3]))
        self.assertEqual(len(set(drawn)), 3)


class Comparisons(SynchronousTestCase):
    @given(st.binary(), st.binary())
    def test_exact_comparison_counts_every_byte(self, printed: bytes, expected: bytes) -> None:
        self.assertTrue(segi.compare_exact(printed, printed).is_accepted)
        found = segi.compare_exact(printed, expected)
        self.assertEqual(found.is_accepted, printed == expected)

    @given(WORDS, WORDS, SPACES, SPACES)
    def test_tokens_are_compared_whatever_separates_them(
        self, printed: list[bytes], expected: list[bytes], one: bytes, other: bytes
    ) -> None:
        found = segi.compare_tokens(one.join([b"", *printed]), other.join([*expected, b""]))
        self.assertEqual(found.is_accepted, printed == expected)
        if not found.is_accepted:
            self.assertNotEqual(found.printed, found.expected)

    @given(NUMBERS, st.floats(-3, 3), st.floats(0, 0.5), st.floats(0, 0.5))
    def test_floats_are_compared_as_by_math_isclose(
        self, wanted: float, factor: float, absolute: float, relative: float
    ) -> None:
        number = wanted * factor
        found = segi.compare_floats(
            repr(number), repr(wanted), absolute=absolute, relative=relative
        )
        is_close = math.isclose(number, wanted, abs_tol=absolute, rel_tol=relative)
        self.assertEqual(found.is_accepted, is_close or repr(number) == repr(wanted))

    @given(WORDS, WORDS)
    def test_words_have_to_be_the_same_in_a_comparison_of_floats(
        self, printed: list[bytes], expected: list[bytes]
    ) -> None:
        same = {b"1.0": b"1"}
        found = segi.compare_floats(b" ".join(printed), b" ".join(expected))
        self.assertEqual(
            found.is_accepted,
            [same.get(word, word) for word in printed]
            == [same.get(word, word) for word in expected],
        )

    def test_long_words_that_begin_as_numbers_are_compared_quickly(self) -> None:
        for word in (b"1" * 10**5, b"1." + b"1" * 10**5, b"1e" + b"1" * 10**5):
            self.assertFalse(segi.compare_floats(word + b"x", "1").is_accepted)

    def test_numbers_beyond_floats_are_words(self) -> None:
        for printed, is_accepted in (("1e999", True), ("2e999", False), ("1", False)):
            self.assertEqual(segi.compare_floats(printed, "1e999").is_accepted, is_accepted)

    def test_message_names_the_word_or_line_that_differs(self) -> None:
        table = [
            (segi.compare_tokens("a b", "a c"), "word 2 differs", "c", "b"),
            (segi.compare_tokens("a", "a b"), "word 2 missing", "b", ""),
            (segi.compare_exact("a\nb\n", "a\n"), "line 2 unexpected", "", "b\n"),
            (segi.compare_exact("a", "a\n"), "line 1 differs", "a\n", "a"),
            (segi.compare_tokens("x" * 999, "y"), "word 1 differs", "y", "x" * 97 + "..."),
            (segi.compare_tokens("😀" * 101, "y"), "word 1 differs", "y", "😀" * 97 + "..."),
        ]
        for found, *expected in table:
            self.assertEqual([found.message, found.expected, found.printed], expected)


class Faults(SynchronousTestCase):
    def test_verdict_prefers_an_exceeded_limit_to_signal_and_exit_status(self) -> None:
        table: list[tuple[dict[str, Any], tuple[str, str] | None]] = [
            ({}, None),
            (
                {"reason": "time", "cpu_seconds": 2.04},
                ("time_limit", "stopped after 2.0 s of processor time"),
            ),
            (
                {"reason": "wall", "wall_seconds": 10.0, "signal": 9},
                ("time_limit", "stopped after 10.0 s"),
            ),
            (
                {"reason": "memory", "peak_memory_bytes": 2**26 - 4096},
                ("memory_limit", "stopped at its limit of 64 MiB of memory"),
            ),
            ({"reason": "output"}, ("output_limit", "printed too much")),
            ({"reason": "processes"}, ("runtime_error", "too many processes")),
            ({"signal": 11}, ("runtime_error", "killed by SIGSEGV")),
            ({"signal": 44}, ("runtime_error", "killed by signal 44")),
            ({"exit_status": 3}, ("runtime_error", "exit status 3")),
            (
                {"exit_status": 1, "stderr": b"Traceback\nKeyError: 1\n"},
                ("runtime_error", "exit status 1: KeyError: 1"),
            ),
            (
                {
                    "exit_status": 1,
                    "stderr": b'Exception in thread "main" X: y\n\tat A.main(A:1)\n',
                },
                ("runtime_error", 'exit status 1: Exception in thread "main" X: y'),
            ),
        ]
        for members, expected in table:
            fault = RESULT._replace(**members).fault
            self.assertEqual(fault and (fault.verdict, fault.message), expected, members)


class Checkers(SynchronousTestCase):
    def test_exit_statuses_of_testlib_map_to_verdicts(self) -> None:
        table: list[tuple[int, str, tuple[str, str, float | None]]] = [
            (0, "ok 3 numbers\n", ("accepted", "ok 3 numbers", None)),
            (1, "wrong answer 7\n", ("wrong_answer", "wrong answer 7", None)),
            (2, "wrong output format x", ("wrong_answer", "wrong output format x", None)),
            (4, "wrong output format x", ("wrong_answer", "wrong output format x", None)),
            (8, "unexpected eof x", ("wrong_answer", "unexpected eof x", None)),
            (3, "FAIL x", ("judge_error", "checker: exit status 3: FAIL x", None)),
            (7, "points 0.5 half of it\n", ("partial", "half of it", 0.5)),
            (7, "points 0", ("partial", "", 0)),
            (7, "0.5 in", ("partial", "in", 0.5)),
            (7, "points points_info=3/5 x", ("partial", "points_info=3/5 x", None)),
            (7, "points 1e999", ("judge_error", "checker: no points in '1e999'", None)),
            (7, "points nan", ("judge_error", "checker: no points in 'nan'", None)),
            (7, "", ("judge_error", "checker: no points in ''", None)),
            (0, "partially correct (0) x", ("partial", "x", 0)),
            (13, "partially correct (13) x", ("partial", "x", 13)),
            (29, "partially correct (13)", ("partial", "", 13)),
            (63, "partially correct (13) x", ("partial", "x", 13)),
            (44, "partially correct (300) x", ("partial", "x", 300)),
            (1, "partially correct (100) x", ("wrong_answer", "partially correct (100) x", None)),
            (9, "x", ("judge_error", "checker: exit status 9: x", None)),
        ]
        for status, stderr, expected in table:
            result = RESULT._replace(exit_status=status, stderr=stderr.encode())
            found = segi.judge_by_checker(result)
            self.assertEqual((found.verdict, found.message, found.points), expected, stderr)

    def test_crash_of_a_checker_is_no_verdict_on_the_solution(self) -> None:
        traceback = "Traceback (most recent call last):\n"
        java = 'Exception in thread "main" java.lang.ArithmeticException: / by zero'
        node = "TypeError: x is not a function\n    at Object.<anonymous> (/c.js:1:7)\n"
        table = [
            (1, f'{traceback}  File "c.py", line 1\nKeyError: 1\n', "KeyError: 1"),
            (1, f"reading\n{traceback}KeyError: 1\n", "KeyError: 1"),
            (1, f"  + Exception Group {traceback}  | E\n", "  | E"),
            (
                1,
                '  File "c.py", line 1\n    print(\n         ^\nSyntaxError: x\n',
                "SyntaxError: x",
            ),
            (2, "python3: can't open file '/c.py': [Errno 2] No such file", None),
            (1, "/usr/bin/python3: No module named c", None),
            (1, f"{java}\n\tat C.main(C.java:3)\n", java),
            (1, "Error: Could not find or load main class C\nCaused by: x\n", "Caused by: x"),
            (1, f"{node}\nNode.js v18.19.0\n", "Node.js v18.19.0"),
            (2, "panic: x\n\ngoroutine 1 [running]:\nmain.main()\n", "main.main()"),
        ]
        for status, stderr, words in table:
            result = RESULT._replace(exit_status=status, stderr=stderr.encode())
            found = segi.judge_by_checker(result)
            expected = f"checker: exit status {status}: {words or stderr}"
            self.assertEqual((found.verdict, found.message), ("judge_error", expected))
        for stderr in ("wrong answer: printed Traceback (most recent call last):", "at 1:1: no"):
            result = RESULT._replace(exit_status=1, stderr=stderr.encode())
            self.assertEqual(segi.judge_by_checker(result).verdict, "wrong_answer")

    def test_points_over_128_are_read_unless_the_checker_was_stopped(self) -> None:
        result = RESULT._replace(exit_status=None, signal=9, stderr=b"partially correct (137) x")
        self.assertEqual(segi.judge_by_checker(result), segi.Judgement("partial", "x", points=137))
        stopped = segi.judge_by_checker(result._replace(reason="time"))
        self.assertEqual(stopped.verdict, "judge_error")


class Outputs(SynchronousTestCase):
    def test_links_are_not_followed(self) -> None:
        directory = Path(self.mktemp()).absolute()
        for name in ("TEMPORARY_DIRECTORY", "HOME"):
            self.patch(os, "environ", {**os.environ, name: str(directory)})
        (directory / "own" / "deep").mkdir(parents=True)
        (directory / "above").symlink_to("own")  # the evaluator's, if it is not below own
        own = directory / "own"
        for each in (directory / "expected", own / "plain", own / "deep" / "plain"):
            each.write_bytes(b"7\n")
        (own / "link").symlink_to("../expected")
        (own / "folder").symlink_to("..")
        (own / "large").write_bytes(b"x" * 4)
        (own / "closed").mkdir()
        os.link(directory / "expected", own / "hard")
        os.mkfifo(own / "pipe")
        table = {
            "plain": "",
            "deep/plain": "",
            "link": "link is a link or no readable file",
            "folder/expected": "expected is a link or no readable file",
            "hard": "hard is a link or no readable file",
            "pipe": "pipe is a link or no readable file",
            "closed": "closed is a link or no readable file",
            "plain/x": "x is a link or no readable file",
            "nothing": "nothing is missing",
            "no/such": "such is missing",
            "large": "large has over 3 bytes",
        }
        for path, message in table.items():
            for full in (own / path, os.path.relpath(own / path)):
                content, fault = segi.read_output(full, 3)
                self.assertEqual(fault.message if fault else "", message)
                self.assertEqual(content, b"" if message else b"7\n")
        self.assertIsNotNone(segi.read_output("/dev/zero").fault)
        self.patch(os, "environ", {**os.environ, "HOME": str(directory / "above")})
        self.assertEqual(segi.read_output(directory / "above" / "plain").content, b"7\n")


class Java(SynchronousTestCase):
    def test_file_has_the_name_of_the_public_class(self) -> None:
        main = "public static void main(String[] a) {}"
        table = [
            (f"public class Main {{ {main} }}", "Main.java", "Main"),
            (f"class Other {{ {main} }}", "solution.java", "Other"),
            (f"package org.example; public class P {{ {main} }}", "P.java", "org.example.P"),
            ("class A { } final class B { final static void main ( ) { } }", "solution.java", "B"),
            (f"class A {{ {main} }} public class B {{ {main} }}", "B.java", "B"),
            (f"class A {{ {main} }} class solution {{ {main} }}", "solution.java", "solution"),
            (f"class A {{ static class B {{ {main} }} {main} }}", "solution.java", "A"),
            (f"// public class A {{\n/* class B {{ */ class C {{ {main} }}", "solution.java", "C"),
            (f"class A {{ char c = '\"', d = '\\''; {main} }}", "solution.java", "A"),
            (f'class A {{ String s = "}} \\""; {main} }}', "solution.java", "A"),
            (f'class A {{ String s = """\n}} " {{{{ \\""" """; {main} }}', "solution.java", "A"),
            (f"@X({{1}}) public record Größe(int a) {{ {main} }}", "Größe.java", "Größe"),
            (f"public class {'A' * 300} {{ {main} }}", "solution.java", "A" * 300),
            ("public class Main extends Base { }", "Main.java", "Main"),
            ("static void main(", "solution.java", "solution"),
            ("}} static void main( {{{ /*", "solution.java", "solution"),
        ]
        for text, file_name, class_name in table:
            source = Path(self.mktemp())
            source.mkdir()
            source /= "solution.java"
            source.write_bytes(b"\xef\xbb\xbf" + text.encode())
            build = Path(self.mktemp())
            build.mkdir()
            copy, name = segi._copy_java(source, build)
            self.assertEqual((copy.name, name), (file_name, class_name), text)
            self.assertEqual(copy.read_bytes(), text.encode())

    def test_long_java_sources_are_read_quickly(self) -> None:
        source = Path(self.mktemp())
        for begin in ('"""', "/*", "'\\", '"\n', "package ", "class ", "static void ", "public{"):
            source.write_text(begin * 100_000 + "\\")
            segi._copy_java(source, source.parent)


class Options(SynchronousTestCase):
    def test_misspelt_limit_is_an_error(self) -> None:
        for run in (segi.run, segi.start):
            error = self.assertRaises(TypeError, run, ["true"], tmie=2)
            self.assertIn("unknown option 'tmie'; the options are time, wall, memory", str(error))

    def test_usual_endings_name_their_language_in_any_case(self) -> None:
        table = {
            ".cpp": "cpp CPP Cpp cc CC cxx CXX c++ C++",
            ".c": "c C",
            ".java": "java Java JAVA",
            ".py": "py PY Py py3 PY3",
            ".sh": "sh SH bash Bash",
            ".x": "x X",
        }
        for ending, others in table.items():
            for other in others.split():
                self.assertEqual(segi.find_ending(Path(f"a.b.{other}")), ending)

    def test_compiler_gets_the_given_limits_and_files_and_default_ones(self) -> None:
        source, seen = Path(self.mktemp()).absolute(), []
        source = source.with_suffix(".PY3")
        source.touch()

        def run(command: list[str], **options: Any) -> segi.Result:
            seen.append(options)
            return RESULT

        self.patch(segi, "run", run)
        self.patch(os, "environ", {**os.environ, "TEMPORARY_DIRECTORY": str(source.parent)})
        segi.prepare(source)
        segi.prepare(source, time=100, memory=5, file_size=7, read=["/header"], write=["/cache"])
        for options in seen:
            for name in ("write", "read"):
                options[name] = [str(path) for path in options[name]]
            build = str(options.pop("directory"))
            self.assertIn(build, options["write"])
            options["write"].remove(build)
        common = {"output": segi.MIB, "read": [str(source)], "write": []}
        self.assertEqual(
            seen,
            [
                {**common, "time": 30, "wall": 60, "file_size": 64 * segi.MIB},
                {
                    **common,
                    "time": 100,
                    "memory": 5,
                    "file_size": 7,
                    "read": [str(source), "/header"],
                    "write": ["/cache"],
                },
            ],
        )


class TimeLimits(SynchronousTestCase):
    """Limits of processor time where the evaluator has no sandbox."""

    def test_sigxcpu_sent_by_the_program_is_not_reported_as_time_limit(self) -> None:
        result = segi.run(["sh", "-c", "kill -XCPU $$"], time=1)
        self.assertEqual((result.signal, result.reason), (24, None))

    def test_cpu_rlimit_of_a_program_is_above_its_time_limit(self) -> None:
        result = segi.run(["sh", "-c", "ulimit -t"], time=1.99)
        self.assertGreater(int(result.stdout), 2)


class Inputs(SynchronousTestCase):
    def test_close_input_during_a_close_closes_the_descriptor_once(self) -> None:
        closed: list[int] = []
        with segi.start(["true"]) as program:

            def close(descriptor: int) -> None:
                closed.append(descriptor)
                if len(closed) == 1:
                    program.close_input()
                    program.write("lost")

            self.patch(segi, "os", OsWithClose(close))
            program.close_input()
            self.patch(segi, "os", os)
        self.assertEqual(len(closed), 1)
        os.close(closed[0])


class Requests(SynchronousTestCase):
    def setUp(self) -> None:
        path = self.mktemp()
        self.patch(segi, "_SOCKET", path)
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.addCleanup(self.listening.close)
        self.listening.bind(path)
        self.listening.listen()

    def serve(self, answer: Callable[[socket.socket, broker.RunRequest], None]) -> None:
        def accept() -> None:
            connection, _ = self.listening.accept()
            with connection:
                answer(connection, broker.parse_request(broker.receive_request(connection)))

        thread = threading.Thread(target=accept)
        thread.start()
        self.addCleanup(thread.join)

    def test_run_and_start_use_the_streams_that_the_broker_sends(self) -> None:
        report = {"exit_status": 0, "signal": None, "reason": None, "cpu_seconds": 0.0}
        report.update(wall_seconds=0.0, peak_memory_bytes=0)

        def copy(connection: socket.socket, request: broker.RunRequest) -> None:
            stdin, *outputs = broker.send_pipe_ends(connection)
            for output, content in zip(outputs, (os.read(stdin, 99), b"wrong"), strict=True):
                os.write(output, content)
                os.close(output)
            os.close(stdin)
            connection.send(json.dumps(report).encode())

        self.serve(copy)
        result = segi.run(["cat"], "given")
        self.assertEqual((result.stdout, result.stderr), (b"given", b"wrong"))
        self.serve(copy)
        with segi.start(["cat"]) as program:
            program.write("typed")
            self.assertEqual(program.finish().stdout, b"typed")

    def test_no_other_program_inherits_the_streams(self) -> None:
        def close(connection: socket.socket, request: broker.RunRequest) -> None:
            for stream in broker.send_pipe_ends(connection):
                os.close(stream)

        self.serve(close)
        with segi.start(["cat"]) as program:
            inherited = [os.get_inheritable(each) for each in program._process.streams]
        self.assertEqual(inherited, [False] * 3)

    def test_refused_request_raises_the_reason(self) -> None:
        for answer, reason in (
            (b'{"error": "no places"}', "no places"),
            (b"", "the sandbox has ended before the program"),
        ):
            self.serve(lambda connection, _, answer=answer: answer and connection.send(answer))
            error = self.assertRaises(segi.RunError, segi.start, ["true"])
            self.assertEqual(str(error), reason)

    def test_missing_input_is_an_error(self) -> None:
        self.assertRaises(FileNotFoundError, segi.run, ["true"], Path("missing"))


class OsWithClose:
    def __init__(self, close: Callable[[int], None]) -> None:
        self.close = close

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class Versions(SynchronousTestCase):
    def test_require_of_a_later_version_exits(self) -> None:
        segi.require(segi.VERSION)
        error = self.assertRaises(SystemExit, segi.require, segi.VERSION + 1)
        self.assertIn(f"needs version {segi.VERSION + 1}", str(error))

    def test_missing_compiler_is_a_failure(self) -> None:
        languages = {".x": segi.Language(["no-such-compiler", "{source}"], ["{build}/x"])}

        def prepare() -> None:
            error = self.assertRaises(SystemExit, segi.prepare, Path("a.x"), languages)
            self.assertEqual(error.code, segi.CANNOT_JUDGE)

        event = json.loads(print_by(prepare)[1])
        self.assertEqual((event["type"], event["missing"]), ("cannot_judge", "no-such-compiler"))


class JavaMemoryTests(SynchronousTestCase):
    def test_java_memory_follows_the_limits_of_the_run(self) -> None:
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        for name in ("java", "javac"):
            (directory / name).write_text('#!/bin/sh\necho "$@"\n')
            (directory / name).chmod(0o755)
        heap = "-Xms{}k -Xmx{}k -Xss{}k -XX:ThreadStackSize={} -XX:+UseSerialGC Main\n"
        sandbox = heap.format(49152, 196608, 65536, 65536)
        table = {
            "--stack=268435456: java": sandbox,
            "--stack=268435456: javac": sandbox.replace("-X", "-J-X"),
            "--stack=268435456: --data=268435456 java": heap.format(36864, 147456, 65536, 1024),
            "--stack=67108864: java": heap.format(4096, 16384, 16384, 16384),
            "--stack=8388608: java": "Main\n",
            "--stack=unlimited: java": "Main\n",
        }
        for words, expected in table.items():
            *limits, program = words.split()
            command = ["prlimit", *limits, "sh", "-c", segi._RUN_JAVA, program, "Main"]
            path = f"{directory}:{os.environ['PATH']}"
            done = subprocess.run(command, capture_output=True, text=True, env={"PATH": path})
            self.assertEqual(done.stdout, expected, (words, done.stderr))
