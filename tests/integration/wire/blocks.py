"""Blocks: data and files that real evaluators send, and what becomes of broken ones."""

from __future__ import annotations

from base64 import b64encode

from tests.integration.client import data, joined, python, text
from tests.integration.harness import DaemonTestCase

HELPERS = r"""
import json, os, sys, time
def mark(name): return os.environ["EVALUATION_" + name].encode()
def say(data): os.write(1, data)
def block(*lines): say(b"\n".join([b"\n" + mark("DATA_BEGIN"), *lines, mark("DATA_END"), b""]))
def file(head, body):
    say(b"\n%s\n%s\n\n%s\n%s\n" % (mark("FILE_BEGIN"), head, body, mark("FILE_END")))
AS_PATH = b'X-SEGI-As: path\nContent-Disposition: attachment; filename="%s"'
"""

REFUSED = ("protocol", "evaluation_error")


class BlockCase(DaemonTestCase):
    async def run_program(self, program: str) -> list[dict[str, object]]:
        return await self.run_command(python(HELPERS + program))

    async def test_data_comes_between_the_text_around_it(self) -> None:
        events = await self.run_program(
            r"say(b'before'); block(b'{\"a\": [1, null]}', b'\"two\"'); say(b'after\n')"
        )
        self.assertEqual(joined(events), ["before", [{"a": [1, None]}], ["two"], "after\n"])

    async def test_value_arrives_before_its_block_ends(self) -> None:
        program = r"say(b'\n' + mark('DATA_BEGIN') + b'\n1\n'); time.sleep(600)"
        identifier = await self.begin(python(HELPERS + program))
        page = await self.client.first_page(identifier)
        self.assertEqual(data(page["data"]), [1])
        await self.client.cancel(identifier)

    async def test_file_by_content_has_its_name_and_type(self) -> None:
        content = bytes(range(256)) * 10
        events = await self.run_program(
            "file(b'Content-Type: image/png\\nContent-Disposition: attachment;"
            " filename=\"a/b plot.png\"', bytes(range(256)) * 10); say(b'after')"
        )
        wanted = {
            "type": "file",
            "filename": "b plot.png",
            "content_type": "image/png",
            "content_base64": b64encode(content).decode(),
        }
        self.assertEqual(joined(events), [[wanted], "after"])

    async def test_files_by_path_are_read_from_each_place(self) -> None:
        events = await self.run_program(
            r"""
for folder in (".", os.environ["TEMPORARY_DIRECTORY"], os.environ["HOME"]):
    path = os.path.join(folder, "report.bin")
    with open(path, "wb") as report:
        report.write(b"\0\xff" * 500_000)
    file(AS_PATH % b"name.bin", path.encode())
    os.remove("README") if os.path.exists("README") else None
say(b"after")
"""
        )
        content = b64encode(b"\0\xff" * 500_000).decode()
        self.assertEqual([one["content_base64"] == content for one in data(events)], [True] * 3)
        self.assertEqual({one["filename"] for one in data(events)}, {"name.bin"})
        self.assertEqual(joined(events)[-1], "after")

    async def test_foreign_paths_are_refused(self) -> None:
        events = await self.run_program(
            r"""
os.symlink("/etc/passwd", "link")
os.symlink("/etc", "dir")
os.mkfifo("fifo")
with open("large", "wb") as large:
    large.truncate(3 * 2**20)
for path in (b"/etc/passwd", b"../../../../../../etc/passwd", b"link", b"dir/passwd", b"fifo",
             b"/dev/zero", b"/proc/self/environ", b".", b"missing", b"large", b"a\0b",
             b"/proc/self/root/etc/passwd", b"//etc/passwd", b"x" * 5000, b"/dev/fd/1",
             os.environb[b"SUBMISSION_FILE_SOLUTION"] + b"/../../../../../key"):
    file(AS_PATH % b"x", path)
    say(path[-4:].replace(b"\0", b"") + b"\n")
"""
        )
        refused = data(events)
        self.assertEqual([(one.get("reason"), one["type"]) for one in refused], [REFUSED] * 16)
        self.assertEqual(text(events).count("\n"), 16)
        self.assertNotIn("root:", str(events))

    async def test_file_named_at_the_end_is_read_before_it_is_gone(self) -> None:
        program = "open('last', 'w').write('x' * 10**6); file(AS_PATH % b'last', b'last')"
        for _ in range(2):
            (one,) = data(await self.run_program(program))
            self.assertEqual(one["content_base64"], b64encode(b"x" * 10**6).decode())
