"""`web.upload`: forms, fed whole, byte by byte and in any pieces; and refused ones."""

from __future__ import annotations

from collections.abc import Iterable

from tawebeval.config import Configuration, LimitSettings
from tawebeval.core.form import MAX_FIELDS
from tawebeval.errors import InvalidField, MalformedRequest, RequestTooLarge
from tests.cases.uploads import UploadTestCase, files, without
from tests.fakes.clients import BOUNDARY, Part, form, parts
from tests.fakes.world import OID


class GoodFormTests(UploadTestCase):
    def test_empty_line_may_precede_the_first_boundary(self) -> None:
        self.assertEqual(self.receive(b"\r\n" + form(parts())).request.commit_oid, OID)

    def test_fields_are_accepted_under_their_older_names(self) -> None:
        older = {
            "commit_oid": "oid",
            "repository[url]": "repositories[main][url]",
            "repository[branch]": "repositories[main][branch]",
            "repository[depth]": "repositories[main][depth]",
        }
        given = parts(branch=b"main", depth=b"3")
        expected = self.receive(form(given)).request
        for names in (older, *({name: older[name]} for name in older)):
            renamed = (
                Part(names.get(one.name, one.name), one.content, one.filename) for one in given
            )
            self.assertEqual(self.receive(form(renamed)).request, expected, names)

    def test_files_are_kept_to_the_byte(self) -> None:
        for content in (
            b"",
            b"\r\n",
            b"\r\n--",
            b"\r\n--" + BOUNDARY[:-1].encode(),
            b"--" + BOUNDARY.encode(),
            b"x\r\n--" + BOUNDARY.encode()[:-1] + b"\r\n\r\n",
            bytes(range(256)) * 8,
            b"\r" * 40 + b"\n" * 40,
        ):
            upload = self.receive(form(parts(source=content)))
            self.assertEqual(upload.request.submission[0].size, len(content))
            self.assertEqual(files(upload), {"submission/source/solution.py": content})

    def test_each_file_has_a_directory_of_its_own(self) -> None:
        more = [Part("submission[b_2]", b"2", "solution.py"), Part("submission[c]", b"3", "x")]
        upload = self.receive(form([*parts(), *more]))
        self.assertEqual(
            files(upload),
            {
                "submission/source/solution.py": b"print()\n",
                "submission/b_2/solution.py": b"2",
                "submission/c/x": b"3",
            },
        )
        self.assertEqual([f.field for f in upload.request.submission], ["source", "b_2", "c"])

    def test_unknown_fields_are_ignored(self) -> None:
        others = [Part("token", b"1"), Part("token", b"2"), Part("file", b"x" * 5000, "../x")]
        upload = self.receive(form([*others, *parts(), Part("", b"x")]))
        self.assertEqual(len(files(upload)), 1)
        self.assertEqual(upload.form_digest, self.receive(form(parts())).form_digest)

    def test_text_field_may_have_a_file_name(self) -> None:
        part = Part("commit_oid", OID.encode(), "blob")
        self.assertEqual(self.receive(form([part, *without("commit_oid")])).request.commit_oid, OID)

    def test_nothing_is_on_disk_before_the_first_file(self) -> None:
        receiver = self.receiver()
        receiver.feed(form(without("submission[source]"))[:-10])
        self.assertEqual(list(self.uploads.iterdir()), [])


