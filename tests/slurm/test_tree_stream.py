"""`slurm.tree_stream`: trees as streams, and streams that attack who unpacks them."""

from __future__ import annotations

import io
import json
import os
import tracemalloc
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.slurm import tree_stream
from tawebeval.slurm.tree_stream import (
    BrokenStream,
    StreamEnded,
    TreeSize,
    decode_tree,
    encode_tree,
)


def build_stream(*lines: object) -> bytes:
    """Return a stream of entries, each a line or bytes of content."""
    stream = b""
    for line in (*lines, None):
        stream += line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
    return stream


class TreeTests(SynchronousTestCase):
    """Trees that are sent and made again."""

    def make_directory(self) -> Path:
        """Return an empty directory."""
        path = Path(self.mktemp()).resolve()
        path.mkdir()
        return path

    def describe(self, top: Path) -> dict[str, object]:
        """Return mode and content of all entries."""
        found: dict[str, object] = {}
        for folder, names, files in os.walk(os.fsencode(top)):
            for name in (*names, *files):
                path = os.path.join(folder, name)
                content: object = None
                if os.path.islink(path):
                    content = os.readlink(path)
                elif os.path.isfile(path):
                    with open(path, "rb") as file:
                        content = file.read()
                mode = os.lstat(path).st_mode
                found[os.fsdecode(os.path.relpath(path, os.fsencode(top)))] = (mode, content)
        return found

    def test_round_trip(self) -> None:
        """Names of any bytes, modes, links that lead out, empty and large files."""
        self.patch(tree_stream, "CHUNK_BYTES", 100)
        source, target = self.make_directory(), self.make_directory()
        (source / "a" / "b").mkdir(parents=True)
        (source / "empty").touch()
        (source / "a" / "run").write_bytes(bytes(range(256)) * 9)
        (source / "a" / "run").chmod(0o755)
        Path(os.fsdecode(os.fsencode(source) + b"/a/\xff\n\xe9")).write_text("odd")
        (source / "a" / "b" / "out").symlink_to("/etc/passwd")
        (source / "a" / "b" / "up").symlink_to("../../..")
        pieces = list(encode_tree(source))
        self.assertLess(max(map(len, pieces)), 400)
        size = decode_tree(io.BytesIO(b"".join(pieces)), target)
        self.assertEqual(self.describe(target), self.describe(source))
        self.assertEqual(size, TreeSize(7, 9 * 256 + 3 + len("/etc/passwd") + len("../../..")))

    def test_memory(self) -> None:
        """A transfer takes at most 1 MiB, whatever the files, beside 128 KiB of a walk."""
        source = self.make_directory()
        for number in range(8):
            (source / str(number)).write_bytes(bytes(tree_stream.CHUNK_BYTES - 100))
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        for piece in encode_tree(source):
            self.assertLess(len(piece), 2 * tree_stream.CHUNK_BYTES)
        self.assertLess(tracemalloc.get_traced_memory()[1], 2**20)

    @given(st.integers(0, 10**6))
    def test_truncated(self, cut: int) -> None:
        """A stream that ends anywhere is refused."""
        stream = build_stream(
            ["d", "a", 0o755, 0], ["f", "a/f", 0o644, 5], b"12345", ["l", "l", 0, 4], b"/etc"
        )
        cut %= len(stream)
        with self.assertRaises(StreamEnded):
            decode_tree(io.BytesIO(stream[:cut]), self.make_directory())

    def test_attacks(self) -> None:
        """Paths out of the tree, other kinds, wrong sizes and odd lines are refused."""
        outside = self.make_directory()
        link = ["l", "link", 0o777, len(str(outside))], str(outside).encode()
        broken: tuple[bytes, ...] = (
            build_stream(["f", "../x", 0o644, 1], b"x"),
            build_stream(["f", f"{outside}/x", 0o644, 1], b"x"),
            build_stream(["f", "./x", 0o644, 1], b"x"),
            build_stream(["f", "a\0b", 0o644, 1], b"x"),
            build_stream(["c", "device", 0o644, 0]),
            build_stream(["p", "fifo", 0o644, 0]),
            build_stream(["d", "a", 0o755, 5], b"12345"),
            build_stream(["f", "a", 0o644, 4], b"12345"),
            build_stream(["f", "a", 0o644, -1]),
            build_stream(["l", "a", 0o777, 9000], b"x" * 9000),
            build_stream(["d", "x" * 40_000, 0o755, 0]),
            build_stream({"kind": "d"}),
            build_stream(["d", "/".join("d" * 257), 0o755, 0]),
            b"GET / HTTP/1.1\r\n\r\n",
        )
        for stream in broken:
            self.assertRaises(BrokenStream, decode_tree, io.BytesIO(stream), self.make_directory())
        refused: tuple[bytes, ...] = (
            build_stream(*link, ["f", "link/x", 0o644, 1], b"x"),
            build_stream(*link, ["f", "link", 0o644, 1], b"x"),
            build_stream(*link, ["d", "link", 0o755, 0]),
            build_stream(["d", "a", 0o755, 0], ["d", "a", 0o755, 0]),
            build_stream(["f", "missing/x", 0o644, 1], b"x"),
        )
        for stream in refused:
            self.assertRaises(OSError, decode_tree, io.BytesIO(stream), self.make_directory())
        self.assertEqual(list(outside.iterdir()), [])

    def test_modes(self) -> None:
        """No set-user-ID bit arrives, and directories stay open to their owner."""
        target = self.make_directory()
        stream = build_stream(["d", "a", 0, 0], ["f", "a/b", 0o6755, 1], b"x")
        decode_tree(io.BytesIO(stream), target)
        self.assertEqual((target / "a").stat().st_mode & 0o7777, 0o700)
        self.assertEqual((target / "a/b").stat().st_mode & 0o7777, 0o755)

    def test_deep(self) -> None:
        """A tree of more levels than the node opens in good time is not sent."""
        source = self.make_directory()
        deepest = source.joinpath(*["d"] * tree_stream.MAX_LEVELS)
        deepest.mkdir(parents=True)
        decode_tree(io.BytesIO(b"".join(encode_tree(source))), self.make_directory())
        (deepest / "file").touch()
        with self.assertRaises(OSError) as refused:
            list(encode_tree(source))
        self.assertEqual(refused.exception.strerror, "a path has more than 256 components")

    def test_other_kinds(self) -> None:
        """A tree with a FIFO is not sent."""
        source = self.make_directory()
        os.mkfifo(source / "fifo")
        self.assertRaises(OSError, list, encode_tree(source))
