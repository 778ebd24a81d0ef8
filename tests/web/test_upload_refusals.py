"""`web.upload`: forms that are refused, as early as that can be known."""

from __future__ import annotations

from twisted.logger import capturedLogs, formatEvent

from tawebeval.config import Configuration, LimitSettings, RepositoryFetchSettings
from tawebeval.core.form import MAX_FIELD_NAME_LENGTH, MAX_FIELDS
from tawebeval.errors import (
    InvalidField,
    MalformedRequest,
    RequestTooLarge,
    ServerBusy,
    UnsupportedMediaType,
)
from tawebeval.evaluations.uploads import WRITE_BATCH_BYTES
from tests.cases.uploads import UploadTestCase, without
from tests.fakes.clients import BOUNDARY, Part, form, parts


class FieldTests(UploadTestCase):
    """Fields that are missing, repeated or broken: the field is named."""

    def test_missing(self) -> None:
        """What is required is missed, absent or empty."""
        for name in ("repository[url]", "commit_oid", "evaluator_cmd"):
            self.refuse(InvalidField, form(without(name)), name)
            self.refuse(InvalidField, form([Part(name, b" "), *without(name)]), name)
        self.refuse(InvalidField, form(without("submission[source]")), "submission")
        self.refuse(InvalidField, form([]), "submission")

    def test_missing_field_names_the_nearest_unknown_one(self) -> None:
        """A name that is nearly right is ignored, so the message about the missing one has it."""
        for name, sent in (
            ("repository[url]", "repository[uri]"),
            ("repository[url]", "repo_url"),
            ("commit_oid", "commit"),
            ("evaluator_cmd", "evaluator_command"),
            ("submission[source]", "source"),
        ):
            body = form([Part("other", b""), Part(sent, b"x"), *without(name)])
            field = name.partition("[source]")[0]
            said = str(self.refuse(InvalidField, body, field))
            self.assertTrue(
                said.endswith(f"; {sent!r} is no known field: rename it to {name}"), said
            )

    def test_repeated(self) -> None:
        """No field may stand there twice, even with the same content."""
        good = parts(branch=b"main", depth=b"1", directory=b"a", seed=b"1")
        for part in good:
            self.refuse(InvalidField, form([*good, part]), part.name)

    def test_broken(self) -> None:
        """Each field has its rules."""
        for name, content in (
            ("url", b"file:///etc"),
            ("url", b"https://user:secret@example.org/x"),
            ("url", b"--upload-pack=x"),
            ("branch", b"-x"),
            ("branch", b"a..b"),
            ("depth", b"0"),
            ("depth", b"-1"),
            ("depth", b"1.5"),
        ):
            self.refuse(InvalidField, form(parts(**{name: content})), f"repository[{name}]")
        for name, content in (
            ("commit_oid", b"main"),
            ("commit_oid", b"c" * 39),
            ("commit_oid", b"c" * 41),
            ("commit_oid", b"c" * 40 + b"\n"),
            ("directory", b"/etc"),
            ("directory", b"a/../.."),
            ("directory", b"a\0"),
            ("evaluator_cmd", b"a\0b"),
            ("seed", b"-1"),
            ("seed", b"2147483648"),
            ("seed", b"x"),
        ):
            self.refuse(InvalidField, form(parts(**{name: content})), name)

    def test_protocols(self) -> None:
        """Which protocols are allowed is configured."""
        body = form(parts(url=b"file:///srv/x.git"))
        allowed = Configuration(repositories=RepositoryFetchSettings(protocols=("file",)))
        request = self.receive(body, configuration=allowed).request
        self.assertEqual(request.repository.url, "file:///srv/x.git")

    def test_not_utf8(self) -> None:
        """Text fields are UTF-8."""
        for name in ("evaluator_cmd", "directory", "seed"):
            self.refuse(InvalidField, form(parts(**{name: b"\xff"})), name)

    def test_names_of_the_submission(self) -> None:
        """What begins with `submission` and is not of the form is refused, not ignored."""
        for name in (
            "submission",
            "submission[]",
            "submission[A]",
            "submission[1a]",
            "submission[a-b]",
            "submission[a/b]",
            "submission[..]",
            "submission[a][b]",
            "submission[a]x",
            "submissions",
        ):
            self.refuse(InvalidField, form([*parts(), Part(name, b"x", "x")]), name)

    def test_file_names(self) -> None:
        """File names that are none are refused, and nothing is written."""
        for filename in (".", "..", "a/", "a/..", "..\\..", "x" * 256, "é" * 128, "a\0b"):
            part = Part("submission[a]", b"x", filename)
            self.refuse(InvalidField, form([part, *parts()]), "submission[a]")
        self.assertEqual(list(self.uploads.iterdir()), [])

    def test_long_name(self) -> None:
        """The name of a field has a limit, which the refusal tells; the disk is not tried."""
        longest = Part(f"submission[{'a' * MAX_FIELD_NAME_LENGTH}]", b"x", "x")
        self.receive(form([longest, *parts()]))
        longer = Part(f"submission[{'a' * (MAX_FIELD_NAME_LENGTH + 1)}]", b"x", "x")
        error = self.refuse(InvalidField, form([longer, *parts()]), longer.name[:80])
        self.assertIn(f"at most {MAX_FIELD_NAME_LENGTH} characters", error.detail)