class ClientTests(UploadTestCase):
    def receive_file(self, head: bytes, content: bytes = b"1") -> dict[str, bytes]:
        part = head + b"\r\n\r\n" + content
        return files(self.receive(form([part, *without("submission[source]")])))

    def test_file_names_are_read_in_the_forms_of_clients(self) -> None:
        source = b'form-data; name="submission[source]"'
        for parameters, kept in (
            (b"; filename*=utf-8''s%C3%B6l.py", "söl.py"),  # requests
            (b"; FileName*=ISO-8859-1'de's%F6l.py", "söl.py"),
            (b"; filename=\"=?utf-8?B?c8O2bC5weQ==?=\"; filename*=utf-8''s%C3%B6l.py", "söl.py"),
            (b"; filename*=utf-8''a%2Fb.py; filename=c.py", "b.py"),
            (b"; filename=sol.py; filename*=utf-8''sol.py", "sol.py"),  # .NET
            (b"; filename=sol.py", "sol.py"),
            (b"; filename=s\xc3\xb6l [1].py ", "söl [1].py"),
            (b'; filename="s\xc3\xb6l.py"', "söl.py"),
            (b'; filename="a%22b%0A.py"', 'a"b\n.py'),  # browsers
            (b'; filename="100%.py"', "100%.py"),
            (b'; filename="a\\"b.py"', 'a"b.py'),  # curl before 7.81
            (b'; filename="C:\\Users\\ann\\sol.py"', "sol.py"),
            (b"; filename=\"x; filename*=utf-8''y.py\"", "x; filename*=utf-8''y.py"),
            (b'; size=1; filename="sol.py"; creation-date="Wed, 12 Feb 1997"', "sol.py"),
        ):
            for disposition in (source + parameters, b"form-data" + parameters + source[9:]):
                found = self.receive_file(b"content-disposition: " + disposition)
                self.assertEqual(found, {f"submission/source/{kept}": b"1"}, disposition)

    def test_names_of_fields_may_be_unquoted(self) -> None:
        for name in (b"name=submission[source]", b"name = submission[source] "):
            head = b"Content-Disposition: form-data; " + name + b"; filename=x.py"
            self.assertEqual(self.receive_file(head), {"submission/source/x.py": b"1"})
        limit = b"Content-Disposition: form-data; name=limits[cpu]\r\n\r\n7"
        self.assertEqual(self.receive(form([limit, *parts()])).request.limits, {"cpu": 7})

    def test_file_input_without_a_file_is_absent(self) -> None:
        absent = [Part(f"submission[{name}]", b"", "") for name in ("other", "source")]
        for sent in ([*absent, *parts()], [*parts(), *absent]):
            self.assertEqual(
                list(files(self.receive(form(sent)))), ["submission/source/solution.py"]
            )
        self.assertIsNone(self.receive(form([Part("seed", b"", ""), *parts()])).request.seed)
        self.refuse(InvalidField, form([*absent, *without("submission[source]")]), "submission")
        self.refuse(InvalidField, form([*parts(), Part("submission[A]", b"", "")]), "submission[A]")
        self.refuse(
            InvalidField, form([Part("submission[a]", b"x", ""), *parts()]), "submission[a]"
        )

    def test_crlf_in_a_command_becomes_lf(self) -> None:
        command, label = b"cd a\r\nmake\rx\n\r\n./run\r", Part("metadata[a]", b"x\r\ny")
        request = self.receive(form(parts(evaluator_cmd=command))).request
        self.assertEqual(request.evaluator_cmd, "cd a\nmake\rx\n\n./run\r")
        self.refuse(InvalidField, form([label, *parts()]), "metadata[a]")
        text = Part("submission[source]", b"a\r\nb\n")
        upload = self.receive(form([text, *without("submission[source]")]))
        self.assertEqual(files(upload), {"submission/source/source.txt": b"a\r\nb\n"})

    def test_parts_with_a_transfer_or_content_encoding_are_refused(self) -> None:
        head = b'Content-Disposition: form-data; name="submission[source]"; filename="x"\r\n'
        for coding in (b"binary", b"8bit", b"7BIT", b" binary "):
            found = self.receive_file(head + b"Content-Transfer-Encoding: " + coding, b"=3D\xff")
            self.assertEqual(found, {"submission/source/x": b"=3D\xff"})
        for coding in (b"base64", b"Quoted-Printable", b"x"):
            part = head + b"content-transfer-encoding: " + coding + b"\r\n\r\nMQ=="
            error = self.refuse(InvalidField, form([part, *parts()]), "submission[source]")
            self.assertIn("send the bytes themselves", error.detail)
        self.receive_file(head + b"Content-Encoding: identity", b"")
        for coding in (b"gzip", b"deflate, br"):
            part = head + b"content-encoding: " + coding + b"\r\n\r\n1"
            error = self.refuse(InvalidField, form([part, *parts()]), "submission[source]")
            self.assertIn(f"the Content-Encoding '{coding.decode()}' is not", error.detail)
        ignored = b'Content-Disposition: form-data; name="x"\r\nContent-Transfer-Encoding: base64'
        self.receive(form([ignored + b"\r\n\r\nMQ==", *parts()]))

    def test_malformed_extended_file_names_are_refused(self) -> None:
        head = b'Content-Disposition: form-data; name="submission[source]"; filename*='
        for value in (b"x.py", b"utf-8''%ff", b"utf-16''x", b"utf-8''a b", b"\"utf-8''\"", b""):
            part = head + value + b"\r\n\r\n1"
            error = self.refuse(InvalidField, form([part, *parts()]), "submission[source]")
            self.assertIn("malformed filename*", error.detail)

    def test_file_names_in_rfc_2231_continuations_are_refused(self) -> None:
        head = b'Content-Disposition: form-data; name="submission[source]"; '
        for name in (b"filename*0=a; filename*1=.py", b"FileName*0*=utf-8''a; filename*1=.py"):
            part = head + name + b"\r\n\r\n1"
            error = self.refuse(InvalidField, form([part, *parts()]), "submission[source]")
            self.assertIn("send the name whole", error.detail)


