"""`web.upload`: forms that are refused, as early as that can be known."""

from __future__ import annotations

from tawebeval.config import Configuration, LimitSettings, RepositoryFetchSettings
from tawebeval.core.form import MAX_FIELD_NAME_LENGTH, MAX_FIELDS
from tawebeval.errors import (
    InvalidField,
    MalformedRequest,
    RequestTooLarge,
)
from tests.cases.uploads import UploadTestCase, without
from tests.fakes.clients import BOUNDARY, Part, form, parts


class FieldTests(UploadTestCase):
    def test_missing_field_names_the_nearest_unknown_one(self) -> None:
        body = form([Part("other", b""), Part("commit", b"x"), *without("commit_oid")])
        said = str(self.refuse(InvalidField, body, "commit_oid"))
        self.assertTrue(
            said.endswith("; 'commit' is no known field: rename it to commit_oid"), said
        )

    def test_field_may_not_be_repeated(self) -> None:
        good = parts(branch=b"main", depth=b"1", directory=b"a", seed=b"1")
        for part in good:
            self.refuse(InvalidField, form([*good, part]), part.name)

    def test_allowed_protocols_are_configured(self) -> None:
        body = form(parts(url=b"file:///srv/x.git"))
        allowed = Configuration(repositories=RepositoryFetchSettings(protocols=("file",)))
        request = self.receive(body, configuration=allowed).request
        self.assertEqual(request.repository.url, "file:///srv/x.git")

    def test_text_that_is_not_utf8_is_refused(self) -> None:
        for name in ("evaluator_cmd", "directory", "seed"):
            self.refuse(InvalidField, form(parts(**{name: b"\xff"})), name)

    def test_malformed_file_name_is_refused_and_nothing_written(self) -> None:
        for filename in (".", "..", "a/", "a/..", "..\\..", "x" * 256, "é" * 128, "a\0b"):
            part = Part("submission[a]", b"x", filename)
            self.refuse(InvalidField, form([part, *parts()]), "submission[a]")
        self.assertEqual(list(self.uploads.iterdir()), [])

    def test_name_of_a_field_is_limited(self) -> None:
        longest = Part(f"submission[{'a' * MAX_FIELD_NAME_LENGTH}]", b"x", "x")
        self.receive(form([longest, *parts()]))
        longer = Part(f"submission[{'a' * (MAX_FIELD_NAME_LENGTH + 1)}]", b"x", "x")
        error = self.refuse(InvalidField, form([longer, *parts()]), longer.name[:80])
        self.assertIn(f"at most {MAX_FIELD_NAME_LENGTH} characters", error.detail)


class LimitTests(UploadTestCase):
    def test_body_of_the_limit_is_taken_and_one_byte_more_refused(self) -> None:
        body = form(parts(source=b"x" * (20_000 - len(form(parts(source=b""))))))
        for length in (20_000, None):
            receiver = self.receiver(length)
            receiver.feed(body)
            self.finish(receiver)
        receiver = self.receiver()
        receiver.feed(form(parts(source=b"x" * 30_000))[:20_000])
        for refused in (lambda: self.receiver(20_001), lambda: receiver.feed(b"x")):
            error = self.assertRaises(RequestTooLarge, refused)
            self.assertEqual(error.extra_members, {"limit": 20_000})
        receiver.abandon()

    def test_folded_headers_are_few(self) -> None:
        head = b'Content-Disposition: form-data;\r\n name="x"\r\nX-Odd: y'
        self.receive(form([head + b"\r\n z" * 99 + b"\r\n\r\n", *parts()]))
        self.refuse(RequestTooLarge, form([head + b"\r\n z" * 100 + b"\r\n\r\n", *parts()]))

    def test_each_text_field_has_a_limit_in_bytes(self) -> None:
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

    def test_ignored_text_has_no_limit_of_its_own(self) -> None:
        self.receive(form([*parts(), Part("other", b"x" * 5000)]))

    def test_number_of_fields_is_limited(self) -> None:
        extra = [Part(f"x{number}", b"") for number in range(MAX_FIELDS - len(parts()))]
        self.receive(form([*parts(), *extra]))
        self.refuse(RequestTooLarge, form([*parts(), *extra, Part("y", b"")]))

    def test_headers_of_a_field_are_limited(self) -> None:
        long = b"X-Long: " + b"x" * 5000 + b"\r\n" + parts()[1].encode()
        self.refuse(RequestTooLarge, form([long]))
        many = b"".join(b"X-%d: x\r\n" % number for number in range(20)) + parts()[1].encode()
        self.refuse(RequestTooLarge, form([many]))


class MalformedTests(UploadTestCase):
    def test_boundary_is_needed_in_any_notation(self) -> None:
        for content_type in ("multipart/form-data", 'multipart/form-data; boundary=""'):
            with self.assertRaises(MalformedRequest) as caught:
                self.receiver(content_type=content_type)
            self.assertIn("leave the header to the library", str(caught.exception))
        for content_type in (
            f'multipart/form-data; charset=utf-8; boundary="{BOUNDARY}"',
            f"Multipart/Form-Data; BOUNDARY={BOUNDARY}",
        ):
            self.receive(form(parts()), content_type=content_type)

    def test_truncated_form_is_refused(self) -> None:
        body = form(parts())
        for length in [*range(1, len(body) - 2, 13), len(body) - 3]:
            receiver = self.receiver()
            receiver.feed(body[:length])
            with self.assertRaises(MalformedRequest):
                self.finish(receiver)
            receiver.abandon()

    def test_empty_body_is_refused(self) -> None:
        with self.assertRaises(MalformedRequest):
            self.finish(self.receiver(0))

    def test_malformed_multipart_is_refused(self) -> None:
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

    def test_part_headers_that_are_not_utf8_are_refused(self) -> None:
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

    def test_more_than_announced_is_not_taken(self) -> None:
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
