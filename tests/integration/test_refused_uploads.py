"""Forms that are refused: before they are read, naming the field, and leaving nothing behind."""

from __future__ import annotations

from io import BytesIO

from twisted.internet import reactor

from tests.integration.harness import until
from tests.integration.raw import Connection, body_of, chunked, head_of, part
from tests.integration.uploads import MIB, UploadTestCase

BROKEN = {
    "repository[url]": (
        *("", "x", "ftp://example.org/x", "https://example.org/x", "ext::sh -c x", "../x"),
        *("--upload-pack=touch /tmp/x", "file://a\nb", "file://user:password@host/x"),
    ),
    "repository[branch]": ("--x", "a..b", "a b", "a:b", "/a"),
    "repository[depth]": ("0", "-1", "many", "1.0"),
    "commit_oid": ("main", "a" * 39, "a" * 41, "g" * 40, "-" + "a" * 39),
    "directory": ("/etc", "a/../b", "..", "a\0b"),
    "evaluator_cmd": ("", " ", "a\0b"),
    "seed": ("-1", str(2**31), "1.0", "x"),
}
NO_SUBMISSIONS = (
    *("submission", "submissions", "submission[", "submission[]", "submission[a"),
    *("submission[A]", "submission[1]", "submission[a-b]", "submission[a]b", "submission[a][b]"),
)


class RefusedUploadTests(UploadTestCase):
    """Mostly byte by byte."""

    def refused(self, field: str, parts: list[bytes]) -> None:
        """Check that a form is refused because of that field."""
        problem = self.post(parts).problem(400)
        self.assertEqual(problem["field"], field, problem)
        self.assertIn(field, str(problem["message"]))

    async def test_over_the_limit_is_refused_before_it_is_read(self) -> None:
        """An announced length over the limit: 413 at once; treq reads it while it still sends."""
        with Connection(self.daemon.port) as connection:
            problem = connection.ask(head_of(34 * MIB + 1)).problem(413)
            self.assertEqual(problem["limit"], 34 * MIB)
        content = BytesIO(b"x" * 40 * MIB)
        answer = await self.client.request(
            "POST", "/evaluate", files=[("submission[s]", ("s", "text/plain", content))]
        )
        answer.problem(413)
        # treq goes on sending as long as it is let.
        await until(lambda: content.closed or content.tell() == 40 * MIB, "treq has sent all")
        await until(
            lambda: not any("Cooperator" in str(call) for call in reactor.getDelayedCalls()),
            "treq does nothing more",
        )

    async def test_chunks_over_the_limit_are_refused(self) -> None:
        """Where no length was announced, 413 comes when it is passed."""
        with Connection(self.daemon.port) as connection:
            connection.send(head_of(None, "Transfer-Encoding: chunked"))
            connection.send(chunked(part("submission[s]", b"x" * 35 * MIB, "s"), MIB)[:-5])
            connection.answer().problem(413)

    async def test_too_many_fields_or_too_long_ones_are_refused(self) -> None:
        """The number of fields, and the length of those that are no files, have limits."""
        self.post([part("x", b"")] * 21).problem(413)
        self.assertEqual(
            self.post(self.fields(evaluator_cmd="x" * 100_000)).problem(413)["field"],
            "evaluator_cmd",
        )

    async def test_broken_values_are_refused_naming_the_field(self) -> None:
        """Each rule of a text field, broken: 400, `field`, and a message that names it."""
        source = part("submission[s]", b"x", "s")
        for name, values in BROKEN.items():
            for value in values:
                self.refused(name, [*self.fields(**{name: value}), source])

    async def test_missing_and_repeated_fields_are_refused_naming_them(self) -> None:
        """What must be there must be there once."""
        source = part("submission[s]", b"x", "s")
        self.refused("submission", self.fields())
        for name in ("repository[url]", "commit_oid", "evaluator_cmd"):
            self.refused(name, [*self.fields(without=name), source])
            self.refused(name, [*self.fields(), source, part(name, b"again")])
        self.refused("submission[s]", [*self.fields(), source, source])
        not_utf8 = part("commit_oid", b"\xff" * 40)
        self.refused("commit_oid", [*self.fields(without="commit_oid"), source, not_utf8])

    async def test_broken_names_are_refused_naming_them(self) -> None:
        """Fields that look like a submission's, and files whose names are none."""
        usual = [*self.fields(), part("submission[s]", b"x", "s")]
        for name in NO_SUBMISSIONS:
            self.refused(name, [*usual, part(name, b"x")])
        for filename in (".", "..", "../..", "a/", "a\\..", "a\0b", "é" * 128, "x" * 300):
            self.refused("submission[t]", [*usual, part("submission[t]", b"x", filename)])

    async def test_a_line_end_in_a_name_is_refused(self) -> None:
        """Who puts the end of a line into a header has written another header, and a broken one."""
        self.post([*self.fields(), part("submission[t]", b"x", "a\r\nb")]).problem(400)

    async def test_forms_that_fall_apart_are_refused(self) -> None:
        """Cut off, without a boundary, without parts: 400, and never a defect."""
        whole = body_of([*self.fields(), part("submission[s]", b"x", "s")])
        for body in (whole[:-4], whole[: len(whole) // 2], b"", b"nonsense", b"--\r\n" * 100):
            with Connection(self.daemon.port) as connection:
                connection.ask(head_of(len(body)) + body).problem(400)
        bare = head_of(len(whole)).replace(b"; boundary=----a-boundary", b"")
        with Connection(self.daemon.port) as connection:
            connection.ask(bare + whole).problem(400)

    async def test_other_media_types_are_refused(self) -> None:
        """415 for JSON, a form of the simple kind, plain text, and none at all."""
        for kind in ("application/json", "application/x-www-form-urlencoded", "text/plain", "x"):
            answer = await self.client.request(
                "POST", "/evaluate", data=b"{}", headers={"Content-Type": kind}
            )
            answer.problem(415)
        (await self.client.request("POST", "/evaluate")).problem(415)

    async def test_a_dropped_connection_leaves_nothing(self) -> None:
        """What had arrived of a form is removed when its client goes, or sends nonsense."""
        uploads = self.daemon.state / "uploads"
        start = b"".join([*self.fields(), part("submission[s]", b"x" * MIB, "s")])
        for framing in (head_of(30 * MIB), head_of(30 * MIB, "Idempotency-Key: k")):
            with Connection(self.daemon.port) as connection:
                connection.send(framing + start)
                await until(lambda: list(uploads.glob("*/submission/s/s")), "a part is there")
            await until(lambda: not list(uploads.iterdir()), "nothing is left")

    async def test_a_refused_form_leaves_nothing(self) -> None:
        """An error after a file has arrived removes the file."""
        self.post([part("submission[s]", b"x" * MIB, "s"), part("submission[", b"")]).problem(400)
        self.post([part("submission[s]", b"x" * MIB, "s")]).problem(400)
        await until(lambda: not list((self.daemon.state / "uploads").iterdir()), "nothing is left")