class DigestTests(UploadTestCase):
    def digest(self, sent: Iterable[Part]) -> bytes:
        return self.receive(form(sent), key="k").form_digest

    def test_order_and_ignored_fields_do_not_change_the_digest(self) -> None:
        digest = self.digest(parts())
        self.assertEqual(self.digest(reversed(parts())), digest)
        self.assertEqual(self.digest([Part("token", b"x"), *parts()]), digest)

    def test_digest_depends_on_contents_field_names_and_file_names(self) -> None:
        sent = [
            parts(),
            parts(source=b"print()"),
            parts(seed=b"1"),
            parts(evaluator_cmd=b"./other"),
            [Part("submission[source]", b"print()\n", "other.py"), *parts()[1:]],
            [Part("submission[other]", b"print()\n", "solution.py"), *parts()[1:]],
        ]
        self.assertEqual(len({self.digest(one) for one in sent}), len(sent))


class FieldTests(UploadTestCase):
    def test_field_may_not_be_repeated(self) -> None:
        good = parts(branch=b"main", depth=b"1", directory=b"a", seed=b"1")
        for part in good:
            self.refuse(InvalidField, form([*good, part]), part.name)

    def test_text_that_is_not_utf8_is_refused(self) -> None:
        for name in ("evaluator_cmd", "directory", "seed"):
            self.refuse(InvalidField, form(parts(**{name: b"\xff"})), name)


class LimitTests(UploadTestCase):
    def test_body_at_the_size_limit_is_accepted_and_one_byte_more_refused(self) -> None:
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


class MalformedTests(UploadTestCase):
    def test_multipart_boundary_is_required_and_may_be_quoted(self) -> None:
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

    def test_form_longer_than_its_announced_length_is_refused(self) -> None:
        body = form(parts())
        receiver = self.receiver(len(body) - 10)
        with self.assertRaises(MalformedRequest):
            receiver.feed(body)
        receiver.abandon()

    def test_headers_of_a_part_are_limited(self) -> None:
        folded = b'Content-Disposition: form-data;\r\n name="x"\r\nX-Odd: y' + b"\r\n z" * 29
        self.receive(form([folded + b"\r\n\r\n", *parts()]))
        for header in (
            "X: " + "y" * 2048,
            "X: y" + "; a=b" * 33,
            "Content-Type: x/y" + ";" * 33,
            "X: y" + "\r\n z" * 33,
        ):
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
