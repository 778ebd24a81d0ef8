"""`client.events`: pages as bytes, events as values."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from twisted.trial.unittest import SynchronousTestCase

from tawebeval_client.events import (
    Data,
    EvaluationError,
    Event,
    File,
    Text,
    Unknown,
    parse_page,
    split_cursor,
)


def page(*events: tuple[str, str], begin: str | None = None, end: str | None = "9") -> bytes:
    """Return a page of events, each given by its type and the JSON of its payload."""
    lines = [f'{{"type":{json.dumps(kind)},"payload":{payload}}}' for kind, payload in events]
    bounds = f'"begin":{json.dumps(begin)},"end":{json.dumps(end)}'
    return f'{{{bounds},"data":[{",".join(lines)}]}}'.encode()


def parse(kind: str, payload: str) -> Event:
    """Return the event of a page that has one."""
    (event,) = parse_page(page((kind, payload)), None).events
    return event


class EventTests(SynchronousTestCase):
    """Events."""

    def test_data_event_has_the_raw_json_and_the_parsed_payload(self) -> None:
        for raw_json in ("1.50", '{"a": [ 1e2, "\\u00e9" ]}', "9" * 400, "null", '"x"'):
            event = parse("data", raw_json)
            self.assertEqual(event, Data(raw_json))
            assert isinstance(event, Data)
            self.assertEqual(event.payload, json.loads(raw_json))

    def test_error_event_is_a_failure_unless_its_reason_is_protocol(self) -> None:
        for reason, final in (("protocol", False), ("timeout", True), ("exit", True)):
            payload = {"type": "evaluation_error", "reason": reason, "message": "x"}
            event = parse("data", json.dumps(payload))
            assert isinstance(event, EvaluationError)
            self.assertEqual(event.is_failure, final)

    def test_event_keeps_a_value_that_python_cannot_parse_and_its_payload_raises(self) -> None:
        for raw_json in ("9" * 5000, "[" * 900 + "]" * 900):
            event = parse("data", raw_json)
            assert isinstance(event, Data)
            self.assertEqual(event.raw_json, raw_json)
        with self.assertRaises(ValueError):
            _ = Data("9" * 5000).payload
        with self.assertRaises(ValueError):
            _ = Data("[" * 100_000).payload

    def test_deeply_nested_value_is_parsed_at_any_stack_depth(self) -> None:
        def at(frames: int) -> None:
            if frames:
                at(frames - 1)
                return
            read = parse_page(page(*sent), None).events
            self.assertEqual([event.raw_json for event in read if isinstance(event, Data)], values)
            self.assertEqual(read[0], Text("[{"))
            self.assertIsInstance(read[1], File)

        file = {"type": "file", "filename": "[", "content_type": "}", "content_base64": ""}
        for depth in (800, 20_000):  # Python 3.13 goes on to 10,000, however far down it is
            deep = '{"a\\"[": [' * depth + "]}" * depth
            values = [deep, "[]", "[3]", "{}", '"["', "7", '[["\\\\", "]"]]', deep]
            whole = [("data", json.dumps(file)), *(("data", one) for one in values)]
            sent = [("text", '"[{"'), *whole]
            for frames in (0, 200, 400):
                at(frames)

    def test_page_with_unbalanced_brackets_is_refused(self) -> None:
        for body in (b"[" * 5000, b"]" * 5000 + b"[" * 5000, page(("data", "[" * 5000 + "}"))):
            self.assertRaises(ValueError, parse_page, body, None)

    def test_file_event_has_its_content_and_a_malformed_file_event_is_data(self) -> None:
        whole = {"type": "file", "filename": "a", "content_type": "b", "content_base64": "AAE="}
        event = parse("data", json.dumps(whole))
        self.assertEqual(event, File("a", "b", b"\0\1"))
        assert isinstance(event, File)
        self.assertEqual(json.loads(event.raw_json), whole)
        for name, value in (
            ("type", "File"),
            ("filename", 1),
            ("content_type", None),
            ("content_base64", "A"),
            ("content_base64", "?AE="),
            ("content_base64", "é"),
        ):
            other = json.dumps({**whole, name: value})
            self.assertEqual(parse("data", other), Data(other))

    def test_error_event_has_reason_and_members_and_a_malformed_error_event_is_data(self) -> None:
        whole = {"type": "evaluation_error", "reason": "exit", "message": "m", "status": 3}
        event = parse("data", json.dumps(whole))
        self.assertEqual(event, EvaluationError("exit", "m", {"status": 3}))
        for name in ("reason", "message"):
            other = json.dumps({**whole, name: 1})
            self.assertEqual(parse("data", other), Data(other))

    def test_event_of_any_kind_has_the_time_of_the_page(self) -> None:
        for kind, payload in (
            ("text", '"x"'),
            ("data", "1"),
            ("data", '{"type":"file","filename":"","content_type":"","content_base64":""}'),
            ("data", '{"type":"evaluation_error","reason":"","message":""}'),
            ("new", "1"),
        ):
            body = page((kind, payload)).replace(
                b"}]}", b',"time":"2026-11-20T20:07:08.108+00:00"}]}'
            )
            (event,) = parse_page(body, None).events
            self.assertEqual(event.time, datetime(2026, 11, 20, 20, 7, 8, 108000, UTC))
            self.assertEqual(event, parse(kind, payload))
            self.assertIsNone(parse(kind, payload).time)

    def test_unknown_type_of_event_is_kept(self) -> None:
        for kind, payload in (("sound", '{"a":1}'), ("text", "1")):
            self.assertEqual(parse(kind, payload), Unknown(kind, payload))


class PageTests(SynchronousTestCase):
    """Pages, and cursors."""

    def test_each_event_has_the_cursor_after_it(self) -> None:
        three = [("text", '"a"')] * 3
        for begin, end, expected in (
            (None, "3", ["+1", "+2", "3"]),
            ("4", "7", ["4+1", "4+2", "7"]),
            ("4", None, ["4+1", "4+2", "4+3"]),
        ):
            found = parse_page(page(*three, begin=begin, end=end), begin)
            self.assertEqual([event.cursor for event in found.events], expected)
            self.assertEqual((found.begin, found.end), (begin, end))

    def test_cursor_is_split_into_server_cursor_and_event_count(self) -> None:
        for cursor, parts in (
            (None, (None, 0)),
            ("", (None, 0)),
            ("+3", (None, 3)),
            ("17", ("17", 0)),
            ("a-_+12", ("a-_", 12)),
        ):
            self.assertEqual(split_cursor(cursor), parts)

    def test_malformed_page_and_page_of_another_cursor_are_refused(self) -> None:
        for body in (
            *(b"", b"{}", b"[]", b"\xff", page()[:-1], b"[" * 100_000),
            *(page(begin="3"), b'{"begin":null,"end":"1","data":1}'),
            b'{"begin":null,"end":"1","data":[{"type":"text"}]}',
            *(page(end=""), page(end="1+2"), page(end="1 "), page(end="é")),  # no cursors
        ):
            error = self.assertRaises(ValueError, parse_page, body, None)
            self.assertIn("instead of a page of events", str(error))
        self.assertRaises(ValueError, parse_page, page(), "3")
