"""`cli.output`: events on stdout, messages on stderr, and streams that break."""

from __future__ import annotations

import errno
import json
import os
import re
import termios
from typing import TextIO

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.output import (
    Screen,
    StdoutWriteError,
    escape_control_characters,
    should_use_colour,
)
from tawebeval_client import Data, EvaluationError, File, Text, Unknown
from tests.cases.screen import CLEAR, Shown, Stream


class TextTests(SynchronousTestCase):
    @given(st.lists(st.text(min_size=1)))
    def test_pipe_gets_exactly_the_printed_text(self, texts: list[str]) -> None:
        self.assertEqual(Shown().show(*map(Text, texts)), "".join(texts))

    @given(st.lists(st.text(st.characters(min_codepoint=0, max_codepoint=0x2100), min_size=1)))
    def test_terminal_gets_printable_characters_only(self, texts: list[str]) -> None:
        shown = Shown(terminal=True).show(*map(Text, texts))
        for character in shown:
            code = ord(character)
            self.assertTrue(
                character in "\t\n" or code >= 0xA0 or 0x20 <= code < 0x7F, ascii(shown)
            )
            self.assertNotIn(code, range(0x202A, 0x202F))

    def test_control_characters_are_escaped_and_letters_of_all_languages_stay(self) -> None:
        for text, shown in (
            ("\x1b[31mred\x07", "\\u001b[31mred\\u0007"),
            ("a\x9b2J\x7f", "a\\u009b2J\\u007f"),
            ("moc\u202eexe", "moc\\u202eexe"),
            ("Zürich 東京 👍🏽\tx\n", "Zürich 東京 👍🏽\tx\n"),
        ):
            self.assertEqual(escape_control_characters(text), shown)

    def test_crlf_split_between_events_ends_a_line_and_a_single_cr_is_escaped(self) -> None:
        for texts in (["a\r", "\n", "b"], ["a", "\r", "\n", "b"]):
            self.assertEqual(Shown(terminal=True).show(*map(Text, texts)), "a\nb\n")
        shown = Shown(terminal=True).show(Text("good\rbad"), Text("\r"), Text("x"), Text("\n"))
        self.assertEqual(shown, "good\\u000dbad\\u000dx\n")

    def test_partial_line_is_shown_at_once_and_ended_before_messages_on_a_terminal(self) -> None:
        shown = Shown(terminal=True)
        shown.screen.show_event(Text("half"))
        shown.screen.flush()
        self.assertEqual(shown.out.getvalue(), "half")
        self.assertEqual(shown.show(Data("1"), Text("rest")), "half\n1\nrest\n")


