r"""What attackers print: stdout that takes the daemon as long as it can, byte for byte.

Each flood is aimed at one thing that the daemon does with stdout. The limits are those of the
configuration's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

from tawebeval.core.segi import MAX_FILE_HEADERS_BYTES, MAX_PATH_BYTES, Markers

VALUE = 2**20  # segi.MAX_DATA_VALUE_BYTES
FILE = 2**21  # segi.MAX_SENT_FILE_BYTES

_STAND_INS = "\x7f" + "".join(map(chr, range(0xFDD0, 0xFDF0)))
_RARE = "".join(map(chr, range(0x10000, 0x10000 + 4000)))


def floods(markers: Markers, size: int) -> Mapping[str, bytes]:
    """Return floods by their names: of `size` bytes or more, or of what the limits allow."""

    def much(piece: bytes | str) -> bytes:
        piece = piece.encode() if isinstance(piece, str) else piece
        return piece * (size // len(piece) + 1)

    def data(lines: bytes) -> bytes:
        return b"%b\n%b\n%b\n" % (markers.data_begin, lines.removesuffix(b"\n"), markers.data_end)

    def file(head: bytes, body: bytes = b"") -> bytes:
        return b"%b\n%b\n%b\n%b\n" % (markers.file_begin, head, body, markers.file_end)

    def value(start: bytes, piece: bytes, end: bytes) -> bytes:
        return data(start + piece * ((VALUE - len(start + end)) // len(piece)) + end)

    def headers(piece: bytes, start: bytes = b"", end: bytes = b"") -> bytes:
        """Return files whose headers are as long as may be."""
        repeated = piece * ((MAX_FILE_HEADERS_BYTES - len(start + end) - 1) // len(piece))
        return much(file(start + repeated + end + b"\n"))

    begin, end = markers.data_begin, markers.data_end
    disposition = b"Content-Disposition: a"
    nested = b"[" * 400 + b"]" * 400
    return {
        "lines of 10 bytes": much(b"x" * 9 + b"\n"),
        "blank lines": much(b"\n"),
        "blank lines between letters": much(b"a\n\n"),
        "lines of one letter": much(b"a\n"),
        "lines of one control character": much(b"\x01\n"),
        "control characters": much(b"\x01"),
        "bytes that are not UTF-8": much(b"\xff"),
        "lines of one byte that is not UTF-8": much(b"\xff\n"),
        "characters cut off": much(b"\xf0\x9f\x98"),
        "every stand-in for a terminator, and blank lines": much(_STAND_INS + "\n" * 900),
        "every stand-in for a terminator, and rare characters": much(f"{_STAND_INS}\n{_RARE}"),
        "~": much(b"~"),
        "lines of ~": much(b"~\n"),
        "begin markers but for one byte": much(b"\n" + begin[:-1] + b"\n"),
        "begin markers with one byte more": much(b"\n" + begin + b"x"),
        "begin markers without an end": much(begin + b"\n"),
        "begin markers of files and text": much(b"~" * 300 + b"\n" + file(b"", b"x")),
        "empty data blocks": much(data(b"")),
        "data blocks without a line": much(b"%b\n%b\n" % (begin, end)),
        "values of one digit": data(much(b"1\n")),
        "blank lines in a data block": data(much(b"\n")),
        "broken lines in a data block": data(much(b"x\n")),
        "lines in a data block that are not UTF-8": data(much(b"\xff\n")),
        "end markers with one byte more": data(much(end + b"x\n")),
        "data blocks of one broken line": much(data(b"x")),
        "data blocks of half a surrogate pair": much(data(rb'"\ud800"')),
        "data blocks of a line that is not UTF-8": much(data(b"\xff" * 250)),
        "data blocks that are nested too deeply": much(data(b"[" * 1200)),
        "results": data(much(b'{"type":"case","case":"1","verdict":"accepted"}\n')),
        "results of other goals": data(
            b"".join(
                b'{"type":"goal_result","goal":"%d","result":true}\n' % n for n in range(size // 40)
            )
        ),
        "values that resemble results": data(much(b'{"type":"score","score":1e999}\n')),
        "results with the longest name": data(
            much(b'{"type":"goal_result","result":true,"goal":"%b"}\n' % (rb"\u00e9" * 2_700))
        ),
        "values of nearly the member of results": data(much(b"[" + b'"type",' * 2_300 + b"1]\n")),
        "values of 500 levels": data(much(b"[" * 500 + b"]" * 500 + b"\n")),
        "one value that is nested too deeply": value(b"", b"[", b""),
        "one value of nested arrays": value(b"[", nested + b",", b"1]"),
        "one broken value of nested arrays": value(b"[", nested + b",", b"1]x"),
        "one value of empty arrays": value(b"[", b"[],", b"1]"),
        "one value of empty objects": value(b"[", b'{"":{}},', b"1]"),
        "one value of escapes": value(b'"', rb"\u0041", b'"'),
        "one value of half surrogate pairs": value(b'"', rb"\ud800", b'"'),
        "one value of spaces": value(b"", b" ", b""),
        "one value that is not UTF-8": value(b'"', b"\xff", b'"'),
        "one value of two-byte characters": value(b'"', "é".encode(), b'"'),
        "one value over the limit": data(b"1" * 4 * VALUE),
        "one file": file(b"", b"\xff" * FILE),
        "one file of blank lines": file(b"", b"\n" * FILE),
        "one file of end markers but for one byte": file(
            b"", (b"\n" + markers.file_end[:-1]) * (FILE // 60)
        ),
        "one file over the limit": file(b"", b"x\n" * FILE),
        "empty files": much(file(b"")),
        "files without an empty line": much(b"%b\n%b\n" % (markers.file_begin, markers.file_end)),
        "files with a line that is no header": much(file(b"x\n")),
        "files with many headers": much(file("".join(f"A{n}:\n" for n in range(170)).encode())),
        "files with a folded header": headers(b"\n ", b"A:"),
        "files with a quoted string of quoted pairs": headers(
            rb"\a", disposition + b'; filename="', b'"'
        ),
        "files with a quoted string that does not end": headers(
            b";", disposition + b'; filename="'
        ),
        "files with many parameters": much(
            file(disposition + "".join(f";a{n}=b" for n in range(130)).encode() + b"\n")
        ),
        "files with an encoded name": headers(b"%41", disposition + b"; filename*=UTF-8''"),
        "files of an unknown kind": headers(b"x", b"X-SEGI-As: "),
        "files by a path of slashes": much(file(b"X-SEGI-As: path\n", b"/" * MAX_PATH_BYTES)),
        "one file by a path over the limit": file(b"X-SEGI-As: path\n", b"/" * FILE),
        "files by a path": much(file(b"X-SEGI-As: path\n", b"x")),
    }
