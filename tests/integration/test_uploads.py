"""Forms: what arrives of them, byte for byte, however they are sent."""

from __future__ import annotations

import os
from typing import Any

from tests.integration.raw import Connection, body_of, chunked, head_of, part
from tests.integration.uploads import DESCRIBE, MIB, UploadTestCase, described, identifier_of


class UploadTests(UploadTestCase):
    """By treq, and byte by byte."""

    async def test_files_of_several_fields_arrive_exactly(self) -> None:
        """Binary bytes, nothing at all, line ends of each kind, what looks like a boundary."""
        files = (
            ("solution", "solution.cpp", bytes(range(256)) * 999),
            ("empty", "nothing", b""),
            ("ends", "a b.txt", b"\r\n\n\r\r\n--\r\n"),
            ("text_2", "text.py", b"--boundary\r\n\r\n--boundary--\r\n"),
        )
        identifier = await self.client.evaluate(
            self.repository.url, self.commit, DESCRIBE, files=files
        )
        self.assertEqual(await self.describe(identifier), described(*files))

    async def test_a_field_without_a_file_name_becomes_a_text_file(self) -> None:
        """What was typed into a form is a file called after its field."""
        answer = self.post([*self.fields(), part("submission[source]", b"typed\n")])
        found = await self.describe(identifier_of(answer))
        self.assertEqual(found, described(("source", "source.txt", b"typed\n")))

    async def test_the_base_name_of_a_file_is_kept(self) -> None:
        """Directories of either kind go, and any other character stays."""
        for sent, kept in (
            ("dir/a.py", "a.py"),
            ("../../etc/passwd", "passwd"),
            ("C:\\dir\\b.py", "b.py"),
            ("été ñ 文.py", "été ñ 文.py"),
            (".hidden", ".hidden"),
            ("-rf *; $(x) `y`", "-rf *; $(x) `y`"),
            ("x" * 255, "x" * 255),
            ("a\tb\x01", "a\tb\x01"),
            ("a%0Ab%00", "a\nb%00"),  # a newline as browsers write it
            ("a\rb", "a\rb"),
        ):
            answer = self.post([*self.fields(), part("submission[s]", b"x", sent)])
            found = await self.describe(identifier_of(answer))
            self.assertEqual(found, described(("s", kept, b"x")))

    async def test_a_line_feed_in_a_header_is_refused(self) -> None:
        """It would end the header; browsers write %0A for one in the name of a file."""
        answer = self.post([*self.fields(), part("submission[s]", b"x", "a\nb")])
        self.assertIn("line feed", str(answer.problem(400)["detail"]))

    async def test_other_fields_are_ignored(self) -> None:
        """A field that nobody knows changes nothing, file or not, however often it comes."""
        parts = [part("submit", b"Go"), part("submit", b"again"), part("x[y]", b"\xff", "z")]
        answer = self.post([*parts, *self.fields(), part("submission[s]", b"x", "s")])
        self.assertEqual(await self.describe(identifier_of(answer)), described(("s", "s", b"x")))

    async def test_a_large_file_arrives_exactly(self) -> None:
        """30 MB by treq, without the daemon holding them in memory."""
        content = os.urandom(MIB) * 30
        small = self.daemon.memory
        identifier = await self.client.evaluate(
            self.repository.url, self.commit, DESCRIBE, files=[("s", "large", content)]
        )
        self.assertLess(self.daemon.memory - small, 20 * MIB)
        self.assertEqual(await self.describe(identifier), described(("s", "large", content)))

    async def test_chunked_forms_arrive_exactly(self) -> None:
        """A form whose length is not announced, in chunks of any size."""
        content = os.urandom(5000)
        body = body_of([*self.fields(), part("submission[s]", content, "s")])
        for size in (1, 7, 1000, len(body)):
            with Connection(self.daemon.port) as connection:
                head = head_of(None, "Transfer-Encoding: chunked")
                answer = connection.ask(head + chunked(body, size))
            self.client.evaluations.append(identifier_of(answer))
            self.assertEqual(
                await self.describe(identifier_of(answer)), described(("s", "s", content))
            )

    async def test_a_form_byte_by_byte_arrives_exactly(self) -> None:
        """However the network cuts a form, it is the same."""
        body = body_of([*self.fields(), part("submission[s]", b"\r\n--\r\n-", "s")])
        with Connection(self.daemon.port) as connection:
            for byte in head_of(len(body)) + body:
                connection.send(bytes([byte]))
            answer = connection.answer()
        self.client.evaluations.append(identifier_of(answer))
        self.assertEqual(
            await self.describe(identifier_of(answer)), described(("s", "s", b"\r\n--\r\n-"))
        )

    async def test_expect_100_is_answered_before_the_body(self) -> None:
        """A client that asks whether to send its body is told to, or is told why not."""
        body = body_of([*self.fields(), part("submission[s]", b"x", "s")])
        with Connection(self.daemon.port) as connection:
            answer = connection.ask(head_of(len(body), "Expect: 100-continue"))
            self.assertEqual(answer.code, 100)
            answer = connection.ask(body)
        self.client.evaluations.append(identifier_of(answer))
        self.assertEqual(await self.describe(identifier_of(answer)), described(("s", "s", b"x")))
        with Connection(self.daemon.port) as connection:
            connection.ask(head_of(50 * MIB, "Expect: 100-continue")).problem(413)

    async def test_an_idempotency_key_gives_the_first_answer_again(self) -> None:
        """The same key with the same form begins nothing new; with another form it is refused."""

        async def post(solution: bytes, key: str) -> Any:
            return await self.client.post(
                *(self.repository.url, self.commit, "exec sleep 600"),
                files=[("s", "s", solution)],
                headers={"Idempotency-Key": key},
            )

        first, again = await post(b"one", "key-1"), await post(b"one", "key-1")
        self.assertEqual(first.json, again.json)
        (await post(b"two", "key-1")).problem(422)
        other = await post(b"one", "key-2")
        self.assertNotEqual(other.json, first.json)
        for answer in (first, other):
            await self.client.cancel(answer.json["evaluation_id"])
        self.assertEqual((await post(b"one", "key-1")).json, first.json)
        await self.client.follow(first.json["evaluation_id"])
        self.assertNotEqual((await post(b"one", "key-1")).json, first.json, "it was freed")