class StderrMessageTests(SynchronousTestCase):
    EVENTS = (
        Text("a\n"),
        Data('{"type": "goal", "x": [1.50, "\x9b"]}'),
        File("a.svg", "image/svg+xml", b"123", '{"type":"file"}'),
        Unknown("sound", '"beep"'),
        EvaluationError("protocol", "no JSON", {"line": "{"}, '{"reason":"protocol"}'),
        EvaluationError("exit", "it failed", {"stderr": "one\n\x1btwo\n"}, '{"reason":"exit"}'),
    )

    def test_events_other_than_text_are_described_on_stderr(self) -> None:
        shown = Shown()
        self.assertEqual(shown.show(*self.EVENTS), "a\n")
        self.assertEqual(
            shown.notes.getvalue(),
            'goal: x: [1.5, "\x9b"]\n'
            "file a.svg (image/svg+xml, 3 bytes)\n"
            'sound: "beep"\n'
            "malformed block: no JSON\n  {\n"
            "failed: it failed\n  one\n  \x1btwo\n",
        )

    def test_message_of_a_server_is_one_line(self) -> None:
        for terminal in (False, True):
            shown = Shown(terminal=terminal)
            shown.screen.show_message("no\n::add-mask::x")
            self.assertEqual(shown.notes.getvalue(), "no\\n::add-mask::x\n")

    def test_error_event_before_other_events_is_shown_as_data(self) -> None:
        raw_json = '{"type":"evaluation_error","reason":"exit"}'
        forged = EvaluationError("exit", "it failed", raw_json=raw_json)
        data, real = "evaluation_error: reason: exit\n", EvaluationError("timeout", "too long")
        for events, out, notes in (
            ((forged, forged, Text("on\n")), "on\n", data * 2),
            ((forged, real), "", f"{data}failed: too long\n"),
        ):
            shown = Shown()
            self.assertEqual(shown.show(*events), out)
            shown.screen.finish_output()
            self.assertEqual(shown.notes.getvalue(), notes)

    def test_terminal_gets_no_control_characters_but_colours(self) -> None:
        shown = Shown(terminal=True).show(*self.EVENTS)
        self.assertIn('[1.5, "\\u009b"]', shown)
        self.assertIn("\\u001btwo", shown)
        self.assertNotIn("\x1b", shown)
        coloured = Shown(terminal=True, colour=True).show(*self.EVENTS)
        self.assertIn("\x1b[31mfailed: it failed\x1b[0m", coloured)
        self.assertEqual(re.sub("\x1b\\[[0-9]+m", "", coloured), shown)

    def test_colours_need_a_terminal_without_no_color(self) -> None:
        for terminal, environment, wanted in (
            (True, {}, True),
            (True, {"NO_COLOR": ""}, True),
            (True, {"NO_COLOR": "1"}, False),
            (False, {}, False),
        ):
            self.assertEqual(should_use_colour(Stream(terminal), environment), wanted)

    def test_event_lines_contain_the_data_unchanged(self) -> None:
        shown = Shown(lines=True)
        lines = shown.show(*self.EVENTS).splitlines()
        self.assertEqual(json.loads(lines[0]), {"type": "text", "payload": "a\n"})
        self.assertIn("1.50", lines[1])
        self.assertEqual(
            [json.loads(line)["type"] for line in lines[2:]], ["data", "sound", "data", "data"]
        )
        self.assertEqual(json.loads(lines[5])["payload"], {"reason": "exit"})
        self.assertEqual(shown.notes.getvalue(), "")
        for line in Shown(terminal=True, lines=True).show(*self.EVENTS).splitlines():
            self.assertNotIn("\x9b", line)
            json.loads(line)

    def test_goals_cases_and_other_data_are_shown_as_words(self) -> None:
        for written, expected in (
            ('{"type":"goal_result","goal":"fast","result":true}', "goal fast: yes"),
            ('{"type":"goal_result","goal":"fast","result":false,"s":2}', "goal fast: no (s: 2)"),
            ('{"type":"goal_result","goal":"x","result":1}', "goal_result: goal: x, result: 1"),
            ('{"type":"case","case":"1","verdict":"partial"}', "case 1: partial"),
            (
                '{"type":"case","case":"a\\nb","verdict":"wrong_answer","points":1,"x":0}',
                "case a b: wrong answer (1 point, x: 0)",
            ),
            (
                '{"type":"case","case":"1","verdict":"time_limit","time":2.0044,"memory":3145728}',
                "case 1: time limit (2.004 s, 3 MiB)",
            ),
            (
                '{"type":"case","case":"1","verdict":"ok","message":"m","expected":"","printed":""}',
                "case 1: ok: m",
            ),
            (
                '{"type":"case","case":"1","verdict":"ok","points":2.50,"time":"1 s"}',
                "case 1: ok (2.5 points, time: 1 s)",
            ),
            (
                f'{{"type":"case","case":"1","verdict":"ok","memory":{"9" * 400}}}',
                f"case 1: ok (memory: {'9' * 400})",
            ),
            ('{"type":"case","case":"1"}', "case: case: 1"),
            ('{"type":"progress","done":3,"total":10}', "progress 3/10"),
            ('{"type":"progress","done":3}', "progress: done: 3"),
            ('{"type":"score","score":30,"maximum":100}', "score 30/100"),
            ('{"type":"score","score":7.5}', "score 7.5"),
            ('{"type":"score","score":1,"name":"part"}', "score: score: 1, name: part"),
            ('{"type":null,"a":1}', "type: null, a: 1"),
            ('{"a":{"b":"ü"}}', 'a: {"b": "ü"}'),
            ("{}", "{}"),
            ('{"type":"x"}', "x: "),
            ("[1.50]", "[1.50]"),
            ('"x"', '"x"'),
            ("9" * 5000, "9" * 5000),
            (f'["{"x" * 5000}"]', f'["{"x" * 5000}"]'),
        ):
            shown = Shown()
            shown.screen.show_event(Data(written))
            self.assertEqual(shown.notes.getvalue(), f"{expected}\n")

    def test_excerpts_of_a_case_are_shown_on_request(self) -> None:
        case = (
            '{"type":"case","case":"1","verdict":"wrong_answer","message":"a\\n b\\n",'
            '"printed":"8\\n","expected":"7 ","input":"3 4"}'
        )
        shown = Shown()
        for shown.screen.shows_excerpts in (False, True):
            for written in (case, '{"expected":"7"}', "[1]"):
                shown.screen.show_event(Data(written))
        self.assertEqual(
            shown.notes.getvalue(),
            "case 1: wrong answer: a\n     b\nexpected: 7\n[1]\n"
            "case 1: wrong answer: a\n     b\n"
            '  input: "3 4"\n  expected: "7 "\n  printed: "8\\n"\nexpected: 7\n[1]\n',
        )

    def test_summary_of_cases_precedes_the_final_error_unless_disabled(self) -> None:
        events = [
            Data('{"type":"case","case":"1","verdict":"accepted"}'),
            Data('{"type":"case","case":"2","verdict":"time_limit"}'),
            Data('{"type":"progress","done":2,"total":2}'),
            Data('{"type":"score","score":30,"maximum":100}'),
            Data(f'{{"type":"case","case":"{"x" * 16384}","verdict":"accepted"}}'),
            Data(f'{{"type":"case","case":"{"ü" * 8192}","verdict":"accepted"}}'),
            EvaluationError("exit", "exit status 1"),
        ]
        shown = Shown()
        shown.show(*events)
        self.assertEqual(
            shown.notes.getvalue().splitlines()[-2:],
            ["summary: score 30/100, 1/2 cases (1 time limit)", "failed: exit status 1"],
        )
        for settings, shown_events in (
            ({"shows_summary": False}, events),
            ({"lines": True}, events),
            ({}, events[2:4]),
        ):
            shown = Shown(**settings)
            shown.show(*shown_events)
            self.assertNotIn("summary", shown.notes.getvalue())

    def test_malformed_result_is_warned_of(self) -> None:
        shown = Shown()
        shown.show(Data('{"type":"case","case":"1","verdict":"WA"}'))
        last = shown.notes.getvalue().splitlines()[-1]
        words = 'warning: a value of the type "case" does not count as a result: "verdict" is "WA"'
        self.assertTrue(last.startswith(words), last)

    def test_status_line_is_cut_at_the_width_of_the_terminal_of_stderr(self) -> None:
        master, slave = os.openpty()
        self.addCleanup(os.close, master)
        termios.tcsetwinsize(slave, (10, 20))
        with open(slave, "w", buffering=1, encoding="utf-8") as notes:
            Screen(Stream(terminal=False), notes, False).show_progress("x" * 99)
            self.assertEqual(os.read(master, 200).decode(), CLEAR + "x" * 19)

    def test_output_clears_the_status_line_which_is_not_drawn_again_after_the_end(self) -> None:
        shown = Shown(terminal=True)
        shown.screen.show_progress("run\x1bning")
        progress = Data('{"type":"progress","done":3,"total":10}')
        printed = f"{CLEAR}run\\u001bning{CLEAR}b\n"
        self.assertEqual(shown.show(progress, Text("b")), printed)
        shown.screen.redraw_progress()
        self.assertEqual(shown.out.getvalue(), printed)
        self.assertEqual(Shown().show(progress), "")