class LimitTests(UploadTestCase):
    """Too much."""

    def test_folded_headers_are_few(self) -> None:
        head = b'Content-Disposition: form-data;\r\n name="x"\r\nX-Odd: y'
        self.receive(form([head + b"\r\n z" * 99 + b"\r\n\r\n", *parts()]))
        self.refuse(RequestTooLarge, form([head + b"\r\n z" * 100 + b"\r\n\r\n", *parts()]))

    def test_announced(self) -> None:
        """A body whose announced length is over the limit is refused before it is sent."""
        self.receiver(20_000)
        with self.assertRaises(RequestTooLarge) as caught:
            self.receiver(20_001)
        self.assertEqual(caught.exception.extra_members, {"limit": 20_000})

    def test_not_announced(self) -> None:
        """Without a length it is refused at the first byte over the limit."""
        body = form(parts(source=b"x" * 30_000))
        receiver = self.receiver()
        receiver.feed(body[:20_000])
        with self.assertRaises(RequestTooLarge) as caught:
            receiver.feed(body[20_000:20_001])
        self.assertEqual(caught.exception.extra_members, {"limit": 20_000})
        receiver.abandon()

    def test_exactly(self) -> None:
        """As much as the limit is allowed."""
        body = form(parts(source=b""))
        body = form(parts(source=b"x" * (20_000 - len(body))))
        self.assertEqual(len(body), 20_000)
        receiver = self.receiver(20_000)
        receiver.feed(body)
        self.finish(receiver)

    def test_text(self) -> None:
        """A text field over its limit is refused and named; at its limit it is taken."""
        self.receive(form(parts(directory=b"x" * 4096)))
        error = self.refuse(RequestTooLarge, form(parts(directory=b"x" * 4097)), "directory")
        self.assertEqual(error.extra_members["limit"], 4096)

    def test_each_text(self) -> None:
        """Each text field has a limit in bytes of UTF-8; the error tells how much came."""
        fields = {
            "repository[url]": ("url", 2048, b"https://example.org/"),
            "repository[branch]": ("branch", 255, b""),
            "directory": ("directory", 4096, b""),
            "evaluator_cmd": ("evaluator_cmd", 65_536, b""),
        }
        usual = Configuration(limits=LimitSettings(request_body=200_000))
        for name, (short, limit, before) in fields.items():
            most = (before + "é".encode() * ((limit - len(before)) // 2)).ljust(limit, b"x")
            receiver = self.receiver(configuration=usual)
            receiver.feed(form(parts(**{short: most})))
            self.finish(receiver)
            receiver = self.receiver(configuration=usual)
            with self.assertRaises(RequestTooLarge) as caught:
                receiver.feed(form(parts(**{short: most + b"y"})))
            self.assertEqual(
                caught.exception.extra_members, {"field": name, "size": limit + 1, "limit": limit}
            )
            self.assertIn(f"{name}: the field is over ", caught.exception.detail)
        for name in ("depth", "commit_oid", "seed"):
            receiver = self.receiver(configuration=usual)
            with self.assertRaises(RequestTooLarge) as caught:
                receiver.feed(form(parts(**{name: b"1" * 65})))
            self.assertEqual(caught.exception.extra_members["limit"], 64)

    def test_text_that_is_ignored(self) -> None:
        """What is ignored is not kept, and has no limit of its own."""
        self.receive(form([*parts(), Part("other", b"x" * 5000)]))

    def test_number(self) -> None:
        """The number of fields is limited, those that are ignored among them."""
        extra = [Part(f"x{number}", b"") for number in range(MAX_FIELDS - len(parts()))]
        self.receive(form([*parts(), *extra]))
        self.refuse(RequestTooLarge, form([*parts(), *extra, Part("y", b"")]))

    def test_headers(self) -> None:
        """So are the headers of each."""
        long = b"X-Long: " + b"x" * 5000 + b"\r\n" + parts()[1].encode()
        self.refuse(RequestTooLarge, form([long]))
        many = b"".join(b"X-%d: x\r\n" % number for number in range(20)) + parts()[1].encode()
        self.refuse(RequestTooLarge, form([many]))


class MalformedTests(UploadTestCase):
    """What is no form."""

    def test_media_type(self) -> None:
        """Another media type is refused, and named."""
        for other in ("application/json", "application/x-www-form-urlencoded", "multipart/mixed"):
            with self.assertRaises(UnsupportedMediaType) as caught:
                self.receiver(content_type=f"{other}; boundary=x")
            self.assertIn(other, caught.exception.detail)
        with self.assertRaises(UnsupportedMediaType):
            self.receiver(content_type="")

    def test_boundary(self) -> None:
        """A boundary is needed, quoted or not, the type in upper case or not."""
        for content_type in ("multipart/form-data", 'multipart/form-data; boundary=""'):
            with self.assertRaises(MalformedRequest) as caught:
                self.receiver(content_type=content_type)
            self.assertIn("leave the header to the library", str(caught.exception))
        for content_type in (
            f'multipart/form-data; charset=utf-8; boundary="{BOUNDARY}"',
            f"Multipart/Form-Data; BOUNDARY={BOUNDARY}",
        ):
            self.receive(form(parts()), content_type=content_type)

    def test_cut_off(self) -> None:
        """A form that is cut off anywhere is no form."""
        body = form(parts())
        for length in [*range(1, len(body) - 2, 13), len(body) - 3]:
            receiver = self.receiver()
            receiver.feed(body[:length])
            with self.assertRaises(MalformedRequest):
                self.finish(receiver)
            receiver.abandon()

    def test_nothing(self) -> None:
        """Neither is nothing."""
        with self.assertRaises(MalformedRequest):
            self.finish(self.receiver(0))

    def test_garbage(self) -> None:
        """Nor what does not hold together."""
        good = parts()[1].encode()
        for body in (
            b"hello",
            b"x" + form(parts()),
            b"x" * 20
            + form([Part("token", b"x"), *parts()]),  # of which a cut hides the first part
            b"hello\r\n" + form(parts()),
            form(parts()).replace(b"\r\n", b"\n"),
            form([b"no header\r\n\r\nx"]),
            form([b'Content-Disposition: form-data; name="a";\n\r\n\r\nx', *parts()]),
            form([b"\r\n\r\nx"]),
            form([good.replace(b"form-data", b"attachment")]),
            form([b"Content-Length: 3\r\n" + good]),
            form([good]).replace(BOUNDARY.encode() + b"--", BOUNDARY.encode() + b"xx"),
        ):
            self.refuse(MalformedRequest, body)

    def test_headers_not_utf8(self) -> None:
        """Headers of a part that are not UTF-8 are told so, with the field if that can be read."""
        said = "the headers of a part must be UTF-8, with the names in them"
        for header, field in (
            (b'form-data; name="submission[a]"; filename="caf\xe9.py"', "submission[a]"),
            (b'form-data; filename="caf\xe9.py"; name=oid', "commit_oid"),
            (b'form-data; name="' + b"a" * 100 + b'"; x="\xe9"', "a" * 80),
        ):
            part = b"Content-Disposition: " + header + b"\r\n\r\nx"
            error = self.refuse(InvalidField, form([part, *parts()]), field)
            self.assertEqual(error.detail, f"{field}: {said}")
        for part in (
            b'Content-Disposition: form-data; name="\xe9"\r\n\r\nx',
            b'Content-Disposition: form-data; name="submission[\xe9]"; filename="x"\r\n\r\nx',
            b"X-Caf\xe9: x\r\n" + parts()[1].encode(),
        ):
            error = self.refuse(MalformedRequest, form([part]))
            self.assertEqual(error.detail, f"malformed form: {said}")

    def test_longer_than_announced(self) -> None:
        """More than was announced is not taken."""
        body = form(parts())
        receiver = self.receiver(len(body) - 10)
        with self.assertRaises(MalformedRequest):
            receiver.feed(body)
        receiver.abandon()

    def test_headers_of_a_part_are_limited(self) -> None:
        for header in ("X: " + "y" * 2048, "X: y" + "; a=b" * 33, "Content-Type: x/y" + ";" * 33):
            receiver = self.receiver()
            body = form(parts()).replace(b"\r\n\r\n", f"\r\n{header}\r\n\r\n".encode(), 1)
            with self.assertRaisesRegex(RequestTooLarge, "a part has over"):
                receiver.feed(body)
            receiver.abandon()

    def test_names_of_files_may_have_semicolons(self) -> None:
        name = ";" * 200
        receiver = self.receiver()
        receiver.feed(form([Part("submission[x]", b"y", name), *parts(source=None)]))
        self.assertEqual(self.finish(receiver).request.submission[0].filename, name)

    def test_abandoned(self) -> None:
        """What is given up in the middle counts no more, whether it was on the disk or not."""
        large = Configuration(limits=LimitSettings(request_body=4 * WRITE_BATCH_BYTES))
        for size in (10_000, 2 * WRITE_BATCH_BYTES):
            receiver = self.receiver(configuration=large)
            receiver.feed(form(parts(source=b"x" * size))[:-1000])
            self.assertGreater(self.spool.used, receiver.received_bytes)
            self.assertEqual(len(list(self.uploads.iterdir())), size > WRITE_BATCH_BYTES)
            receiver.abandon()
            self.assertEqual((self.spool.used, self.unwritten.size), (0, 0))
            self.assertEqual(list(self.uploads.iterdir()), [])

    def test_disk(self) -> None:
        """What the disk does not take is said without its path, which the log has."""
        self.uploads.rmdir()
        for why in ("No such file or directory", "Not a directory"):
            receiver = self.receiver()
            receiver.feed(form(parts()))
            with capturedLogs() as events, self.assertRaises(ServerBusy) as caught:
                self.finish(receiver)
            self.assertEqual(caught.exception.detail, f"the form cannot be stored: {why}")
            self.assertIn(str(self.uploads), formatEvent(events[0]))
            if not self.uploads.exists():
                self.uploads.write_text("no directory")
