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
    """Each evaluator is a program with helpers to write blocks."""

    async def run_program(self, program: str) -> list[dict[str, object]]:
        """Return the events of a program."""
        return await self.run_command(python(HELPERS + program))

    async def test_data_comes_between_the_text_around_it(self) -> None:
        """Text, several values, text: in that order, without the block's terminators."""
        events = await self.run_program(
            r"say(b'before'); block(b'{\"a\": [1, null]}', b'\"two\"'); say(b'after\n')"
        )
        self.assertEqual(joined(events), ["before", [{"a": [1, None]}], ["two"], "after\n"])

    async def test_results_are_summed_up(self) -> None:
        """Results show in the status and the list without a look at the events, and pass as data.

        Values that resemble them pass, too.
        """
        results = (
            rb'{"type": "goal_result", "goal": "fast", "result": true}',
            rb'{"verdict": "accepted", "case": "1", "type": "case", "points": 1.50}',
            rb'{"type": "case", "case": "2", "verdict": "unknown"}',
            rb'{"type": "progress", "done": 2, "total": 2}',
            rb'{"type": "score", "score": 1.50, "maximum": 2}',
        )
        identifier = await self.begin(python(HELPERS + f"block(*{results!r}); say(b'over')"))
        status = await self.client.status(identifier)
        while status["ended"] is None:
            status = await self.client.status(identifier)
        expected = {
            "goals": {"fast": True},
            "goals_omitted": 0,
            "cases": {"accepted": 1},
            "progress": {"done": 2, "total": 2},
            "score": {"score": 1.5, "maximum": 2},
        }
        self.assertEqual(status["results"], expected)
        listed = (await self.client.get("/evaluations")).json["data"]
        self.assertIn(
            (identifier, expected), [(one["evaluation_id"], one["results"]) for one in listed]
        )
        answer = await self.client.ask(identifier)
        for value in results:
            self.assertIn(b'{"type":"data","payload":' + value + b"}", answer.body)

    async def test_a_block_split_over_writes_arrives(self) -> None:
        """One byte at a time, with pauses that flush partial lines, a block is a block."""
        events = await self.run_program(
            r"""
whole = b"text\n" + mark("DATA_BEGIN") + b'\n{"a": "\xc3\xa9"}\n' + mark("DATA_END") + b"\nmore"
for i in range(len(whole)):
    say(whole[i:i + 1])
    if i % 9 == 0:
        time.sleep(0.025)
"""
        )
        self.assertEqual(joined(events), ["text", [{"a": "é"}], "more"])

    async def test_a_block_arrives_while_the_evaluator_runs(self) -> None:
        """A value is delivered when its line is complete, before the block or the run has ended."""
        program = r"say(b'\n' + mark('DATA_BEGIN') + b'\n1\n'); time.sleep(600)"
        identifier = await self.begin(python(HELPERS + program))
        page = await self.client.first_page(identifier)
        self.assertEqual(data(page["data"]), [1])
        await self.client.cancel(identifier)

    async def test_a_file_by_content(self) -> None:
        """A file's bytes come as base64, with its name and type."""
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

    async def test_a_file_by_path(self) -> None:
        """Files in the working directory, TEMPORARY_DIRECTORY and HOME are read from there."""
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

    async def test_a_path_that_is_not_the_evaluators_own_is_refused(self) -> None:
        """Outside, above, links, a fifo, a device, a directory, nothing, too large: all refused."""
        events = await self.run_program(
            r"""
os.symlink("/etc/passwd", "link")
os.symlink("/etc", "dir")
os.mkfifo("fifo")
with open("large", "wb") as large:
    large.truncate(3 * 2**20)
for path in (b"/etc/passwd", b"../../../../../../etc/passwd", b"link", b"dir/passwd", b"fifo",
             b"/dev/zero", b"/proc/self/environ", b".", b"missing", b"large", b"a\0b",
             os.environb[b"SUBMISSION_FILE_SOLUTION"] + b"/../../../../../key"):
    file(AS_PATH % b"x", path)
    say(path[-4:].replace(b"\0", b"") + b"\n")
"""
        )
        refused = data(events)
        self.assertEqual([(one.get("reason"), one["type"]) for one in refused], [REFUSED] * 12)
        self.assertEqual(text(events).count("\n"), 12)
        self.assertNotIn("root:", str(events))

    async def test_a_file_that_is_read_while_the_evaluator_ends(self) -> None:
        """The last thing that a run does may be to name a file: it is read before it is gone."""
        program = "open('last', 'w').write('x' * 10**6); file(AS_PATH % b'last', b'last')"
        for _ in range(5):
            (one,) = data(await self.run_program(program))
            self.assertEqual(one["content_base64"], b64encode(b"x" * 10**6).decode())
