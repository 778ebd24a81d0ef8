r"""Output of evaluators as hypothesis strategies, and events of the parser.

Events are written as short as tables need them:

    str         a text event, or several of them joined
    bytes       a data event: its payload exactly as it stands on the line
    PrintedFile  the data event that carries a file
    ErrorEvent  the data event `evaluation_error`, by its reason
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterable, Sequence
from typing import NoReturn, TypeAlias

import attrs
from hypothesis import strategies as st

from tawebeval.core.events import EventBatch
from tawebeval.core.segi import Markers, PrintedFile, SegiParser

MARKERS = Markers(b"~DB", b"~DE", b"~FB", b"~FE")  # short, so that near misses are frequent
MAX_VALUE = 40
MAX_FILE = 60
MAX_PAYLOAD = 64 * 1024
SMALL_STEPS = {
    "MAX_DATA_VALUE_BYTES": MAX_VALUE,
    "MAX_SENT_FILE_BYTES": MAX_FILE,
    "MAX_BYTES_PARSED_PER_CALL": 300,
    "_STEP": 20,
    "_LINE": 20,
    "_FAULT": 100,
    "_FILE": 100,
    "_BLOCK": 24,
    "_SHORT": 12,
    "_NEAR": 12,
    "_PIECE": 8,
}
"""Constants of `core.segi` with which a parser makes a few steps of some bytes in a turn."""


@attrs.frozen
class ErrorEvent:
    """The data event `evaluation_error`."""

    reason: str = "protocol"


Event: TypeAlias = "str | bytes | PrintedFile | ErrorEvent"


# Events of the parser


_DATA = b'{"type":"data","payload":'


def _refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def decode(batch: EventBatch) -> list[str | bytes]:
    """Decode a batch, and assert everything that the contract promises of each event.

    Data events come back as their payload verbatim, files and errors among them.
    """
    assert batch.lines[-1:] in (b"", b"\n"), batch.lines
    lines = batch.lines.split(b"\n")[:-1]
    assert len(lines) == batch.count == batch.lines.count(b"\n")
    events: list[str | bytes] = []
    for line in lines:
        value = json.loads(line.decode("utf-8", "strict"), parse_constant=_refuse)
        assert list(value) == ["type", "payload"], line
        if value["type"] == "text":
            payload = value["payload"]
            assert payload, "a text event says something"
            assert payload == "\n" or "\n" not in payload, payload
            assert len(payload.encode()) <= MAX_PAYLOAD
            events.append(payload)
        else:
            assert value["type"] == "data", line
            assert line.startswith(_DATA)
            events.append(line[len(_DATA) : -1])
    return events


def classify(events: Iterable[str | bytes]) -> list[Event]:
    """Return the same events, with files and errors in place of their data events."""
    return [event if isinstance(event, str) else _classify_data(event) for event in events]


def _classify_data(payload: bytes) -> Event:
    value = json.loads(payload)
    match value:
        case {"type": "evaluation_error", "reason": reason, "message": str(message)} if message:
            return ErrorEvent(reason)
        case {"type": "file", **rest}:
            assert set(rest) == {"filename", "content_type", "content_base64"}
            content = b64decode(rest["content_base64"], validate=True)
            return PrintedFile(rest["filename"], rest["content_type"], content)
    return payload


def join_text(events: Iterable[Event]) -> list[Event]:
    """Join adjacent text events: places where text was cut do not matter."""
    result: list[Event] = []
    for event in events:
        if isinstance(event, str) and result and isinstance(result[-1], str):
            result[-1] += event
        else:
            result.append(event)
    return result


# Input of the parser


@attrs.frozen
class Chunk:
    """Up to `size` bytes of stdout; with `flush` the partial line after them is delivered."""

    size: int
    flush: bool = False


BYTE_BY_BYTE = [Chunk(1)]
BYTE_BY_BYTE_FLUSHED = [Chunk(1, flush=True)]


def chunks_of(stdout: bytes, chunking: Sequence[Chunk]) -> Iterable[tuple[bytes, bool]]:
    """Cut `stdout` as `chunking` says, again and again until all is used."""
    while chunking and stdout:
        for chunk in chunking:
            yield stdout[: chunk.size], chunk.flush
            stdout = stdout[chunk.size :]
    yield stdout, False


def read_file(path: bytes) -> bytes | None:
    """Return the content of the file at a path: the path itself, or None for a refused one."""
    return None if path.startswith(b"refused") else path


def answer_wanted_file(parser: SegiParser) -> EventBatch:
    """Supply the file that the parser wants, or refuse it."""
    assert parser.awaited_file is not None
    content = read_file(parser.awaited_file.path.encode("utf-8", "surrogateescape"))
    return (
        parser.refuse_file("there is no such file")
        if content is None
        else parser.supply_file(content)
    )


def run_turns(parser: SegiParser, first: EventBatch) -> Iterable[EventBatch]:
    """Yield `first` and the batches after it, until the parser has parsed all that it can."""
    yield first
    while parser.has_pending_input:
        yield parser.parse_pending()


def parse(
    stdout: bytes,
    chunking: Sequence[Chunk] = (),
    *,
    late: int = 0,
    markers: Markers = MARKERS,
    max_value: int = MAX_VALUE,
    max_file: int = MAX_FILE,
) -> list[str | bytes]:
    """Return the events of a whole run's stdout, each checked by `decode`.

    A wanted file is answered when `late` more chunks have come.
    """
    parser = SegiParser(markers, max_value=max_value, max_file=max_file)
    events: list[str | bytes] = []

    def take(first: EventBatch) -> None:
        for batch in run_turns(parser, first):
            events.extend(decode(batch))

    waited = 0
    for chunk, flush in chunks_of(stdout, chunking):
        take(parser.feed(chunk))
        if flush:
            take(parser.flush_partial_line())
        waited += 1
        while parser.awaited_file is not None and waited > late:
            take(answer_wanted_file(parser))
            waited = 0
    while parser.awaited_file is not None:
        take(answer_wanted_file(parser))
    take(parser.finish())
    return events


chunkings = st.lists(st.builds(Chunk, st.integers(1, 12), st.booleans()), max_size=8)
long_chunkings = st.lists(st.builds(Chunk, st.integers(1, 9) | st.integers(1, 400)), max_size=8)


@st.composite
def mutated(draw: st.DrawFn, whole: st.SearchStrategy[bytes], pieces: Sequence[bytes]) -> bytes:
    """Draw bytes, and up to three changes: cut out, doubled, moved, replaced by one of `pieces`."""
    data = draw(whole)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 1, 2, 5, 20, 100, 10**9])))
        part, rest = data[start:end], data[:start] + data[end:]
        place = draw(st.integers(0, len(rest)))
        put = draw(st.sampled_from([b"", part, part + part]) | st.sampled_from(pieces))
        if draw(st.booleans()):
            place = start
        data = rest[:place] + put + rest[place:]
    return data


file_names = st.one_of(
    st.text(),
    st.text("/\\.\0aé\ud800"),
    st.integers(120, 260).map(lambda count: "é" * count),
    st.integers(250, 260).map(lambda count: "dir/" + "x" * count),
)
"""Names of files as clients may send them, valid and invalid."""


# The parts of stdout

_BEGINS = (MARKERS.data_begin, MARKERS.file_begin)
_MARKERS = (*_BEGINS, MARKERS.data_end, MARKERS.file_end)

_characters = st.sampled_from(
    [b"a", b" ", b"\t", b"\r", b'"', b"\\", b"\0", b"\x1b", b"\x7f", b"~", b"~D", b"D", b"B"]
    + [c.encode() for c in ("é", "€", "😀", "\x85", "\u2028", "\ufeff", "\ufffd")]
)
_bad_bytes = st.sampled_from(
    [b"\xff", b"\x80", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf"]
)
_near_markers = st.sampled_from(
    [
        line
        for marker in _MARKERS
        for line in (
            marker[:1],
            marker[:-1],
            marker[1:],
            marker + b"x",
            marker + b"\r",
            marker + b" ",
            b" " + marker,
            b"x" + marker,
            marker + marker,
        )
    ]
    + [MARKERS.data_end, MARKERS.file_end]  # text outside a block
)
_line = st.one_of(
    st.just(b""),
    _near_markers,
    st.lists(st.one_of(_characters, _bad_bytes), max_size=6).map(b"".join),
)

texts = (
    st.lists(_line, max_size=5)
    .map(b"\n".join)
    .filter(lambda text: not any(line in _BEGINS for line in text.split(b"\n")))
)
"""Bytes that are text wherever they stand: no line of them is a begin marker."""

any_bytes = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.one_of(
            st.sampled_from([m + b"\n" for m in _MARKERS]),
            st.sampled_from([b"\n", *_MARKERS]),
            st.sampled_from([b"X-SEGI-As: path\n", b'Content-Disposition: a; filename="b"\n']),
            st.sampled_from([b"1\n", b"{}\n", b"[\n", b"\n\n"]),
            _characters,
            _bad_bytes,
        ),
        max_size=14,
    ).map(b"".join),
)
"""Any output of an evaluator, with pieces of markers in any order."""

_header_pieces = st.sampled_from(
    [
        *("Content-Type", "Content-Disposition", "X-SEGI-As", "content-type", "X-Other", "a b", ""),
        *(":", ": ", " : ", "\n", "\r\n", "\n ", "\n\t", "\r", " ", "\t", "path", "PATH"),
        *("content", "attachment", "a", ";", "; ", "; filename=", "; filename*=", "; filename*0="),
        *("; x=", "=", '"', '"a b.txt"', '"dir/\\"a\\\\"', "\\", "a.txt", "..", "é", "\0", "\x7f"),
        *("\x85", "\u2028", "UTF-8''", "utf-8'en'%C3%A9", "iso-8859-1''%e9", "q1''x"),
        *("UTF-8''%ff", "%", "'", "%41"),
    ]
)


def _header(name: str, *values: str) -> st.SearchStrategy[str]:
    return st.sampled_from(values).map(lambda value: f"{name}: {value}\n")


_headers = st.one_of(
    st.lists(_header_pieces, max_size=6).map("".join),
    _header("X-SEGI-As", "path", "content", "Path ", "shell"),
    _header("Content-Type", "text/plain", "", "a/b; name=c"),
    _header("Content-Disposition", "attachment", "attachment; filename=a.txt"),
    _header("Content-Disposition", 'a; filename="a b"', "a; filename*=UTF-8''%41"),
)


_bodies = st.one_of(
    st.sampled_from([b"", b"x", b"a/b.txt", b"refused", b"x/", b"\xff", b"a\nb", b"\n"]),
    st.sampled_from([b"x" * MAX_FILE, b"x" * (MAX_FILE + 1)]),
    st.lists(
        st.one_of(_characters, _bad_bytes, st.just(b"\n"), st.sampled_from(_MARKERS)), max_size=8
    ).map(b"".join),
)


@st.composite
def file_blocks(draw: st.DrawFn) -> bytes:
    """Draw a file block with headers that may be anything, long ones too."""
    head = "".join(draw(st.lists(_headers, max_size=4)))
    if draw(st.integers(0, 9)) == 0:
        head += f"X-Long: {'x' * draw(st.integers(900, 1100))}\n"
    body = draw(_bodies)
    empty_line = draw(st.sampled_from([b"\n", b"\r\n", b""]))
    parts = (MARKERS.file_begin + b"\n", head.encode(), empty_line, body, b"\n", MARKERS.file_end)
    return b"".join(parts) + b"\n"


_json = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=4),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=3,
)


def _dump(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


_values = st.one_of(
    _json.map(_dump).filter(lambda value: len(value) <= MAX_VALUE - 2),
    st.sampled_from([b"1e400", b"1.0", b"-0", b"12345678901234567890123", b'{"a" : [ ] }', b'""']),
)
_padding = st.sampled_from([b"", b" ", b"\t", b"\r"])
_no_values = st.sampled_from(
    [
        *(b"", b" ", b"NaN", b"-Infinity", b"{", b"01", b"[1,]", b"1 2", b"'a'", b"\xff", b"~"),
        *(b"~DEx", MARKERS.file_end, b'"' + b"x" * MAX_VALUE + b'"', b"[" * (MAX_VALUE + 1)),
    ]
)


data_blocks = st.builds(
    lambda lines, end: b"\n".join([MARKERS.data_begin, *lines, *end, b""]),
    st.lists(st.tuples(_padding, _values, _padding).map(b"".join) | _no_values, max_size=4),
    st.sampled_from([[MARKERS.data_end], [MARKERS.data_end], []]),
)
"""Blocks of data; the end marker may be missing."""


def _repeated(pieces: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.builds(lambda piece, times: piece * times, pieces, st.integers(1, 30))


_lines = st.sampled_from(
    [line + b"\n" for line in (*_MARKERS, b"", b"a", b"1", b"[", b'"\\ud800"')]
)

stdouts = st.lists(
    st.one_of(
        st.lists(_line, max_size=4).map(b"\n".join),
        _repeated(_line.map(lambda line: line + b"\n")),
        _repeated(st.one_of(_characters, _bad_bytes)),
        _repeated(_lines),
        _lines,
        any_bytes,
        *[data_blocks] * 2,
        *[file_blocks()] * 2,
    ),
    max_size=8,
).map(b"".join)
"""Anything that evaluators and attackers print: text, blocks, what is nearly these, and much of it.

The end may be missing: what comes last is cut off anywhere.
"""