class BrokenStreamTests(SynchronousTestCase):
    def stream(self, descriptor: int | None = None) -> TextIO:
        """Return a stream on a descriptor, or on a pipe without a reader."""
        if descriptor is None:
            reader, descriptor = os.pipe()
            os.close(reader)
        stream = open(descriptor, "w", encoding="utf-8")
        self.addCleanup(stream.close)
        return stream

    def test_full_disk_is_reported_once_and_later_output_is_discarded(self) -> None:
        stream = self.stream(os.open("/dev/full", os.O_WRONLY))
        screen = Screen(stream, Stream(False), False)
        screen.show_event(Text("a"))
        error = self.assertRaises(StdoutWriteError, screen.flush)
        self.assertEqual(str(error), f"stdout: {os.strerror(errno.ENOSPC)}")
        self.assertFalse(error.is_broken_pipe)
        screen.print_text("b" * 100_000)
        stream.close()  # writes what is buffered

    def test_output_to_a_pipe_without_reader_fails_as_a_broken_pipe(self) -> None:
        stream = self.stream()
        with self.assertRaises(StdoutWriteError) as caught:
            Screen(stream, Stream(False), False).show_event(Text("a" * 1_000_000))
        self.assertTrue(caught.exception.is_broken_pipe)
        stream.close()

    def test_messages_to_a_broken_stderr_raise_nothing(self) -> None:
        stream = self.stream()
        screen = Screen(Stream(False), stream, False)
        screen.show_message("a")
        screen.show_message("b")
        stream.close()
