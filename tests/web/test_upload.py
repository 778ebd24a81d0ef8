"""`web.upload`: forms, fed whole, byte by byte and in any pieces."""

from __future__ import annotations

from collections.abc import Iterable

from tawebeval.core.form import SubmissionFile
from tests.cases.uploads import UploadTestCase, files, without
from tests.fakes.clients import BOUNDARY, Part, form, parts
from tests.fakes.world import OID


class GoodFormTests(UploadTestCase):
    """Forms that are as they should be."""

    def test_form(self) -> None:
        """Every field comes to its place, and the file to the disk."""
        upload = self.receive(
            form(
                parts(
                    branch=b"main",
                    depth=b"3",
                    directory=b"a/./b/",
                    seed=b"12",
                    source=b"\r\n\0\xff",
                )
            )
        )
        request = upload.request
        repository = request.repository
        self.assertEqual(repository.url, "https://example.org/problem.git")
        self.assertEqual((repository.branch, repository.depth), ("main", 3))
        self.assertEqual((request.commit_oid, request.evaluator_cmd), (OID, "./evaluate"))
        self.assertEqual((request.directory, request.seed), ("a/b", 12))
        self.assertEqual(request.submission, (SubmissionFile("source", "solution.py"),))
        self.assertEqual(files(upload), {"submission/source/solution.py": b"\r\n\0\xff"})

    def test_least(self) -> None:
        """What is optional may be absent, or empty."""
        for body in (form(parts()), form(parts(branch=b"", depth=b"", directory=b"", seed=b""))):
            request = self.receive(body).request
            self.assertEqual((request.repository.branch, request.repository.depth), (None, None))
            self.assertEqual((request.directory, request.seed), ("", None))

    def test_empty_line_before(self) -> None:
        """An empty line may stand before the first boundary."""
        self.assertEqual(self.receive(b"\r\n" + form(parts())).request.commit_oid, OID)

    def test_bytes_are_kept(self) -> None:
        """Files are kept to the byte, whatever is in them, boundaries that are none among it."""
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
            self.assertEqual(files(upload), {"submission/source/solution.py": content})

    def test_several_files(self) -> None:
        """Each file of the submission has a directory of its own, so that names may repeat."""
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

    def test_no_file_name(self) -> None:
        """A field of the submission that is no file becomes one, called NAME.txt."""
        upload = self.receive(form([*without("submission[source]"), Part("submission[a]", b"1")]))
        self.assertEqual(files(upload), {"submission/a/a.txt": b"1"})

    def test_base_names(self) -> None:
        """Of a file's name the base name is kept, whatever separates."""
        for given, kept in (
            ("a/b/c.py", "c.py"),
            ("/etc/passwd", "passwd"),
            ("../../x", "x"),
            (r"C:\Users\me\x.py", "x.py"),
            (r"a/b\c", "c"),
            ("ü ñ 文.txt", "ü ñ 文.txt"),
            ("...", "..."),
            (".bashrc", ".bashrc"),
            ("-rf *; $(x) `y`", "-rf *; $(x) `y`"),
            ("a\tb\x01", "a\tb\x01"),
            ("a%0Ab%00", "a\nb%00"),  # a newline as browsers write it
            ("a\rb", "a\rb"),
            ("x" * 255, "x" * 255),
        ):
            part = Part("submission[source]", b"1", given)
            upload = self.receive(form([part, *without("submission[source]")]))
            self.assertEqual(files(upload), {f"submission/source/{kept}": b"1"}, given)
            self.assertEqual(upload.request.submission[0].filename, kept)

    def test_others_are_ignored(self) -> None:
        """Fields of other names are ignored, also repeated ones, files, and those without one."""
        others = [Part("token", b"1"), Part("token", b"2"), Part("file", b"x" * 5000, "../x")]
        upload = self.receive(form([*others, *parts(), Part("", b"x")]))
        self.assertEqual(len(files(upload)), 1)
        self.assertEqual(upload.form_digest, self.receive(form(parts())).form_digest)

    def test_text_sent_as_a_file(self) -> None:
        """A text field is one also when it has a file name."""
        part = Part("commit_oid", OID.encode(), "blob")
        self.assertEqual(self.receive(form([part, *without("commit_oid")])).request.commit_oid, OID)

    def test_upper_case_oid(self) -> None:
        """An OID in upper case is the same commit's."""
        self.assertEqual(self.receive(form(parts(commit_oid=b"C" * 40))).request.commit_oid, OID)

    def test_nothing_on_disk_without_files(self) -> None:
        """Nothing is made on the disk before there is a file."""
        receiver = self.receiver()
        receiver.feed(form(without("submission[source]"))[:-10])
        self.assertEqual(list(self.uploads.iterdir()), [])


class DigestTests(UploadTestCase):
    """The digest, by which repeated forms are told apart."""

    def digest(self, sent: Iterable[Part]) -> bytes:
        """Return the digest of a form with a key."""
        return self.receive(form(sent), key="k").form_digest

    def test_same(self) -> None:
        """The order of fields makes no difference, nor do fields that are ignored."""
        digest = self.digest(parts())
        self.assertEqual(self.digest(reversed(parts())), digest)
        self.assertEqual(self.digest([Part("token", b"x"), *parts()]), digest)

    def test_other(self) -> None:
        """Every content, name and file name does."""
        sent = [
            parts(),
            parts(source=b"print()"),
            parts(seed=b"1"),
            parts(evaluator_cmd=b"./other"),
            [Part("submission[source]", b"print()\n", "other.py"), *parts()[1:]],
            [Part("submission[other]", b"print()\n", "solution.py"), *parts()[1:]],
        ]
        self.assertEqual(len({self.digest(one) for one in sent}), len(sent))

    def test_key(self) -> None:
        """The key comes along."""
        self.assertEqual(self.receive(form(parts()), key="k").idempotency_key, "k")
        self.assertEqual(self.receive(form(parts())).idempotency_key, None)
