"""`client.forms`: the encoding of a submission."""

from __future__ import annotations

import os
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from multipart import MultipartParser
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.client.forms import Content, NamedFile, SubmissionForm
from tawebeval.core.text import get_base_name


def encode(form: SubmissionForm) -> bytes:
    """Return the body, whose length must be the announced one."""
    with ExitStack() as opened:
        body = form.open_body(opened)
        encoded = b"".join(body.iterate_pieces())
    assert len(encoded) == body.length
    return encoded


def parse(form: SubmissionForm) -> list[tuple[str, str | None, bytes]]:
    """Return name, file name and content of each part, as a server parses them."""
    boundary = form.content_type.partition("boundary=")[2]
    parser = MultipartParser(BytesIO(encode(form)), boundary, memory_limit=1 << 22)
    return [(part.name, part.filename, part.raw) for part in parser]


class FormTests(SynchronousTestCase):
    """`SubmissionForm`."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp())
        self.folder.mkdir()

    def test_each_kind_of_content_has_its_form(self) -> None:
        file = self.folder / "my prog.py"
        file.write_bytes(b"y" * 200_000)
        form = SubmissionForm(
            {"seed": "7", "ü": "é\r\n"},
            {
                "text": "c++ ü",
                "raw": b"\0\r\n--",
                "file": file,
                "named": NamedFile("a/b.c", b"x"),
                "other": NamedFile("z.py", file),
                "empty": b"",
            },
        )
        self.assertEqual(
            parse(form),
            [
                ("seed", None, b"7"),
                ("ü", None, "é\r\n".encode()),
                ("submission[text]", None, "c++ ü".encode()),
                ("submission[raw]", None, b"\0\r\n--"),
                ("submission[file]", "my prog.py", b"y" * 200_000),
                ("submission[named]", "b.c", b"x"),
                ("submission[other]", "z.py", b"y" * 200_000),
                ("submission[empty]", None, b""),
            ],
        )

    # A server cannot tell "%22" from an escaped quotation mark, nor can it of a browser's form.
    @given(st.text(min_size=1, max_size=20).filter(lambda name: "%" not in name), st.text())
    def test_any_name_and_text_arrives_unchanged_or_is_refused_before_sending(
        self, filename: str, text: str
    ) -> None:
        submission: dict[str, Content] = {"a": NamedFile(filename, b"x"), "b": text}
        try:
            form = SubmissionForm({"c": text}, submission)
        except ValueError:
            return
        self.assertEqual(
            parse(form),
            [
                ("c", None, text.encode()),
                ("submission[a]", get_base_name(filename), b"x"),
                ("submission[b]", None, text.encode()),
            ],
        )

    def test_invalid_names_and_texts_are_refused_before_sending(self) -> None:
        for fields, submission, words in (
            *(({}, {"a": NamedFile(one, b"")}, "no file name") for one in ("", "..", "a/")),
            ({}, {"a": NamedFile("x" * 256, b"")}, "256 bytes; the limit is 255"),
            ({}, {"a": NamedFile("\udcff", b"")}, "UTF-8"),
            ({}, {"a": Path("..")}, "no file name"),
            ({}, {"source": "\udcff"}, "submission[source]: must be UTF-8"),
            ({"seed": "\udcff"}, {}, "seed: must be UTF-8"),
        ):
            error = self.assertRaises(ValueError, SubmissionForm, fields, submission)
            self.assertIn(words, str(error))

    def test_unreadable_and_special_files_are_named(self) -> None:
        os.mkfifo(self.folder / "pipe")
        for name, kind in (("absent", FileNotFoundError), ("pipe", OSError), (".", OSError)):
            path = self.folder / name
            form = SubmissionForm({}, {"a": NamedFile("a", path)})
            error = self.assertRaises(kind, encode, form)
            self.assertEqual(str(error.filename), str(path))

    def test_grown_file_is_cut_and_shrunk_file_ends_the_request(self) -> None:
        path = self.folder / "log"
        path.write_bytes(b"x" * 100)
        form = SubmissionForm({}, {"a": path})
        for size, works in ((200, True), (50, False)):
            with ExitStack() as opened:
                path.write_bytes(b"x" * 100)
                body = form.open_body(opened)
                os.truncate(path, size)
                if works:
                    self.assertEqual(len(b"".join(body.iterate_pieces())), body.length)
                else:
                    error = self.assertRaises(OSError, list, body.iterate_pieces())
                    self.assertIn("has changed", error.strerror)
